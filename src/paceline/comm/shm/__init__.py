"""The ``shm`` backend of torch.distributed: CPU ranks of one host, over shared memory."""
