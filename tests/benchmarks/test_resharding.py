"""The matrix of splits in small: saved, read and resumed by the benchmark's own code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks" / "resharding"

Load = Callable[[str], Any]


def test_the_matrix_in_small(load: Load, tmp_path: Path) -> None:
    """Some splits, each with more than one form over other numbers of workers: all readings, and each as another."""
    forms, measure = load("forms"), load("measure")
    # The last one's states are what others' are compared with.
    chosen = {"stages=4 micro_batches=4", "replicas=2 shards=2", "replicas=1"}
    splits = [split for split in forms.SPLITS if split.strategy in chosen]
    assert len(splits) == len(chosen)
    matrix = measure.Matrix(tmp_path / "runs", tmp_path / "out", splits, "adamw", "float64")
    matrix.save()
    matrix.read_all()
    matrix.resume_all([(a, splits[(i + 1) % len(splits)]) for i, a in enumerate(splits)])
    assert matrix.failures == []
    assert len(matrix.read.rows) == len(splits) ** 2
    assert all(int(row["tensors"]) == 16 + 32 and int(row["chunks"]) >= 48 for row in matrix.read.rows)
    assert len(matrix.resumed.rows) == len(splits)


@pytest.mark.parametrize(
    ("updates", "holds"),
    [
        ([range(0, 100), range(100, 200), [7, 3]], True),
        ([range(0, 100), range(100, 199), [7, 3]], False),
        ([range(0, 100), range(99, 200), [7, 3]], False),
        ([range(0, 100), range(100, 200), [7, 7]], False),
    ],
)
def test_each_sample_once_in_each_epoch(load: Load, updates: Any, holds: bool, monkeypatch: Any) -> None:
    measure = load("measure")
    monkeypatch.setattr(measure, "BATCH", 100)
    assert measure.each_once([list(update) for update in updates]) is holds


def test_a_bit_that_differs_is_seen(load: Load) -> None:
    ranks = load("ranks")
    one = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert ranks.same_bits(one, one.clone())
    assert not ranks.same_bits(one, torch.nextafter(one, torch.tensor(9.0, dtype=torch.float64)))
    assert not ranks.same_bits(one, one.float())


def test_the_page_names_what_does_not_hold(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = load("page")
    facts = "A,2,Linux 6,2,3,2026-01-01"
    (tmp_path / "read.csv").write_text(
        "saved,read,optimizer,tensors,chunks,differing\nreplicas=1,replicas=2,sgd,32,64,\nreplicas=2,shards=2,sgd,32,64,w\n"
    )
    (tmp_path / "resumed.csv").write_text(
        "saved,resumed,optimizer,dtype,updates,of_train,of_test,each_sample_once,processor,cores,system,torch,python,date\n"
        f"replicas=1,replicas=2,sgd,float64,50,1e-15,2e-15,True,{facts}\n"
        f"replicas=2,replicas=1,sgd,float64,50,1e-3,2e-15,True,{facts}\n"
    )
    monkeypatch.setattr(page, "HERE", tmp_path)
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    page.write_page()
    text = (tmp_path / "README.md").read_text("utf-8")
    assert "2 readings, 128 rectangles" in text
    assert "- replicas=2 → shards=2, sgd: w\n" in text
    assert "- replicas=2 → replicas=1, sgd, float64: 0.001, each sample once: True" in text
