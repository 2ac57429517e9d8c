"""Models given as a shape: what a transformer takes and holds, from its sizes alone."""
