"""Hostile files: what somebody may hand over as a checkpoint, a saved run, or weights; made here, never stored.

Each case changes a copy of a sound folder of its kind. What a manifest would notice by a hash is sealed again, since
whoever makes a file can also make the hash that fits it: only the checks of the values themselves stand then.
"""

import hashlib
import io
import json
import os
import pickle
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from paceline import Program, train
from paceline.checkpoint.interop_dcp import export_dcp
from paceline.checkpoint.interop_safetensors import export_safetensors

Kind = Literal["checkpoint", "run", "safetensors", "dcp", "inputs"]

Spoil: TypeAlias = Callable[[Path, Path], None]
"""Changes a sound copy; the second path is a canary, which no reader may create."""

PART, WEIGHTS, SEAL = "part-0.safetensors", "model.safetensors", "sha256"


@dataclass(frozen=True)
class Case:
    """One hostile folder or file.

    Args:
        kind: what it pretends to be.
        spoil: makes it hostile.
        harmless: it may be read, since its values are of the kinds that they should be.
        weights: its weights may be read, since only the state of the run is wrong.
    """

    kind: Kind
    spoil: Spoil
    harmless: bool = False
    weights: bool = False


class Bait:
    """An object whose pickle makes a folder when it is read."""

    def __init__(self, canary: Path) -> None:
        self._canary = str(canary)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._canary,)


def small_program() -> Program:
    """Return a program of 30 parameters; the one that the sound folders are of."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(40, 5, generator=generator), torch.randint(5, (40,), generator=generator)
    return Program(
        model=partial(torch.nn.Linear, 5, 5), loss=torch.nn.functional.cross_entropy,
        optimizer=partial(torch.optim.Adam, lr=0.01), train=(inputs, targets), batch_size=4,
    )  # fmt: skip


def make_sound(folder: Path) -> None:
    """Make a sound folder, or file, of each kind."""
    settings: dict[str, Any] = {"engine": "virtual", "progress": False}
    run = train(small_program(), "replicas=2", steps=4, checkpoint=folder / "checkpoint", keep=1, **settings)
    run.save(folder / "run")
    export_safetensors(folder / "checkpoint", folder / "safetensors")
    export_dcp(folder / "checkpoint", folder / "dcp")
    torch.save(torch.ones(3), folder / "inputs")


def step(folder: Path) -> Path:
    """Return the one checkpoint in a folder."""
    return next(folder.glob("step-*"))


def seal(folder: Path, value: dict[str, Any] | bytes) -> None:
    """Write a manifest with the hash that fits it, and the size and hash of each of its files that is there."""
    if isinstance(value, dict):
        for name, info in (value.get("files") or {}).items():
            with suppress(OSError, TypeError, ValueError):
                content = (folder / name).read_bytes() if (folder / name).is_file() else b""
                info |= {"size_bytes": len(content), SEAL: hashlib.sha256(content).hexdigest()}
        value = json.dumps({key: each for key, each in value.items() if key != SEAL}).encode()
    body = value[: value.rindex(b"}")]
    (folder / "manifest.json").write_bytes(body + f',\n"sha256": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode())


def manifest_of(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return value


def edited(edit: Callable[[dict[str, Any]], Any]) -> Spoil:
    """Return what edits the manifest of a checkpoint, with all hashes right afterwards."""

    def spoil(folder: Path, _: Path) -> None:
        value = manifest_of(step(folder))
        edit(value)
        seal(step(folder), value)

    return spoil


def resealed(edit: Callable[[bytes], bytes]) -> Spoil:
    """Return what edits the text of a checkpoint's manifest."""

    def spoil(folder: Path, _: Path) -> None:
        text = (step(folder) / "manifest.json").read_bytes()
        changed = edit(text[: text.rindex(b',\n"sha256"')] + b"}")
        assert changed != text, "an edit that changes nothing is no case"
        seal(step(folder), changed)

    return spoil


def replaced(make: Callable[[Path, Path], bytes], file: str) -> Spoil:
    """Return what replaces a file of a folder, and seals the folder if it has a manifest."""

    def spoil(folder: Path, canary: Path) -> None:
        where = step(folder) if file == PART else folder
        path = where if where.is_file() else where / file
        path.write_bytes(make(path, canary))
        if where.is_dir() and (where / "manifest.json").exists():
            seal(where, manifest_of(where))

    return spoil


def in_place(make: Spoil, file: str) -> Spoil:
    """Return what puts something in the place of a file; the size and the hash of a manifest stay."""

    def spoil(folder: Path, canary: Path) -> None:
        where = step(folder) if file in (PART, "manifest.json") and folder.name == "checkpoint" else folder
        path = where if where.is_file() else where / file
        path.unlink()
        make(path, canary)

    return spoil


