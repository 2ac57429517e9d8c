"""docs/hybrids.md: its drawings are what is printed, and its table of what composes says what is refused."""

import os
import re
from pathlib import Path

import pytest
import torch

from paceline import InputError, Program, Strategy, show_mesh
from paceline.aggregation import Aggregation, registered
from paceline.api.train import check
from paceline.schedule import Dependencies, draw, parse

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "hybrids.md").read_text(encoding="utf-8")
ENGINES = ("local", "virtual", "distributed", "ray")
POLICIES = (
    "synchronous",
    "asynchronous",
    "stale-synchronous:bound=3",
    "smooth-switch:every=5",
    "buffered:k=2",
    "local-steps:period=2",
    "elastic-averaging:period=8,elasticity=0.1",
    "decoupled:period=2",
    "robust",
    "delay-compensated",
    "deadline",
    "sandblaster",
    "hogwild",
)
ROWS = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", PAGE, re.M)
CELLS = [(mesh, engine, said) for mesh, *cells in ROWS for engine, said in zip(ENGINES, cells, strict=True)]


def program() -> Program:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    data = torch.zeros(64, 4), torch.zeros(64, 4)
    return Program(model=lambda: model, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD, train=data)


def taken(strategy: str, engine: str) -> bool:
    try:
        check(program(), strategy, engine=engine, steps=1)
    except InputError:
        return False
    return True


def test_the_drawings_are_what_is_printed() -> None:
    drawings = re.findall(r"^```text (.*?) hosts=(\d+)\n(.*?)\n```$", PAGE, re.M | re.S)
    assert len(drawings) == 2
    page = PAGE
    for strategy, hosts, drawing in drawings:
        page = page.replace(drawing, show_mesh(strategy, int(hosts)))
    if os.environ.get("PACELINE_REWRITE_GOLDENS") == "1":
        (DOCS / "hybrids.md").write_text(page, encoding="utf-8")
        return
    assert page == PAGE


def test_the_drawing_of_branches_is_what_is_simulated() -> None:
    [(schedule, m, needs, drawing)] = re.findall(
        r"^```text (\S+) micro_batches=(\d+) needs=(\S+)\n(.*?)\n```$", PAGE, re.M | re.S
    )
    parts = drawing.count("\n")
    assert drawing == draw(parse(schedule), parts, int(m), None, Dependencies.parse(parts, needs.replace(",", " ")))


@pytest.mark.parametrize(("mesh", "engine", "said"), CELLS)
def test_each_cell_names_the_policies_that_are_taken(
    mesh: str, engine: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine == "distributed":
        workers = str(Strategy.parse(mesh).workers)
        for name, value in (("RANK", "0"), ("WORLD_SIZE", workers), ("LOCAL_WORLD_SIZE", workers)):
            monkeypatch.setenv(name, value)
    found = {policy for policy in POLICIES if taken(f"{mesh} aggregation={policy}", engine)}
    expected = {"all but hogwild": {*POLICIES} - {"hogwild"}, "none": set[str]()}
    expected |= {"synchronous": {"synchronous"}, "synchronous, local-steps": {"synchronous", "local-steps:period=2"}}
    assert found == expected[said]


def test_the_table_is_about_every_policy() -> None:
    assert len(CELLS) == 7 * len(ENGINES)
    ours = {name for name, kind in registered(Aggregation).items() if kind.__module__.startswith("paceline.")}
    assert {policy.partition(":")[0] for policy in POLICIES} == ours


def test_options_that_it_names_are_those_of_a_strategy() -> None:
    named = set(re.findall(r"`(\w+)=[^`]*`", PAGE)) - {"engine", "clip_norm", "hosts", "times"}
    assert {"stages", "shards", "aggregation", "device"} <= named <= set(Strategy.__dataclass_fields__)


def test_files_that_it_names_are_there() -> None:
    assert all((DOCS.parent / path).exists() for path in re.findall(r"`(tests/[\w/.]+)`", PAGE))
