"""What the pieces of a step take on this host: computing, sending, copying, updating, each measured by itself."""
