"""Optimizers and learning rates for large batches. They need torch alone: any training loop can use them."""

from paceline.optim.lamb import Lamb
from paceline.optim.lars import Lars
from paceline.optim.lbfgs import LBFGS, LossOptimizer
from paceline.optim.rates import scaled_learning_rate, warmup

__all__ = ["LBFGS", "Lamb", "Lars", "LossOptimizer", "scaled_learning_rate", "warmup"]
