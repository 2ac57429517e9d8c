"""Models given as a shape: a transformer's time and memory, from its sizes alone."""
