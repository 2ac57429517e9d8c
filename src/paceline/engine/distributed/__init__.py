"""Training over torch.distributed, in the processes that torchrun started: all replicas make each update together."""
