"""The file of a cluster: its keys and its links, as the planner and virtual time read them.

::

    hosts = 4
    devices_per_host = 8
    device = "H100-80GB"            # or a section of its own; of the planner alone (planner/cluster_file.py)

    [links]                         # in one direction
    inside_bytes_per_s = 450e9
    between_bytes_per_s = 50e9
    latency_s = 1e-5
    between_latency_s = 2e-5        # left out: latency_s

    [[absences]]                    # of virtual time alone (clock/network.py), and so is [failures]
    host = 3
    from_s = 100.0
    until_s = 200.0
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import InputError
from paceline.core.toml_sections import checked, section, section_of, toml
from paceline.core.types import Seconds


@dataclass(frozen=True, slots=True)
class Links:
    """Bandwidth and latency of one device, in each direction at the same time; in virtual time those of a host."""

    inside_bytes_per_s: float
    """Bandwidth to other devices of its host."""
    between_bytes_per_s: float
    """Bandwidth to other hosts, where all devices of a host send at once."""
    latency_s: Seconds = 5e-6
    between_latency_s: Seconds = 1e-5


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    """The keys of a cluster's file; sections are as they were written."""

    hosts: int
    device: Any = None
    devices_per_host: int = 0
    name: str = ""
    links: Any = None
    absences: Any = None
    failures: Any = None


def cluster_keys(text: str) -> ClusterKeys:
    """Return the keys of a file's text.

    Raises:
        InputError: it is no TOML, or a key is unknown, missing or of another kind.
    """
    return ClusterKeys(**checked(ClusterKeys, toml(text), ""))


def given_links(keys: ClusterKeys, usual: Mapping[str, float]) -> dict[str, float]:
    """Return the lines under ``[links]``, as arguments of :class:`Links`.

    Args:
        keys: of the file.
        usual: values of lines that may be left out; what is not written is not returned.

    Raises:
        InputError: a line is unknown, missing or not above 0.
    """
    given = section({"links": keys.links}, "links")
    links = {key: value for key, value in checked(Links, {**usual, **given}, "links").items() if key in given}
    refuse_not_positive("links", links)
    return {"between_latency_s": links["latency_s"]} | links if "latency_s" in links else links


def refuse_not_positive(section: str, values: Mapping[str, Any]) -> None:
    """Raise InputError for a number that is not above 0."""
    for key, value in values.items():
        if isinstance(value, (int, float)) and not value > 0:
            place = section_of(section)
            raise InputError(f"{place} says {key} = {value}, which is not above 0; write what it really is.")
