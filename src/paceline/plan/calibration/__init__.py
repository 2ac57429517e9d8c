"""What published measurements say of predictions, and predictions that they correct."""
