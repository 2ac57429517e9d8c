"""Servers of A, and replicas that push to them: what engines with servers share, whatever starts their processes."""
