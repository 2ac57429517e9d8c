"""Figures: pure functions of what a run left behind."""
