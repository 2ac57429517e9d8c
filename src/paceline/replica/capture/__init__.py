"""A model as a graph of operators: exported, cleaned, and checked against the eager model."""
