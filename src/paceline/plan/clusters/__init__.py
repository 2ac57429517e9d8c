"""Clusters in words, and what messages take that were measured."""
