"""What is exported is read by others bit for bit, and what others wrote is read back or refused, never half of it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.checkpoint import interop
from paceline.checkpoint.base import TensorChunk, chunks_of_range
from paceline.checkpoint.interop import read_state
from paceline.checkpoint.interop_safetensors import INDEX, SINGLE, export_safetensors, import_safetensors
from paceline.checkpoint.manifest import DTYPES
from paceline.checkpoint.reader import Checkpoint, statuses
from paceline.checkpoint.writer import CheckpointWriter
from paceline.core.errors import InputError

# A cut matrix, no dims, no elements, a dtype of each size, a name that is no word.
STATE: dict[str, Tensor] = {
    "0.weight": torch.randn(5, 7, generator=torch.Generator().manual_seed(0)),
    "0.bias": torch.randn(5, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
    "half": torch.tensor([1.5, -0.0, float("nan"), float("inf")], dtype=torch.float16),
    "norm.num_batches_tracked": torch.tensor(3),
    "scale": torch.tensor(0.1, dtype=torch.float64),
    "mask": torch.tensor([[True, False, True]]),
    "nothing": torch.empty(0, 4),
    'ключ "x"': torch.arange(3, dtype=torch.uint8),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints 1, of other values, and 2, of STATE, with what is no part of A."""
    folder = tmp_path_factory.mktemp("run") / "ckpt"
    weight = STATE["0.weight"].view(-1)
    cut = [c for i in (0, 9, 18, 27) for c in chunks_of_range("0.weight", (5, 7), i, weight[i : min(i + 9, 35)])]
    others = ["optimizer/exp_avg/0.weight", "delta/0/1/0.weight", "read/0/0.weight", "replica/0/rng"]
    writer = CheckpointWriter(folder, run="ab12", keep=3, timeout_s=30.0)
    for version in (1, 2):
        whole = [TensorChunk.whole(n, t if version == 2 else t * 0) for n, t in STATE.items() if n != "0.weight"]
        writer.begin(version, [*cut, *whole, *(TensorChunk.whole(n, torch.ones(2)) for n in others)], {})
        result = writer.wait(60.0)
        assert result is not None
        assert result.error is None
    writer.close()
    return folder


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape), name
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, theirs[name])]
        assert torch.equal(*bits), name


def test_the_newest_is_exported_as_one_file(run: Path, tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    done = export_safetensors(run, tmp_path / "hf", report=lambda what, fraction: told.append((what, fraction)))
    assert os.listdir(tmp_path / "hf") == [SINGLE]
    assert_same(load_file(tmp_path / "hf" / SINGLE), STATE)
    with safe_open(tmp_path / "hf" / SINGLE, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    size = sum(tensor.nbytes for tensor in STATE.values())
    assert (done.source, done.tensors, done.size_bytes, done.notes) == (run / "step-2", len(STATE), size, ())
    assert told[-1] == (SINGLE, 1.0)
    assert_same(read_state(run), STATE)


def test_files_and_their_index(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interop, "_BATCH_BYTES", 16)  # so that files are written in several reads
    export_safetensors(run / "step-2", tmp_path / "hf", 100)
    index = json.loads((tmp_path / "hf" / INDEX).read_text("utf-8"))
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert sorted(os.listdir(tmp_path / "hf")) == [*files, INDEX]
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in STATE.values())}
    loaded = {name: load_file(tmp_path / "hf" / file) for name, file in index["weight_map"].items()}
    assert_same({name: tensors[name] for name, tensors in loaded.items()}, STATE)
    for name in files:  # a tensor that is larger than a file may be is alone
        tensors = load_file(tmp_path / "hf" / name)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 100

    monkeypatch.setattr(interop, "FILE_BYTES", 64)
    done = import_safetensors(tmp_path / "hf", tmp_path / "new")
    assert done.target == tmp_path / "new" / "step-0"
    assert len(list(done.target.glob("part-*.safetensors"))) > 1
    assert [(s.version, s.error) for s in statuses(tmp_path / "new")] == [(0, None)]
    assert_same(read_state(done.target), STATE)


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_model_starts_from_the_weights_of_another(tmp_path: Path, as_folder: bool) -> None:
    other, model = nn.Linear(4, 3), nn.Linear(4, 3)
    save_file(other.state_dict(), tmp_path / SINGLE)
    import_safetensors(tmp_path if as_folder else tmp_path / SINGLE, tmp_path / "ckpt")
    model.load_state_dict(read_state(tmp_path / "ckpt"))
    assert torch.equal(model.weight, other.weight)
    checkpoint = Checkpoint.open(tmp_path / "ckpt" / "step-0")
    checkpoint.verify()
    assert checkpoint.manifest.head["version"] == 0
    assert not {"run", "optimizer"} & checkpoint.manifest.head.keys()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_and_goes(tmp_path: Path, dtype: str) -> None:
    values = torch.arange(2, dtype=torch.uint8).repeat(8).view(getattr(torch, dtype))
    save_file({"w": values.clone()}, tmp_path / "any.safetensors")
    import_safetensors(tmp_path / "any.safetensors", tmp_path / "ckpt")
    export_safetensors(tmp_path / "ckpt", tmp_path / "hf")
    assert_same(load_file(tmp_path / "hf" / SINGLE), {"w": values})


