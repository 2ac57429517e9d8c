"""What is said of plans: why, what limits them, what would fit, how far more workers help."""
