"""How the processes of one host share memory, wake each other and notice each other's end; two torch backends."""


def register() -> None:
    """Register two backends for CPU ranks with torch.distributed, for ``init_process_group("shm")``; idempotent.

    ``shm`` joins the ranks of one host by shared memory; ``hierarchical`` those of several, by shared memory inside
    each host and by Gloo between them. Code that is written against torch.distributed (DDP, FSDP2, DTensor, pipelining,
    DCP) runs on them unchanged.
    """
    import torch.distributed as dist

    from paceline.comm import hierarchical
    from paceline.comm.shm import process_group

    for backend in (process_group, hierarchical):
        if not hasattr(dist.Backend, backend.NAME.upper()):
            dist.Backend.register_backend(backend.NAME, backend.create, extended_api=True, devices=["cpu"])
