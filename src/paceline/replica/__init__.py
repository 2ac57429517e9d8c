"""Δ: where one replica's update is computed."""
