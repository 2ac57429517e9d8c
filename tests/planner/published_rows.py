"""Rows as a table of published runs would have them, with times that are computed with known corrections."""

from itertools import product
from math import exp

import numpy as np

from paceline.planner.calibration.corrections import Case, Corrections, predicted
from paceline.planner.calibration.rows import PublishedRow

COLUMNS = {
    "source_id": "made",
    "framework": "Megatron-DeepSpeed",
    "hw": "A100",
    "peak_tflops": "312",
    "dev_per_node": "8",
    "intra_bw_GBps": "300",
    "inter_bw_GBps_per_dev": "12.5",
    "heads": "16",
    "vocab": "50257",
    "seq": "1024",
    "zero": "0",
    "precision": "fp16",
    "recompute": "full",
    "gpu_mem_gb": "80",
    "status": "ok",
}


def row(name: str, **columns: object) -> PublishedRow:
    """With what is not said as above."""
    return PublishedRow(COLUMNS | {"row_id": name} | {column: str(text) for column, text in columns.items()})


def grid(source: str = "made", **columns: object) -> list[PublishedRow]:
    """Models of three sizes, divided in every way among 8 devices; no outcomes."""
    found = []
    sizes = product((12, 24), (1024, 2048), (1, 2, 8), (1, 2, 4), (1, 4))
    for at, (layers, hidden, shards, stages, samples) in enumerate(sizes):
        if shards * stages <= 8:
            replicas = 8 // shards // stages
            division = {"dp": replicas, "tp": shards, "pp": stages, "mbs": samples, "gbs": 8 * replicas * samples}
            model = {"model": f"gpt-{layers}-{hidden}", "layers": layers, "hidden": hidden, "n_devices": 8}
            found.append(row(f"{source}-{at}", source_id=source, ga=8, **model, **division, **columns))
    return found


def timed(
    rows: list[PublishedRow], corrections: Corrections, *, off: float = 0.0, noise: float = 0.0
) -> list[PublishedRow]:
    """The same with step times: as computed, times exp(off), and noise that is the same each time."""
    drawn = np.random.default_rng(7).normal(0.0, noise, len(rows))
    return [_timed(each, corrections, off + float(more)) for each, more in zip(rows, drawn, strict=True)]


def _timed(made: PublishedRow, corrections: Corrections, off: float) -> PublishedRow:
    case = Case.of(made)
    assert case is not None
    return PublishedRow({**made.cells, "step_time_s": repr(predicted(case, corrections).step_s * exp(off))})
