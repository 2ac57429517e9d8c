"""Devices by name."""

from dataclasses import replace

import pytest

from paceline.core.errors import InputError
from paceline.planner.cluster import Device
from paceline.planner.devices import SHEETS, TAUGHT, device, sheet, taught
from paceline.planner.shapes.gemm_time import DeviceEfficiency
from paceline.planner.shapes.shape import Shape
from paceline.planner.shapes.shape_file import DATA_SHEET_SPREAD, ShapeJob


@pytest.mark.parametrize("name", SHEETS)
def test_each_says_all_that_a_plan_needs_and_where_it_is_from(name: str) -> None:
    found = SHEETS[name]
    sizes = [found.memory_bytes, found.memory_bytes_per_s, found.inside_bytes_per_s, found.between_bytes_per_s]
    assert min([*sizes, *found.flops_per_s.values(), found.devices_per_host, found.multiprocessors]) > 0
    assert len(found.source) > 10


@pytest.mark.parametrize("name", SHEETS)
def test_fewer_bits_are_never_slower(name: str) -> None:
    flops = SHEETS[name].flops_per_s
    ordered = [flops[each] for each in ("fp32", "tf32", "fp16", "fp8", "fp4") if each in flops]
    assert ordered == sorted(ordered)


@pytest.mark.parametrize(
    ("name", "precision", "flops_per_s", "memory_gib", "bytes_per_s"),
    [
        # As printed in NVIDIA's data sheets, dense.
        ("A100-40GB", "bf16-mixed", 312e12, 40, 1.555e12),
        ("A100-80GB", "tf32", 156e12, 80, 2.039e12),
        ("H100-80GB", "bf16-mixed", 989.5e12, 80, 3.35e12),
        ("H100-80GB", "fp8-mixed", 1979e12, 80, 3.35e12),
        ("H200-141GB", "fp16-mixed", 989.5e12, 141, 4.8e12),
        ("V100-16GB", "fp16-mixed", 125e12, 16, 0.9e12),
    ],
)
def test_data_sheets(name: str, precision: str, flops_per_s: float, memory_gib: float, bytes_per_s: float) -> None:
    found = device(name, precision)
    assert found.flops_per_s == flops_per_s
    assert found.memory_bytes == memory_gib * 2**30
    assert found.memory_bytes_per_s == bytes_per_s
    assert found.provenance["flops_per_s"] == SHEETS[name].source


@pytest.mark.parametrize("name", SHEETS)
def test_what_rows_taught_comes_with_their_number(name: str) -> None:
    architecture = SHEETS[name].architecture
    said = device(name, "fp32").provenance.get("products", "")
    assert (architecture in TAUGHT) == bool(said)
    if said:
        found = TAUGHT[architecture]
        assert taught(name) == found
        assert f"by {found.rows} published rows of {found.sources} source" in said


def test_products_of_a_named_device_are_as_fast_as_rows_taught() -> None:
    job = ShapeJob(Shape(2, 1024, 8), 8)
    for name, rate in (("H100-80GB", TAUGHT["Hopper"].rate), ("A100-80GB", 1.0)):
        found = job.workload(device(name))
        assert found.kernels.products == pytest.approx(rate * DeviceEfficiency().products)
    own = Device("mine", 1e14, 80e9, 2e12)
    assert job.workload(own).kernels == DeviceEfficiency()
    assert job.workload(own).spread == DATA_SHEET_SPREAD
    whole = replace(job, precision="fp32").workload(device("A64FX-32GB", "fp32"))
    assert whole.spread == TAUGHT["A64FX"].spread > DATA_SHEET_SPREAD


def test_a_family_alone_is_its_first() -> None:
    assert sheet("a100") == SHEETS["A100-40GB"]
    assert sheet("h100-80gb") == SHEETS["H100-80GB"]


def test_links_are_those_beside_it() -> None:
    assert sheet("A100-80GB").inside_bytes_per_s == 300e9


def test_what_is_not_known_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="unknown device 'A100-80'; did you mean 'A100-80GB'"):
        device("A100-80")


def test_arithmetic_that_it_does_not_have_is_refused_with_its_best() -> None:
    with pytest.raises(
        InputError, match='"bf16-mixed": V100-32GB has no such arithmetic; write precision = "fp16-mixed"'
    ):
        device("V100-32GB")
    with pytest.raises(InputError, match='write precision = "fp32"'):
        device("P40-24GB")
