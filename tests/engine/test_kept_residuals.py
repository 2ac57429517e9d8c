"""What a compression has not sent yet is not lost where another number of replicas goes on."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.checkpoint.base import TensorChunk
from paceline.checkpoint.reader import Checkpoint
from paceline.checkpoint.writer import CheckpointWriter
from paceline.engine.distributed.kept_residuals import KeptResiduals

TEXT = "top-k:ratio=0.1"


def residuals(replica: int, replicas: int, *, mean: bool, text: str = TEXT) -> KeptResiduals:
    """All zeros."""
    chunks = [TensorChunk.whole(name, torch.zeros(2, 3, dtype=torch.float64)) for name in ("a", "b")]
    return KeptResiduals(text, chunks, {"query/0": torch.zeros(2)}, replica, replicas, mean)


def saved(folder: Path, replicas: int, *, mean: bool) -> tuple[Checkpoint, list[KeptResiduals]]:
    every = [residuals(replica, replicas, mean=mean) for replica in range(replicas)]
    for replica, each in enumerate(every):
        each.shared["query/0"].fill_(7)
        for i, chunk in enumerate(each.residuals):
            chunk.tensor.copy_(torch.arange(6.0).view(2, 3) + 10 * replica + 100 * i)
    writer = CheckpointWriter(folder, run="ab12", keep=1, timeout_s=30.0)
    writer.begin(1, [chunk for each in every for chunk in each.written()], {})
    result = writer.wait(60.0)
    writer.close()
    assert result is not None
    assert result.error is None
    return Checkpoint.open(folder / "step-1"), every


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("replicas", [2, 3, 6])
def test_the_next_updates_bring_all_of_it(tmp_path: Path, replicas: int, mean: bool) -> None:
    checkpoint, before = saved(tmp_path, 3, mean=mean)
    resume: Any = SimpleNamespace(run=SimpleNamespace(replicas=3))
    after = [residuals(replica, replicas, mean=mean) for replica in range(replicas)]
    for each in after:
        each.restore(resume, checkpoint)
        assert each.shared["query/0"].tolist() == [7, 7]
    for i in range(2):
        sums = [
            sum(each.residuals[i].tensor for each in every) / (len(every) if mean else 1) for every in (before, after)
        ]
        torch.testing.assert_close(sums[1], sums[0])  # rounding of a division alone
    if replicas == 3:
        assert all(
            torch.equal(one.tensor, other.tensor)
            for old, new in zip(before, after, strict=True)
            for one, other in zip(old.residuals, new.residuals, strict=True)
        )


def test_another_compression_begins_anew(tmp_path: Path) -> None:
    checkpoint, _ = saved(tmp_path, 2, mean=True)
    resume: Any = SimpleNamespace(run=SimpleNamespace(replicas=2))
    other = residuals(0, 2, mean=True, text="powersgd")
    other.restore(resume, checkpoint)
    assert not any(chunk.tensor.any() for chunk in other.residuals)
