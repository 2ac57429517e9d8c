"""The benchmark on accelerators: each row in small on the CPU, from a measurement to the page."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"

pytestmark = pytest.mark.timeout(480)  # several processes each import torch, on however few cores there are

SMALL = ("--small", "--device", "cpu", "--rounds", "1", "--turn", "0.001", "--seconds", "0.5")

SIDES = {
    "mlp": {"plain PyTorch", "plain PyTorch, loss read", "DDP", "FSDP2", "paceline"},
    "gpt2": {"plain PyTorch", "plain PyTorch, loss read", "DDP", "FSDP2", "paceline"},
    "resnet50": {"plain PyTorch", "plain PyTorch, loss read", "DDP", "FSDP2", "paceline"},
    "asynchronous-mlp": {"plain PyTorch", "paceline"},
    "replicas": {"plain PyTorch", "DDP", "FSDP2", "paceline"},
    "stages": {"plain PyTorch", "torch.distributed.pipelining", "paceline"},
    "shards": {"plain PyTorch", "DTensor", "paceline"},
}
"""By row; the second asynchronous one differs from the first in the model alone, which a row of its own trains."""


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group on Gloo of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# Of three rows that differ in the model alone, one.
@pytest.mark.parametrize("row", sorted(SIDES.keys() - {"mlp", "resnet50"}))
def test_a_row_in_small(load: Callable[[str], Any], tmp_path: Path, row: str) -> None:
    measure, words = load("measure"), [*SMALL, "--rows", row, "--out", str(tmp_path)]
    assert measure.main(words) == 0
    path = tmp_path / "results" / f"{row}.json"
    measured = json.loads(path.read_text(encoding="utf-8"))
    assert measured["sides"].keys() == SIDES[row]
    assert measured["sides"]["plain PyTorch"]["ratio"] == 1.0
    for figures in measured["sides"].values():
        assert figures["step_ms"] > 0
        assert figures.get("apart", 0.0) <= 0.05
    before = path.stat().st_mtime_ns
    assert measure.main(words) == 0
    assert path.stat().st_mtime_ns == before  # it was not measured again
    assert measure.main(["--page", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "a trial with small models" in text
    assert all(f"\n| {side} |" in text for side in SIDES[row])


@pytest.mark.parametrize("form", ["replicas", "stages", "shards"])
def test_torchs_sides_have_one_rank_where_two_would_share_a_device(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, one_rank: None, form: str
) -> None:
    rows, rounds, models, crew = load("rows"), load("rounds"), load("models"), load("kit.crew")
    monkeypatch.setattr(rows, "has_one_each", lambda row, kind: False)
    told: list[Any] = []
    sides = dict(rows.sides_of(rows.ROWS[form], "cpu", 0))
    assert {name.endswith(", one rank") for name in sides.keys() - {"plain PyTorch", "paceline"}} == {True}
    del sides["paceline"]  # it has two ranks
    member = crew.Member(0, 1, told.append)
    figures = rounds.measured(member, models.Job("stack", "cpu", small=True), sides, rounds.Pace(1, 0.001))
    assert all(each["apart"] <= 0.05 for each in figures.values())


def test_a_side_that_does_less_is_refused(load: Callable[[str], Any], one_rank: None) -> None:
    rounds, models, sides = load("rounds"), load("models"), load("sides")
    job = models.Job("mlp", "cpu", small=True)

    def one_step_less(job: Any, loop: Callable[[Any], None]) -> Any:
        made: list[Any] = []
        return sides.plain(job, lambda step: loop(lambda: made.append(0) if not made else step()))

    states = {"plain PyTorch": sides.plain, "other": one_step_less}
    with pytest.raises(ArithmeticError, match=r"mlp: other ended 0\.\d+ of the way"):
        rounds.measured(load("kit.crew").Member(0, 1, lambda word: None), job, states, rounds.Pace(1, 0.001))


def test_a_row_that_fails_keeps_no_other_from_being_measured(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measure, work = load("measure"), load("kit.work")
    row = {"row": "gpt2", "sides": {"paceline": {"step_ms": 1.0, "ratio": 1.0}}}

    def words_of(name: str, setting: Any) -> Iterator[Any]:
        if name == "mlp":
            raise ArithmeticError("it ended elsewhere")
        yield work.Measured([row])

    monkeypatch.setattr(measure, "words_of", words_of)
    assert measure.main([*SMALL, "--rows", "mlp", "gpt2", "--out", str(tmp_path)]) == 1
    assert "mlp: it ended elsewhere" in capsys.readouterr().err
    assert json.loads((tmp_path / "results" / "gpt2.json").read_text(encoding="utf-8")) == row


def test_without_an_accelerator_only_a_trial_is_measured(
    load: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load("measure").main(["--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "write --small" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_page_says_what_is_missed_and_where_nothing_was_measured(load: Callable[[str], Any]) -> None:
    page = load("page").page
    assert "no figure stands here" in page([])
    machine = {"processor": "A", "cores": "2", "system": "Linux 6", "torch": "2", "python": "3", "date": "2026-01-01"}

    def row(name: str, ratio: float) -> dict[str, Any]:
        plain = {"step_ms": 2.0, "ratio": 1.0, "samples_per_s": 500.0, "peak_mib": 1024.4, "rounds": 9, "apart": 0.0}
        ours = plain | {"ratio": ratio, "predicted_mib": 1000.0}
        about = {"row": name, "device": "B", "devices": 1, "small": False, "machine": machine}
        return about | {"sides": {"plain PyTorch": plain, "paceline": ours}}

    text = page([row("mlp", 1.01), row("gpt2", 1.03), row("asynchronous-mlp", 1.25)])
    assert "no figure stands here" not in text
    assert "| paceline | 2.000 | 1.010 | 500 | 1,024 | 1,000 | 0.0e+00 | 9 |" in text
    expected = """\
- mlp: 1.010 of plain PyTorch's step, at most 1.02
- gpt2: 1.030 of plain PyTorch's step, at most 1.02 (missed)
- asynchronous-mlp: 0.800 times the gradients of one process, at least 0.9 (missed)
"""
    assert text.endswith(f"\n\n{expected}")
