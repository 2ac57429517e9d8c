"""How bytes move between the processes of one host, how one waits, and who is still there."""


def register() -> None:
    """Make two backends for CPU ranks known to torch.distributed: ``init_process_group("shm")``.

    ``shm`` joins the ranks of one host by shared memory; ``hierarchical`` those of several, by shared memory inside
    each host and by Gloo between them. What is written against torch.distributed (DDP, FSDP2, DTensor, pipelining, DCP)
    runs on them unchanged.
    """
    from paceline.comm.backends import register

    register()
