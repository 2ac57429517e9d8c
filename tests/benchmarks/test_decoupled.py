"""The benchmark of rounds under stragglers and deaths: its page, its pictures, its clusters, and rows in small."""

from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from paceline import train

FOLDER = Path(__file__).parents[2] / "benchmarks" / "decoupled"

Load = Callable[[str], Any]

MACHINE = {"processor": "A", "cores": "2", "system": "Linux 6", "torch": "2", "python": "3", "date": "2026-01-01"}


def test_the_page_has_medians_of_ratios_seed_by_seed(load: Load, tmp_path: Path) -> None:
    measure = load("measure")
    sheet = measure.Sheet(tmp_path / "results" / "goodput.csv", ("side", "stragglers", "deaths", "seed"))
    for seed, (calm, slowed) in enumerate([(100.0, 50.0), (200.0, 150.0), (50.0, 30.0)]):
        facts = {"side": "decoupled", "deaths": "none", "seed": seed, "updates": 9, "test_loss": 1.5 + seed} | MACHINE
        sheet.put(facts | {"stragglers": "none", "samples_per_s": calm})
        sheet.put(facts | {"stragglers": "two slow", "samples_per_s": slowed})
    measure.page(sheet, tmp_path)
    assert "## Deaths" not in (tmp_path / "README.md").read_text("utf-8")
    for side, deaths, rate in (
        ("DiLoCo", "none", 40.0),
        ("DiLoCo, rigid", "150 s", 10.0),
        ("decoupled", "150 s", 80.0),
    ):
        facts = {"side": side, "stragglers": "none", "deaths": deaths, "seed": 0, "updates": 9, "test_loss": 1.5}
        sheet.put(facts | {"samples_per_s": rate} | MACHINE)
    measure.page(sheet, tmp_path)
    text = (tmp_path / "README.md").read_text("utf-8")
    assert "| decoupled | `decoupled:period=20` | 100.0 | 1.000 | 2.5000 |" in text
    assert "| decoupled | `decoupled:period=20` | 50.0 | 0.600 | 2.5000 |" in text
    assert "| decoupled |  |  | 0.800 |  |  | 80.0 |  |  | 1.5000 |" in text
    assert "| DiLoCo, rigid |  |  | 0.250 |  |  | 10.0 |  |  | 1.5000 |" in text
    for picture in ("goodput.svg", "deaths.svg"):
        assert ElementTree.parse(tmp_path / "results" / picture).getroot().tag.endswith("svg")


def test_a_straggler_costs_rounds_of_those_in_time_less(load: Load) -> None:
    measure = load("measure")
    rates = {}
    for policy in ("local-steps:period=5", "decoupled:period=5"):
        calm, slowed = (
            measure.figures_of(policy, 0, measure.cluster(0, inf), delay, 60.0)["samples_per_s"]
            for delay in (None, "fraction=0.25 constant:value=3")
        )
        rates[policy] = slowed / calm
    assert rates["local-steps:period=5"] == pytest.approx(0.25, abs=0.1)
    assert rates["decoupled:period=5"] > 2 * rates["local-steps:period=5"]


def test_hosts_of_a_cluster_that_never_die_take_messages_as_a_transfer_time_does(load: Load) -> None:
    measure = load("measure")
    for policy in ("synchronous", "decoupled:period=5"):
        found = measure.figures_of(policy, 0, measure.cluster(0, inf), None, 60.0)
        strategy = f"replicas={measure.REPLICAS} aggregation={policy}"
        run = train(
            measure.program(0), strategy, engine="virtual", seconds=60.0, times="compute=1 transfer=0.5", progress=False
        )
        assert found["samples_per_s"] == run.summary["samples_per_s"]
        assert found["test_loss"] == run.history[-1].test_loss


def test_all_hosts_but_the_servers_die_and_all_of_a_rigid_job_at_once(load: Load) -> None:
    measure = load("measure")
    elastic, rigid = (measure.cluster(0, 150.0, rigid=rigid) for rigid in (False, True))
    away = [list(elastic.absences_of(host, 0)) for host in range(measure.REPLICAS)]
    assert away[0] == []
    assert sum(map(bool, away)) > measure.REPLICAS / 2
    together = [list(rigid.absences_of(host, 0)) for host in range(measure.REPLICAS)]
    assert all(each == together[0] for each in together)
    assert all(any(a <= c and d <= b for a, b in together[0]) for own in away for c, d in own)
    assert measure.present(measure.cluster(0, inf)) == 1.0
    hosts = measure.Network(2, measure.LINKS, (measure.Absence(1, 2.0, 4.0), measure.Absence(1, 9.0, 99.0)))
    assert measure.present(hosts, 10.0) == pytest.approx(1 - 3 / 20)


def test_deaths_cost_a_job_of_one_group_more_than_a_policy_that_goes_on(load: Load) -> None:
    measure = load("measure")
    policy, between_s, seconds = "decoupled:period=5", 60.0, 120.0
    calm, elastic, rigid = (
        measure.figures_of(policy, 0, network, None, seconds)["samples_per_s"]
        for network in (
            measure.cluster(0, inf),
            measure.cluster(0, between_s, seconds=seconds),
            measure.cluster(0, between_s, rigid=True, seconds=seconds),
        )
    )
    there = measure.present(measure.cluster(0, between_s, seconds=seconds), seconds)
    assert 0.75 * there < elastic / calm < there
    assert rigid < elastic / 2
