"""Synchronous training over torch.distributed, in the processes that torchrun started."""
