"""Hostile checkpoints, runs and weights are refused by name, whatever reads them, and none of them runs code."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "reliability"

Load = Callable[[str], Any]


@pytest.fixture(scope="module")
def sound(load: Load, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("sound")
    load("hostile_corpus").make_sound(folder)
    return folder


@pytest.fixture(scope="module")
def reader(load: Load, sound: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    load("rows")
    corpus, rows = load("hostile_corpus"), load("rows.hostile")
    with contextlib.closing(rows.Reader()) as process:
        for kind in corpus.KINDS:
            copy = corpus.make_case(corpus.Case(kind, lambda _, __: None), sound, tmp_path_factory.mktemp("warm"))
            assert [answer["outcome"] for answer in process.read(kind, copy) if kind != "dcp"].count("raised") == 0
        yield process


@pytest.mark.parametrize("kind", ["dcp", "inputs", "run", "safetensors", "checkpoint"])
def test_none_is_read_and_none_runs_code(
    load: Load, sound: Path, reader: Any, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    corpus, rows = load("hostile_corpus"), load("rows.hostile")
    wrong = []
    for title, case in corpus.cases():
        if case.kind == kind:
            path = corpus.make_case(case, sound, tmp_path_factory.mktemp("case"))
            wrong += [rows.judge(title, case, path, answer) for answer in reader.read(kind, path)]
    assert [each for each in wrong if each is not None] == []


def test_a_sound_checkpoint_is_read_in_all_ways(load: Load, sound: Path, reader: Any, tmp_path: Path) -> None:
    corpus = load("hostile_corpus")
    path = corpus.make_case(corpus.Case("checkpoint", lambda _, __: None), sound, tmp_path)
    assert {answer["outcome"] for answer in reader.read("checkpoint", path)} == {"read"}
