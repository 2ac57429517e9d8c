"""What is written is what is read, by any split, and it appears whole or not at all."""

import json
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from paceline.checkpoint import writer_process
from paceline.checkpoint.base import TensorChunk, chunks_of_range
from paceline.checkpoint.manifest import DTYPES, Manifest
from paceline.checkpoint.options import CheckpointOptions
from paceline.checkpoint.reader import Checkpoint, newest
from paceline.checkpoint.writer import CheckpointWriter, SaveResult
from paceline.comm import liveness
from paceline.core.errors import InputError

RUN = "ab12"


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[CheckpointWriter]:
    writer = CheckpointWriter(tmp_path / "ckpt", run=RUN, keep=3, timeout_s=30.0)
    yield writer
    writer.close()


def save(writer: CheckpointWriter, version: int, chunks: Sequence[TensorChunk], **head: Any) -> SaveResult:
    writer.begin(version, chunks, head)
    result = writer.wait(60.0)
    assert result is not None
    assert not writer.busy
    return result


def saved(writer: CheckpointWriter, tmp_path: Path, chunks: Sequence[TensorChunk], version: int = 1) -> Checkpoint:
    assert save(writer, version, chunks).error is None
    checkpoint, damaged = newest(tmp_path / "ckpt")
    assert not damaged
    assert checkpoint is not None
    return checkpoint