def test_a_damaged_checkpoint_is_passed_over_or_refused(run: Path, tmp_path: Path) -> None:
    part = run / "step-2" / "part-0.safetensors"
    before = part.read_bytes()
    try:
        part.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        done = export_safetensors(run, tmp_path / "older")
        assert done.source == run / "step-1"
        assert "SHA-256" in done.notes[0]
        with pytest.raises(InputError, match=r"part-0.safetensors can't be read: its SHA-256"):
            export_safetensors(run / "step-2", tmp_path / "none")
    finally:
        part.write_bytes(before)
    assert os.listdir(tmp_path) == ["older"]


def test_nothing_is_overwritten(run: Path, tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / SINGLE)
    (tmp_path / "there").mkdir()
    with pytest.raises(InputError, match="there-2 for instance"):
        export_safetensors(run, tmp_path / "there")
    with pytest.raises(InputError, match="there-2 for instance"):
        import_safetensors(tmp_path / SINGLE, tmp_path / "there")
    with pytest.raises(InputError, match=r"write new, and model.safetensors will be in it"):
        export_safetensors(run, tmp_path / "new.safetensors")
    with pytest.raises(InputError, match="has no checkpoint; write the path that checkpoint= named"):
        export_safetensors(tmp_path, tmp_path / "new")
    with pytest.raises(InputError, match="nowhere is no folder"):
        export_safetensors(tmp_path / "nowhere", tmp_path / "new")
    assert sorted(os.listdir(tmp_path)) == [SINGLE, "there"]


def header(values: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    text = values if isinstance(values, bytes) else json.dumps(values).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], end: int) -> dict[str, Any]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "its header should have 0 bytes, but the file has 0"),
        ((1 << 62).to_bytes(8, "little"), "its header should have 4,611,686,018,427,387,904 bytes"),
        ((200 << 20).to_bytes(8, "little") + b"{" * 99, "its header should have 209,715,200 bytes"),
        (header(b"[" * 3_000_000), "bytes of memory"),
        (header(b"{nonsense"), "Expecting property name"),
        (header(b'{"a": 1, "a": 2}'), "the key 'a' stands twice in one object"),
        (header({"__metadata__": {"a": "x" * (2 << 20)}}), "its __metadata__ has more than 1,048,576 bytes"),
        (header({"a": "x" * (17 << 20)}), "16,777,216 are the most"),
        (header(entry("F4", [4], 2), b"12"), "w has dtype F4, which torch has not; write one of: F64, "),
        (header(entry("F32", [1 << 40, 1 << 40], 4), b"1234"), "deserializing header"),
        (header(entry("F32", [2], 8), b"1234"), "deserializing header"),
        (header({"delta/w": entry("F32", [1], 4)["w"]}, b"1234"), "write the tensor by another name"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, contents: bytes, message: str) -> None:
    (tmp_path / SINGLE).write_bytes(contents)
    with pytest.raises(InputError, match=f"can't be read: .*({message})"):
        import_safetensors(tmp_path, tmp_path / "ckpt")
    assert os.listdir(tmp_path) == [SINGLE]


A, B = "a.safetensors", "b.safetensors"


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"x": f"../{A}", "y": B}, "is no name of a file in its folder"),
        ({"x": "/etc/passwd", "y": B}, "is no name of a file in its folder"),
        ({"x": 3}, "3 is no name of a file"),
        ([], "its weight_map should be an object"),
        ({"x": A, "y": "c.safetensors"}, "c.safetensors is missing"),
        ({"x": A, "y": B, "z": B}, "names z, but b.safetensors does not have it"),
        ({"x": B, "y": B}, "names x, but b.safetensors does not have it"),
        ({"x": A}, None),
        ({"y": B, "x": "d.safetensors"}, "d.safetensors has v, which is not in model.safetensors.index.json"),
        ({"x": A, "v": "d.safetensors"}, "x is in two files of .*, a.safetensors and d.safetensors"),
        ({"x": A, "y": "fifo"}, "fifo can't be read: it is no regular file"),
        ({"x": A, "y": "null"}, "null can't be read: it is no regular file"),
        ({"x": A, "y": "folder"}, "folder can't be read"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, weight_map: Any, message: str | None) -> None:
    hf = tmp_path / "hf"
    (hf / "folder").mkdir(parents=True)
    for file, names in ((A, "x"), (B, "y"), ("d.safetensors", "xv")):
        save_file({name: torch.ones(2) for name in names}, hf / file)
    os.mkfifo(hf / "fifo")
    (hf / "null").symlink_to("/dev/null")
    (hf / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if message is None:
        import_safetensors(hf, tmp_path / "ckpt")
        return
    with pytest.raises(InputError, match=message):
        import_safetensors(hf, tmp_path / "ckpt")
    assert os.listdir(tmp_path) == ["hf"]


def test_a_name_that_stands_twice_in_the_index_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"weight_map": {"x": "a.safetensors", "x": "b.safetensors"}}')
    with pytest.raises(InputError, match="the key 'x' stands twice"):
        import_safetensors(tmp_path, tmp_path / "ckpt")


def test_other_files_are_named(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(InputError, match=r"write the path of one file: adapter_model.safetensors"):
        import_safetensors(tmp_path, tmp_path / "ckpt")
    with pytest.raises(InputError, match="nowhere is missing"):
        import_safetensors(tmp_path / "nowhere", tmp_path / "ckpt")


def test_a_full_disk_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("paceline.checkpoint.interop_safetensors.read_specs", fail)
    with pytest.raises(InputError, match="No space left on device"):
        export_safetensors(run, tmp_path / "hf")
    assert os.listdir(tmp_path) == []
