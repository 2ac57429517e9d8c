"""How far off messages and products of matrices are predicted, beside published measurements.

    python benchmarks/planner/messages.py

Writes results/messages.csv, results/products.csv and messages.md from the published rows in --data.
"""

import argparse
import csv
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from kit.sheet import Sheet
from kit.work import guarded
from messages_page import page
from product_fit import fitted, relative_errors

from paceline.core.errors import InputError
from paceline.planner.cluster import DeviceGroup
from paceline.planner.collective_times import GroupCollective, Knot, LatencyCurve, Measured
from paceline.planner.shapes.gemm_time import Product, Products

HERE = Path(__file__).parent
DATA = HERE.parents[1].parent / "shared" / "data" / "planner"

Points: TypeAlias = list[tuple[float, float]]
"""(bytes, seconds)."""

KNOTS = 6
KNOWN_BYTES = 2**27
"""Sizes up to this one count as known where larger ones are predicted."""
MULTIPROCESSORS = 132
"""Of an H100 SXM: NVIDIA H100 Tensor Core GPU Architecture, table 3."""
HALVINGS = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Compute all and write the page; returns the exit code."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--data", type=Path, default=DATA, metavar="DIR", help="of the published rows; ../shared/data/…")
    made.add_argument("--out", type=Path, default=HERE, metavar="DIR", help="of results/ and messages.md; this folder")
    said = made.parse_args(arguments)
    return guarded(lambda: write(said.data, said.out), str(said.out))


def write(data: Path, out: Path) -> None:
    """Both sheets and the page."""
    messages = Sheet(out / "results" / "messages.csv", ("device", "workers", "way"))
    products = Sheet(out / "results" / "products.csv", ("way",))
    for row in itertools.chain(curves(data), groups(data), single_points(data)):
        messages.put(row)
    for row in matrices(data):
        products.put(row)
    path = out / "messages.md"
    path.write_text(page(messages.rows, products.rows), encoding="utf-8")
    print(path)


# ------------------------------------------------------------------------------------------------------------- messages


def curves(data: Path) -> Iterator[dict[str, Any]]:
    """Each device and number of workers by itself."""
    for (device, workers), points in nccl(data).items():
        blind = [points[i] for i in np.linspace(0, len(points) - 1, KNOTS).round().astype(int)]
        known = [point for point in points if point[0] <= KNOWN_BYTES]
        ways = {
            f"{KNOTS} best knots, all sizes": (LatencyCurve.of(points, most=KNOTS), points),
            f"{KNOTS} even knots, sizes between": (through(blind), [each for each in points if each not in blind]),
            "2 knots, all sizes": (through([points[0], points[-1]]), points),
            "beyond 128 MiB": (LatencyCurve.of(known, most=KNOTS), points[len(known) :]),
        }
        for way, (curve, asked) in ways.items():
            errors = [abs(curve.seconds(size) / took - 1) for size, took in asked]
            yield _row(device, workers, way, errors)


def groups(data: Path) -> Iterator[dict[str, Any]]:
    """Each number of workers from the others."""
    found = nccl(data)
    for device, workers in found:
        others = {n: points for (d, n), points in found.items() if d == device and n != workers}
        messages = Measured(
            {GroupCollective("all_reduce", DeviceGroup(n, n)): LatencyCurve.of(p) for n, p in others.items()}
        )
        errors = [
            abs(messages.seconds("all_reduce", size, DeviceGroup(workers, workers)) / took - 1)
            for size, took in found[device, workers]
        ]
        yield _row(device, workers, "from other numbers of workers", errors)


def single_points(data: Path) -> Iterator[dict[str, Any]]:
    """Another host with four V100, from the curve of one with the same devices and other links."""
    points = nccl(data)["V100", 4]
    for row in _read(data / "comm_measured_jeanzay.csv"):
        if row["nodes"] == "1":
            predicted = LatencyCurve.of(points).seconds(float(row["payload_bytes"]))
            yield _row("V100", 4, "from another kind of host", [abs(predicted / float(row["duration_s"]) - 1)])


def nccl(data: Path) -> dict[tuple[str, int], Points]:
    """Measured all_reduces by device and workers."""
    found = defaultdict[tuple[str, int], Points](list)
    for row in _read(data / "comm_allreduce_vtrain_pow2.csv"):
        point = (float(row["size_bytes"]), float(row["time_ns_out"]) * 1e-9)
        found[row["gpu"], int(row["n_gpus"])].append(point)
    return dict(found)


def through(points: Points) -> LatencyCurve:
    """All of them."""
    return LatencyCurve(tuple(Knot(*point) for point in points))


def _row(device: str, workers: int, way: str, errors: Sequence[float]) -> dict[str, Any]:
    figures = {"sizes": len(errors), "mean": f"{fmean(errors):.5f}", "worst": f"{max(errors):.5f}"}
    return {"device": device, "workers": workers, "way": way, **figures}


# ------------------------------------------------------------------------------------------------------------- products


def matrices(data: Path) -> Iterator[dict[str, Any]]:
    """All at once, and each half of them from the other."""
    rows = _read(data / "gemm_h100_bf16_xla.csv")
    products = [Product(int(row["b"]), int(row["m"]), int(row["n"]), int(row["k"])) for row in rows]
    rates = [float(row["bf16_tflops_measured"]) * 1e12 for row in rows]
    seconds = [each.flops / rate for each, rate in zip(products, rates, strict=True)]
    device = fitted(products, seconds, MULTIPROCESSORS)
    yield _fit("3 constants, all products", device, products, seconds)
    plain = fitted(products, seconds, 1)  # with one multiprocessor every wave is full
    yield _fit("2 constants: no waves", plain, products, seconds)
    for number in range(HALVINGS):
        order = np.random.default_rng(number).permutation(len(products))
        for half, (known, asked) in enumerate(itertools.permutations(np.array_split(order, 2))):
            found = fitted([products[i] for i in known], [seconds[i] for i in known], MULTIPROCESSORS)
            way = f"held out, halving {number}, half {half}"
            yield _fit(way, found, [products[i] for i in asked], [seconds[i] for i in asked])


def _fit(way: str, device: Products, products: Sequence[Product], seconds: Sequence[float]) -> dict[str, Any]:
    errors = [abs(error) for error in relative_errors(device, products, seconds)]
    return {
        "way": way,
        "products": len(errors),
        "flops_per_s": f"{device.flops_per_s:.4e}",
        "start_s": f"{device.start_s:.4e}",
        "waits": f"{device.waits:.4f}",
        "mean": f"{fmean(errors):.5f}",
        "worst": f"{max(errors):.5f}",
    }


def _read(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        raise InputError(f"no published rows at {path}; write --data and the folder that has them")
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    sys.exit(main())
