"""How bytes move between the processes of one host, how one waits, and who is still there."""


def register() -> None:
    """Make backend ``shm`` known to torch.distributed: ``init_process_group("shm")``, for CPU ranks of one host.

    It carries what is written against torch.distributed (DDP, FSDP2, DTensor, pipelining, DCP) over shared memory.
    """
    from paceline.comm.shm.backend import register

    register()
