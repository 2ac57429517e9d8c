"""The forward pass alone, by the workers of one replica."""
