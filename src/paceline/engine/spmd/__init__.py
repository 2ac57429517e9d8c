"""Ranks that work together: how they meet, what they send each other, and how a failure of one reaches all."""
