"""What published measurements say of predictions, and predictions corrected by them."""