def some_values(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    values = torch.randint(0, 2**7, (*shape, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator())
    return (values % 2 if dtype == torch.bool else values).view(dtype).reshape(tuple(shape))


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    def bits(tensor: Tensor) -> Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0)

    return ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(bits(ours), bits(theirs))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back(writer: CheckpointWriter, tmp_path: Path, dtype: str) -> None:
    tensors = {
        f"{dtype} {len(shape)} {shape}": some_values(shape, getattr(torch, dtype)) for shape in [(), (0,), (3,), (5, 3)]
    }
    checkpoint = saved(writer, tmp_path, [TensorChunk.whole(name, tensor) for name, tensor in tensors.items()])
    assert set(checkpoint.names()) == set(tensors)
    for name, tensor in tensors.items():
        assert same_bits(checkpoint.read(name), tensor)


def test_the_head_comes_back_with_versions(writer: CheckpointWriter, tmp_path: Path) -> None:
    run = {"losses": [0.1 + 0.2, 1e-300, None], "name": '数 "x"'}
    result = save(writer, 7, [TensorChunk.whole("w", torch.ones(2))], run=run, strategy="replicas=2")
    head = Checkpoint.open(tmp_path / "ckpt" / "step-7").manifest.head
    assert (head["format"], head["version"], head["run"], head["strategy"]) == (1, 7, run, "replicas=2")
    assert head["torch"] == torch.__version__
    assert result.size_bytes == sum(file.stat().st_size for file in (tmp_path / "ckpt" / "step-7").iterdir())


def test_others_can_read_the_file(writer: CheckpointWriter, tmp_path: Path) -> None:
    weights, counts = torch.randn(3, 4), torch.arange(5, dtype=torch.int8)
    saved(writer, tmp_path, [TensorChunk.whole("c", counts), TensorChunk("w", (6, 4), (3, 0), weights)][:1])
    assert save(writer, 2, [TensorChunk.whole("c", counts), TensorChunk.whole("w", weights)]).error is None
    with safe_open(tmp_path / "ckpt" / "step-2" / "part-0.safetensors", framework="pt") as file:
        assert set(file.keys()) == {"c@0", "w@0,0"}
        assert torch.equal(file.get_tensor("w@0,0"), weights)
        assert torch.equal(file.get_tensor("c@0"), counts)


def test_views_are_written_and_read_in_place(writer: CheckpointWriter, tmp_path: Path) -> None:
    values = torch.randn(6, 8)
    chunks = [TensorChunk("w", (8, 6), (0, 0), values.t()[:3]), TensorChunk("w", (8, 6), (3, 0), values.t()[3:])]
    checkpoint = saved(writer, tmp_path, chunks)
    target = torch.zeros(6, 8)
    checkpoint.read_into([TensorChunk("w", (8, 6), (0, 0), target.t())])
    assert torch.equal(target, values)


@pytest.mark.parametrize("stored", ["rows", "columns", "ranges"])
@pytest.mark.parametrize("wanted", ["rows", "columns", "ranges"])
def test_any_split_is_read_into_any_other(writer: CheckpointWriter, tmp_path: Path, stored: str, wanted: str) -> None:
    whole = torch.randn(5, 7, 2)
    checkpoint = saved(writer, tmp_path, split(stored, whole, 3))
    target = torch.zeros(5, 7, 2)
    checkpoint.read_into(split(wanted, target, 2))
    assert torch.equal(target, whole)


def split(how: str, whole: Tensor, parts: int) -> list[TensorChunk]:
    if how == "ranges":
        flat, each = whole.view(-1), -(-whole.numel() // parts)
        return [c for i in range(0, len(flat), each) for c in chunks_of_range("w", whole.shape, i, flat[i : i + each])]
    dim, chunks, start = int(how == "columns"), list[TensorChunk](), 0
    for piece in whole.tensor_split(parts, dim):
        offset = [0, 0, 0]
        offset[dim] = start
        chunks.append(TensorChunk("w", tuple(whole.shape), tuple(offset), piece))
        start += piece.shape[dim]
    return chunks


def test_training_may_go_on_once_copied(writer: CheckpointWriter, tmp_path: Path) -> None:
    values = torch.ones(1 << 20)
    writer.begin(1, [TensorChunk.whole("w", values)], {})
    writer.wait_copied()
    values.zero_()
    assert writer.busy
    assert writer.wait(60.0) is not None
    assert torch.all(Checkpoint.open(tmp_path / "ckpt" / "step-1").read("w") == 1)
    assert writer.poll() is None


def test_memory_grows_with_what_is_saved(writer: CheckpointWriter, tmp_path: Path) -> None:
    for version, size in enumerate([10, 100_000, 50], start=1):
        checkpoint = saved(writer, tmp_path, [TensorChunk.whole("w", torch.full((size,), float(version)))], version)
        assert torch.equal(checkpoint.read("w"), torch.full((size,), float(version)))


def test_only_the_newest_stay(writer: CheckpointWriter, tmp_path: Path) -> None:
    for version in range(1, 6):
        assert save(writer, version, [TensorChunk.whole("w", torch.ones(2))]).error is None
    assert sorted(os.listdir(tmp_path / "ckpt")) == ["step-3", "step-4", "step-5"]


def test_the_same_version_is_replaced(writer: CheckpointWriter, tmp_path: Path) -> None:
    saved(writer, tmp_path, [TensorChunk.whole("w", torch.zeros(2))])
    checkpoint = saved(writer, tmp_path, [TensorChunk.whole("w", torch.ones(2))])
    assert torch.equal(checkpoint.read("w"), torch.ones(2))
    assert os.listdir(tmp_path / "ckpt") == ["step-1"]


def test_parts_make_one_checkpoint(tmp_path: Path) -> None:
    whole = torch.randn(5, 7, 2)
    chunks = split("columns", whole, 3)
    writers = [
        CheckpointWriter(tmp_path / "ckpt", part=part, parts=3, run=RUN, keep=1, timeout_s=30.0) for part in range(3)
    ]
    for version in (1, 2):
        for part in (1, 0, 2):
            writers[part].begin(version, [chunks[part]], {} if part == 0 else None)
        assert [result and result.error for result in (writer.wait(60.0) for writer in writers)] == [None] * 3
    for writer in writers:
        writer.close()
    checkpoint, damaged = newest(tmp_path / "ckpt")
    assert not damaged
    assert checkpoint is not None
    assert torch.equal(checkpoint.read("w"), whole)
    files = [f"part-{part}.safetensors" for part in range(3)]
    assert sorted(os.listdir(checkpoint.folder)) == ["manifest.json", *files]
    assert os.listdir(tmp_path / "ckpt") == ["step-2"]


def test_a_folder_is_written_by_one_run_at_a_time(writer: CheckpointWriter, tmp_path: Path) -> None:
    """Another run neither writes there nor clears up what this one is writing, until this one has ended."""
    folder, chunks = tmp_path / "ckpt", [TensorChunk.whole("w", torch.ones(3))]
    assert save(writer, 1, chunks).error is None
    left = folder / f".step-2.{RUN}.partial"
    left.mkdir()  # a part of it is complete, and waits for the others
    other = CheckpointWriter(folder, run="cd34", keep=1, timeout_s=30.0)
    try:
        for _ in range(2):
            assert "another run that has not ended writes" in str(save(other, 2, chunks).error)
        assert sorted(path.name for path in folder.iterdir()) == [left.name, "step-1"]
        with pytest.raises(InputError, match=r"writes its checkpoints to .*ckpt; end that one first"):
            CheckpointOptions.of(folder).check_free()
        writer.close()
        CheckpointOptions.of(folder).check_free()
        assert save(other, 2, chunks).error is None
        assert [path.name for path in folder.iterdir()] == ["step-2"]
    finally:
        other.close()


def test_its_process_ends_silently_where_training_was_killed_with_an_answer_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.send(b"an answer")
    training.close()
    settings = json.dumps({"folder": str(tmp_path), "run": RUN, "part": 0, "parts": 1, "keep": 3, "timeout_s": 1.0})
    monkeypatch.setattr(liveness, "watch_and_exit", lambda parent: None)
    monkeypatch.setattr(sys, "argv", ["writer_process", str(link.detach()), "0", settings])
    writer_process.main()


def test_a_folder_that_was_removed_is_made_anew(writer: CheckpointWriter, tmp_path: Path) -> None:
    chunks = [TensorChunk.whole("w", torch.ones(3))]
    for version in (1, 2):
        assert save(writer, version, chunks).error is None
        shutil.rmtree(tmp_path / "ckpt")
    assert save(writer, 3, chunks).error is None
    with pytest.raises(InputError, match="another run"):
        CheckpointOptions.of(tmp_path / "ckpt").check_free()


def test_a_manifest_comes_back(writer: CheckpointWriter, tmp_path: Path) -> None:
    manifest = saved(writer, tmp_path, split("ranges", torch.randn(5, 7, 2), 3)).manifest
    assert Manifest.parse(manifest.to_json().encode(), Path("m")) == manifest


@pytest.mark.parametrize("trials", [10, 150])
def test_killed_at_any_time_while_the_same_name_is_written_again(
    writer: CheckpointWriter, tmp_path: Path, trials: int
) -> None:
    """There is the newer one or the older one, whole; what the killed ones have left goes with the next."""
    moments, last, killed = random.Random(trials), -1, 0
    for value in range(trials):
        writer.begin(1, [TensorChunk.whole("w", torch.full((300_000,), value))], {})
        writer.wait_copied()  # where the last one was killed, another is started until then
        time.sleep(moments.uniform(0.0, 0.02 if value % 2 else 0.4))  # while it starts, and while it writes
        os.kill(writer._process.pid, signal.SIGKILL)
        result = writer.wait(60.0)
        assert result is not None
        killed += result.error is not None
        checkpoint, damaged = newest(tmp_path / "ckpt")
        assert not damaged
        if checkpoint is not None:
            found = checkpoint.read("w")
            assert found.min() == found.max()
            assert found[0] in (last, value)
            last = int(found[0])
        else:
            assert last == -1
    assert killed > trials / 4
    assert save(writer, 1, [TensorChunk.whole("w", torch.zeros(3))]).error is None
    assert [path.name for path in (tmp_path / "ckpt").iterdir()] == ["step-1"]
