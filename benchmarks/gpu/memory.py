"""What the planner predicts of a worker's memory, for the tasks that it can be told as a shape."""

from models import Job

from paceline.planner.base import Arrangement
from paceline.planner.cluster_file import read
from paceline.planner.cost import cost
from paceline.planner.shapes.shape import Shape
from paceline.planner.shapes.shape_file import ShapeJob

CLUSTER = "1x1 H100-80GB"
"""What a worker allocates is the same on any GPU."""


def predicted_mib(job: Job) -> float | None:
    """Return MiB of parameters, gradients, optimizer, activations and buffers; None: it is no transformer by itself."""
    if job.task != "gpt2":
        return None
    sizes = job.about.small if job.small else job.about.sizes
    shape = Shape(sizes["layers"], sizes["width"], sizes["heads"], vocab=sizes["words"], sequence=sizes["length"])
    cluster = read(CLUSTER)
    workload = ShapeJob(shape, job.samples).workload(cluster.device)
    peak = cost(workload, cluster, Arrangement(micro_batch=job.samples)).peak
    return (peak.total - peak.context) / 2**20