def tensor(value: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest's entry of the weight."""
    found: dict[str, Any] = value["tensors"]["weight"]
    return found


def chunk(value: dict[str, Any]) -> list[Any]:
    found: list[Any] = tensor(value)["chunks"][0]
    return found


def renamed_file(name: str) -> Callable[[dict[str, Any]], None]:
    """Return what moves all tensors of a manifest to a file of another name."""

    def edit(value: dict[str, Any]) -> None:
        value["files"][name] = value["files"].pop(PART)
        for info in value["tensors"].values():
            for each in info["chunks"]:
                each[0] = name

    return edit


def header_of(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path, Path], bytes]:
    """Return what edits the header of a safetensors file."""

    def make(path: Path, _: Path) -> bytes:
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        text = json.dumps(edit(header) or header).encode()
        return len(text).to_bytes(8, "little") + text + content[8 + size :]

    return make


def first(header: dict[str, Any]) -> dict[str, Any]:
    """Return the first tensor of a header."""
    return next(each for name, each in header.items() if name != "__metadata__")


def raw_header(text: Callable[[bytes], bytes]) -> Callable[[Path, Path], bytes]:
    def make(path: Path, _: Path) -> bytes:
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        new = text(content[8 : 8 + size])
        return len(new).to_bytes(8, "little") + new + content[8 + size :]

    return make


def pickled(_: Path, canary: Path) -> bytes:
    return pickle.dumps(Bait(canary))


def torch_saved(_: Path, canary: Path) -> bytes:
    stream = io.BytesIO()
    torch.save({"weight": Bait(canary)}, stream)
    return stream.getvalue()


def legacy_tar(_: Path, canary: Path) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name in ("pickle", "storages", "tensors"):
            content = pickle.dumps(Bait(canary))
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def zip_bomb(_: Path, __: Path) -> bytes:
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file,
        file.open("archive/data.pkl", "w", force_zip64=True) as member,
    ):
        for _ in range(256):
            member.write(bytes(1 << 20))
    return stream.getvalue()


def sparse(path: Path, _: Path) -> None:
    """A file of 4 TB that takes no room."""
    with path.open("wb") as file:
        file.truncate(4 << 40)


def sparse_safetensors(path: Path, _: Path) -> None:
    """A header that is right for a tensor of 2 TB, of which no byte is stored."""
    header = {"weight": {"dtype": "U8", "shape": [1 << 41], "data_offsets": [0, 1 << 41]}}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + (1 << 41))


