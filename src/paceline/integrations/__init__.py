"""Trainers of other packages, whose optimizers make a run's steps; each module needs its package."""
