"""What is assumed of a cluster on which nothing was measured, and said so."""

from dataclasses import replace

from paceline.plan.base import merged
from paceline.plan.cluster import Cluster
from paceline.plan.habits import Habits
from paceline.plan.words import bytes_text

CUDA_CONTEXT_BYTES = 1.5 * 2**30
"""1 to 2 GiB are held by CUDA's context, its libraries and NCCL's buffers before the first parameter."""

CPU_CONTEXT_BYTES = 0.3 * 2**30
"""What a process holds that has imported torch, roughly."""


def assumed(cluster: Cluster) -> tuple[Cluster, Habits]:
    """The cluster, with what is assumed among its provenance, and how a framework goes about it: nothing overlaps.

    >>> from paceline.plan.clusters.cluster_file import read
    >>> cluster, habits = assumed(read("1x8 A100-80GB"))
    >>> habits.overlap, cluster.provenance["context"]
    (0.0, 'assumed: 1.5 GiB of a worker before the first parameter')
    """
    held = CUDA_CONTEXT_BYTES if cluster.device.kind == "cuda" else CPU_CONTEXT_BYTES
    told = {
        "context": f"assumed: {bytes_text(held)} of a worker before the first parameter",
        "overlap": "assumed: none; summing over replicas and messages between stages hide behind nothing",
    }
    return replace(cluster, provenance=merged(cluster.provenance, told)), Habits(context_bytes=held)
