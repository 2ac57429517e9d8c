"""The user's own program on this host: profiled, planned, foretold from its pieces."""
