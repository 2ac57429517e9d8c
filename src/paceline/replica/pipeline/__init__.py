"""Δ by stages: a model cut into parts, each on a worker of its own."""
