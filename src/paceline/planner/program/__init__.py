"""The user's own program on this host: profiled, planned, predicted from its components."""
