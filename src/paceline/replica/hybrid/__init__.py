"""Replicas that are pipelines of stages whose operators are divided."""
