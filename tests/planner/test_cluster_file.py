"""Clusters in words."""

from pathlib import Path

import pytest

from paceline.clock.cluster_file import Links
from paceline.core.errors import InputError
from paceline.planner.cluster_file import from_toml, read
from paceline.planner.devices import SHEETS

OWN = "hosts = {hosts}\ndevices_per_host = {per_host}\n[device]\nflops_per_s = 1e12\nmemory_bytes = 4e9\n"
OWN += "memory_bytes_per_s = 1e11\n"


def own(hosts: int = 1, per_host: int = 1, more: str = "") -> str:
    """A file with a device of its own."""
    return OWN.format(hosts=hosts, per_host=per_host) + more


def test_a_name_says_hosts_devices_and_device() -> None:
    found = read("4x8 H100-80GB")
    assert (found.hosts, found.devices_per_host, found.workers) == (4, 8, 32)
    assert found.device.flops_per_s == SHEETS["H100-80GB"].flops_per_s["bf16"]
    assert found.messages.links.inside_bytes_per_s == 450e9  # type: ignore[attr-defined]


def test_a_device_alone_is_one_of_it() -> None:
    assert read("V100-32GB", "fp16-mixed").workers == 1


def test_precision_says_which_operations() -> None:
    assert read("1x8 H100-80GB", "fp8-mixed").device.flops_per_s == 1979e12


def test_a_file_with_a_name_has_its_usual_links_and_devices(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text('hosts = 2\ndevice = "A100-80GB"\n')
    found = read(path)
    assert (found.name, found.workers) == ("ours", 16)
    assert found.messages.links.between_bytes_per_s == 25e9  # type: ignore[attr-defined]


def test_links_that_are_written_count_and_others_stay() -> None:
    found = from_toml('hosts = 2\ndevice = "A100-80GB"\n[links]\nbetween_bytes_per_s = 1e9\nlatency_s = 1e-6')
    assert found.messages.links == Links(300e9, 1e9, 1e-6, 1e-6)  # type: ignore[attr-defined]
    assert found.provenance["links"] == "written in the cluster's file"


def test_a_device_of_its_own() -> None:
    found = from_toml(own(2, 4, 'kind = "cpu"\n[links]\ninside_bytes_per_s = 1e9\nbetween_bytes_per_s = 1e8'), "mine")
    assert (found.workers, found.device.kind, found.device.flops_per_s, found.name) == (8, "cpu", 1e12, "mine")
    assert found.messages.links == Links(1e9, 1e8)  # type: ignore[attr-defined]


def test_one_device_needs_no_links() -> None:
    assert from_toml(own()).workers == 1


def test_each_says_how_wide_its_interval_is_and_why() -> None:
    for found in (read("2x8 A100-80GB"), from_toml(own())):
        assert found.spread == 0.2
        assert "nothing was measured there" in found.provenance["spread"]


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ("4x8 H100-80", "unknown device 'H100-80'; did you mean 'H100-80GB'"),
        ("four H100-80GB", 'is no cluster; write "4x8 H100-80GB" or the path of a .toml file'),
        ("0x8 H100-80GB", 'has no device; write "1x8 H100-80GB"'),
        ("4x8", 'names no device; write "4x8 H100-80GB"'),
        ("nowhere.toml", "nowhere.toml can't be read"),
    ],
)
def test_names_that_are_refused(told: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(told)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host = 2", "unknown key of the file 'host'; did you mean 'hosts'"),
        ("hosts = 2", "the file has no device"),
        ("hosts = 2\ndevice = 3", "device = 3 is neither a name nor a section"),
        (own(more="speed = 2"), r"unknown key of \[device\] 'speed'"),
        (own(more='kind = "gpu"'), "unknown kind of device 'gpu'; did you mean 'cpu'"),
        (own().replace("4e9", "0"), r"\[device\] says memory_bytes = 0.0, which is not above 0"),
        (own(per_host=4), "1 hosts of 4 devices .* write inside_bytes_per_s"),
        (own(hosts=2), "2 hosts of 1 devices .* write between_bytes_per_s"),
        (own(more="[links]\nlatency_s = -1"), r"\[links\] says latency_s = -1.0, which is not above 0"),
    ],
)
def test_files_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_toml(text)