def sparse_checkpoint(folder: Path, _: Path) -> None:
    """A checkpoint of one tensor of 2 TB, the manifest of which is right but for the hash."""
    where, size = step(folder), 1 << 41
    (where / PART).unlink()
    header = {"weight@0": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    with (where / PART).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    value = manifest_of(where)
    value["tensors"] = {"weight": {"shape": [size], "dtype": "uint8", "chunks": [[PART, "weight@0", [0], [size]]]}}
    value["files"][PART] = {"size_bytes": 8 + len(text) + size, SEAL: "0" * 64}
    del value[SEAL]
    seal(where, json.dumps(value).encode())


def linked(target: str) -> Spoil:
    return lambda path, _: path.symlink_to(target)


def device(path: Path, _: Path) -> None:
    os.mknod(path, 0o20666, os.makedev(1, 5))  # /dev/zero


def fifo(path: Path, _: Path) -> None:
    os.mkfifo(path)


def directory(path: Path, _: Path) -> None:
    path.mkdir()


def linked_step(folder: Path, _: Path) -> None:
    """A checkpoint whose folder is a link to itself."""
    path = step(folder)
    shutil.rmtree(path)
    path.symlink_to(path.name)


def appended(text: bytes) -> Callable[[Path, Path], bytes]:
    return lambda path, _: path.read_bytes() + text


def written(content: bytes) -> Callable[[Path, Path], bytes]:
    return lambda _, __: content


def huge_header(_: Path, __: Path) -> bytes:
    """A header of nearly 100 MB of JSON, which is the most that the library reads."""
    text = b'{"__metadata__":{' + b",".join(b'"%d":"x"' % i for i in range(6_500_000)) + b"}}"
    return len(text).to_bytes(8, "little") + text


DEEP = b"[" * 100_000 + b"]" * 100_000
HEX = "0" * 64
OVERRIDE = "weight\u202etxet\x1b[2J"

CHECKPOINT: dict[str, Spoil] = {
    "pickle as manifest": in_place(lambda p, c: p.write_bytes(pickled(p, c)) and None, "manifest.json"),
    "pickle as a part": replaced(pickled, PART),
    "torch.save as a part": replaced(torch_saved, PART),
    "legacy tar as a part": replaced(legacy_tar, PART),
    "zip bomb as a part": replaced(zip_bomb, PART),
    "a file above": edited(renamed_file("../../canary")),
    "an absolute file": edited(renamed_file("/etc/passwd")),
    "a file with a NUL": edited(renamed_file("part\0")),
    "the folder as a file": edited(renamed_file(".")),
    "a file with half a surrogate": edited(renamed_file("\ud800")),
    "a file name of 5,000 letters": edited(renamed_file("x" * 5000)),
    "a name that overrides the direction": edited(lambda v: v["tensors"].update({OVERRIDE: tensor(v)})),
    "a link to a device": in_place(linked("/dev/zero"), PART),
    "a link to itself": in_place(linked(PART), PART),
    "a link as manifest": in_place(linked("/dev/zero"), "manifest.json"),
    "a FIFO": in_place(fifo, PART),
    "a FIFO as manifest": in_place(fifo, "manifest.json"),
    "a device": in_place(device, PART),
    "a folder as a part": in_place(directory, PART),
    "a step that links to itself": linked_step,
    "a header of 2^63 bytes": replaced(lambda p, _: (1 << 63).to_bytes(8, "little") + p.read_bytes()[8:], PART),
    "no header": replaced(written(b""), PART),
    "overlapping offsets": replaced(
        header_of(lambda h: [each.update(data_offsets=[0, 4]) for each in h.values()] and None), PART),
    "negative offsets": replaced(header_of(lambda h: first(h).update(data_offsets=[-4, 0])), PART),
    "offsets beyond the end": replaced(header_of(lambda h: first(h).update(data_offsets=[1 << 60, 1 << 61])), PART),
    "a shape of 2^62": replaced(header_of(lambda h: first(h).update(shape=[1 << 62])), PART),
    "a shape that overflows": replaced(header_of(lambda h: first(h).update(shape=[1 << 32, 1 << 32])), PART),
    "another dtype of one size": replaced(header_of(lambda h: first(h).update(dtype="I32")), PART),
    "a dtype that is none": replaced(header_of(lambda h: first(h).update(dtype="PICKLE")), PART),
    "a key twice in a header": replaced(raw_header(lambda t: b"{" + t[1:-1].rstrip(b"} ") + b"}," + t[1:]), PART),
    "a deep header": replaced(raw_header(lambda t: b'{"a":' + DEEP + b"}"), PART),
    "a header of 100 MB": replaced(huge_header, PART),
    "a key twice": resealed(lambda t: t.replace(b'"tensors"', b'"format": 1, "tensors"', 1)),
    "deep JSON": resealed(lambda t: t.replace(b'"format": 1', b'"format": 1, "deep": ' + DEEP, 1)),
    "many empty lists": resealed(lambda t: b'{"a": [' + b"[]," * (1 << 23) + b"1], " + t[1:]),
    "NaN as the version": resealed(lambda t: t.replace(b'"version": 4', b'"version": NaN', 1)),
    "infinity in the state": edited(lambda v: v["run"].update({key: float("inf") for key in v["run"]})),
    "a number of 10^5 digits": resealed(lambda t: t.replace(b'"format": 1', b'"format": ' + b"9" * 100_000, 1)),
    "1e999 as the version": resealed(lambda t: t.replace(b'"version": 4', b'"version": 1e999', 1)),
    "a list as a manifest": resealed(lambda _: b'[1, {"a": 1}'),
    "not UTF-8": resealed(lambda t: t.replace(b'"format"', b'"\xff\xfe": 0, "format"', 1)),
    "UTF-16": resealed(lambda t: t.decode().encode("utf-16")),
    "a format of the future": edited(lambda v: v.update(format=2)),
    "True as the format": edited(lambda v: v.update(format=True)),
    "text as a format": edited(lambda v: v.update(format="\x1b]0;title\x07")),
    "escapes as the date": edited(lambda v: v.update(created="\x1b[2J\x1b]0;owned\x07")),
    "a shape of 2^61": edited(lambda v: (tensor(v).update(shape=[1 << 61, 5]), chunk(v).__setitem__(3, [1 << 61, 5]))),
    "a shape of many dims": edited(lambda v: (tensor(v).update(shape=[1] * 5000), chunk(v).__setitem__(2, [0] * 5000),
                                              chunk(v).__setitem__(3, [1] * 5000))),
    "a negative shape": edited(lambda v: tensor(v).update(shape=[-5, -5])),
    "a shape of floats": edited(lambda v: tensor(v).update(shape=[5.0, 5.0])),
    "a negative offset": edited(lambda v: chunk(v).__setitem__(2, [-1, 0])),
    "an offset beyond": edited(lambda v: chunk(v).__setitem__(2, [1, 0])),
    "an overlap": edited(lambda v: tensor(v)["chunks"].append([PART, "weight@1,0", [1, 0], [4, 5]])),
    "a hole": edited(lambda v: tensor(v).update(chunks=[])),
    "a million empty chunks": edited(
        lambda v: tensor(v)["chunks"].extend([PART, str(i), [0, 0], [0, 5]] for i in range(1_000_000))),
    "chunks cut along all dims": edited(lambda v: v["tensors"].update(
        w={"shape": [2] * 24, "dtype": "uint8", "chunks": [[PART, "w", [0] * 24, [1] * 24]]})),
    "a dtype of objects": edited(lambda v: tensor(v).update(dtype="__class__")),
    "a dtype that is a list": edited(lambda v: tensor(v).update(dtype=["float32"])),
    "chunks that are a text": edited(lambda v: tensor(v).update(chunks="abcd")),
    "tensors that are a list": edited(lambda v: v.update(tensors=[1])),
    "files that are null": edited(lambda v: v.update(files=None)),
    "a file of more fields": edited(lambda v: v["files"].update(x={"size_bytes": 1, SEAL: HEX, "mode": 1})),
    "a lying size": edited(lambda v: v["files"].update(x={"size_bytes": 1 << 61, SEAL: HEX})),
    "a size of 2^70": edited(lambda v: v["files"].update(x={"size_bytes": 1 << 70, SEAL: HEX})),
    "a tensor that is not in the file": edited(lambda v: chunk(v).__setitem__(1, "other@0,0")),
    "a module as a state": edited(lambda v: v.update(run={"__reduce__": ["os.mkdir", "canary"]})),
    "a list as a state": edited(lambda v: v.update(run=[], optimizer=[], policy=[])),
    "texts as states": edited(lambda v: v.update({key: "x" for key in v if key not in
                                                  ("format", "version", "tensors", "files")})),
    "nulls as states": edited(lambda v: v.update({key: None for key in v if key not in
                                                  ("format", "version", "tensors", "files")})),
    "huge counts as states": edited(lambda v: v.update(json.loads(
        json.dumps({key: each for key, each in v.items() if key not in ("format", "version", "tensors", "files")})
        .replace(": 4", ": 4611686018427387904").replace(": 8", ": 4611686018427387904")))),
    "a manifest of 4 TB": in_place(sparse, "manifest.json"),
    "a part of 4 TB": in_place(sparse, PART),
    "a sparse tensor of 2 TB": sparse_checkpoint,
}  # fmt: skip

RUN: dict[str, Spoil] = {
    "pickle as weights": replaced(pickled, WEIGHTS),
    "torch.save as weights": replaced(torch_saved, WEIGHTS),
    "tied to itself": replaced(header_of(lambda h: h["__metadata__"].update(tied='{"a": "a"}')), WEIGHTS),
    "tied in a list": replaced(header_of(lambda h: h["__metadata__"].update(tied="[1]")), WEIGHTS),
    "tied too deep": replaced(header_of(lambda h: h["__metadata__"].update(tied=DEEP.decode())), WEIGHTS),
    "floats as integers": replaced(header_of(lambda h: first(
        {name: each for name, each in h.items() if each.get("dtype") == "F32"}).update(dtype="I32")), WEIGHTS),
    "a deep summary": replaced(written(b'{"a":' + DEEP + b"}"), "summary.json"),
    "a summary of lists": replaced(written(b'{"left": [[]]}'), "summary.json"),
    "a summary without left": replaced(written(b"{}"), "summary.json"),
    "a summary with NaN": replaced(written(b'{"left": [], "updates": NaN}'), "summary.json"),
    "a deep strategy": replaced(written(b"program = " + DEEP), "strategy.toml"),
    "a strategy of 4 MB": replaced(written(b"a.b = 1\n" * (1 << 19)), "strategy.toml"),
    "a strategy of dots": replaced(written(b"a" + b".a" * 30_000 + b" = 1"), "strategy.toml"),
    "a strategy that imports": replaced(
        written(b'program = "a"\nengine = "virtual"\nstrategy = "replicas=1 aggregation=os:mkdir"\n'), "strategy.toml"),
    "a history of one field": replaced(appended(b"x" * 300_000), "history.csv"),
    "a history with a quote": replaced(appended(b'"\n'), "history.csv"),
    "a history with a NUL": replaced(appended(b"\0\0,\0\n"), "history.csv"),
    "deep spans": replaced(written(DEEP), "spans.jsonl"),
    "spans that are no numbers": replaced(written(b'{"action": []}\n'), "spans.jsonl"),
    "a FIFO as a summary": in_place(fifo, "summary.json"),
    "a device as weights": in_place(device, WEIGHTS),
    "weights of 4 TB": in_place(sparse, WEIGHTS),
    "a link as history": in_place(linked("/dev/zero"), "history.csv"),
}  # fmt: skip

SAFETENSORS: dict[str, Spoil] = {
    "pickle": replaced(pickled, WEIGHTS),
    "legacy tar": replaced(legacy_tar, WEIGHTS),
    "zip bomb": replaced(zip_bomb, WEIGHTS),
    "2^63 header": replaced(lambda p, _: (1 << 63).to_bytes(8, "little") + p.read_bytes()[8:], WEIGHTS),
    "100 MB header": replaced(huge_header, WEIGHTS),
    "deep header": replaced(raw_header(lambda t: b'{"a":' + DEEP + b"}"), WEIGHTS),
    "overlap": replaced(header_of(lambda h: [each.update(data_offsets=[0, 4]) for key, each in h.items()
                                             if key != "__metadata__"] and None), WEIGHTS),
    "huge shape": replaced(header_of(lambda h: first(h).update(shape=[1 << 62])), WEIGHTS),
    "wrong dtype": replaced(header_of(lambda h: first(h).update(dtype="F99")), WEIGHTS),
    "name of the optimizer's": replaced(
        header_of(lambda h: {f"optimizer/{k}" if k != "__metadata__" else k: v for k, v in h.items()}), WEIGHTS),
    "sparse tensor of 2 TB": in_place(sparse_safetensors, WEIGHTS),
    "FIFO": in_place(fifo, WEIGHTS),
    "device": in_place(device, WEIGHTS),
    "index that leads out": lambda f, _: _index(f, {"weight": "../../../etc/passwd"}),
    "index that is absolute": lambda f, _: _index(f, {"weight": "/etc/passwd"}),
    "index of numbers": lambda f, _: _index(f, {"weight": 3}),
    "index of a missing name": lambda f, _: _index(f, dict.fromkeys(("weight", "bias", "x"), "a.safetensors")),
    "index of lists": lambda f, _: _index(f, []),
}  # fmt: skip

DCP: dict[str, Spoil] = {
    "pickle as .metadata": replaced(pickled, ".metadata"),
    "its own pickle": lambda _, __: None,  # without trust it is refused like any other
    "FIFO as .metadata": in_place(fifo, ".metadata"),
    "device as .metadata": in_place(device, ".metadata"),
    "4 TB of .metadata": in_place(sparse, ".metadata"),
}

INPUTS: dict[str, Spoil] = {
    "pickle": replaced(pickled, ""),
    "torch.save of an object": replaced(torch_saved, ""),
    "legacy tar": replaced(legacy_tar, ""),
    "zip bomb": replaced(zip_bomb, ""),
    "4 TB": in_place(sparse, ""),
}

HARMLESS = {
    "tied to itself",
    "floats as integers",
    "a summary with NaN",
    "a strategy that imports",  # it names a policy that is not known, and nothing is imported
    "escapes as the date",
}


def _index(folder: Path, weight_map: Any) -> None:
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


KINDS: dict[Kind, dict[str, Spoil]] = {
    "checkpoint": CHECKPOINT,
    "run": RUN,
    "safetensors": SAFETENSORS,
    "dcp": DCP,
    "inputs": INPUTS,
}


def cases() -> Iterator[tuple[str, Case]]:
    """Yield all cases with their names."""
    for kind, named in KINDS.items():
        for name, spoil in named.items():
            yield f"{kind}: {name}", Case(kind, spoil, name in HARMLESS, "state" in name)


def make_case(case: Case, sound: Path, target: Path) -> Path:
    """Copy the sound folder of a case's kind, and spoil it; return its path."""
    target.mkdir(exist_ok=True)
    path = target / case.kind
    if (sound / case.kind).is_dir():
        shutil.copytree(sound / case.kind, path)
    else:
        shutil.copyfile(sound / case.kind, path)
    case.spoil(path, target / "canary")
    return path
