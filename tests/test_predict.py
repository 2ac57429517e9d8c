"""predict gives what the model itself gives when it is evaluated, by whatever workers."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline import InputError, Program, predict, predictor
from paceline.api.predictor import read_inputs
from paceline.comm.fork_server import ForkServer
from paceline.core.errors import WorkerError
from paceline.datasets import load_program
from paceline.engine.inference import InferenceRequest, join_answers
from paceline.engine.spmd.launcher import WorkerPool
from paceline.program import call, leaves
from paceline.strategy import Strategy
from tests import zoo
from tests.engine.distributed_cases import ended, torchrun
from tests.engine.local import leaks

ROUNDING = 1e-12
"""Sums over what is divided are added up in another order."""

SGD = functools.partial(torch.optim.SGD, lr=0.05)


def program(job: Callable[[], zoo.Job]) -> Program:
    model, inputs, targets, loss = job()
    return Program(model=model, loss=loss, optimizer=SGD, train=(inputs, targets), batch_size=3, seed=5)


@functools.cache
def moved(job: Callable[[], zoo.Job]) -> dict[str, Tensor]:
    """Parameters after some steps, and running statistics that are no longer those of the start."""
    run = paceline.train(program(job), "replicas=1", engine="virtual", steps=3, progress=False)
    return dict(run.state)


def rows(inputs: Any, samples: int) -> Any:
    return {k: v[:samples] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[:samples]


def itself(given: Program, state: dict[str, Tensor], inputs: Any) -> Any:
    module = given.build()
    module.load_state_dict(state)
    with torch.no_grad():
        return call(module.eval(), inputs)


def named(output: Any) -> dict[str, Tensor]:
    """The tensors of an output, those of a transformers model by their names."""
    if isinstance(output, dict):
        return {f"{name}{i}": leaf for name, tree in output.items() for i, leaf in enumerate(leaves(tree))}
    return {str(i): leaf for i, leaf in enumerate(leaves(output))}


def compare(found: Any, expected: Any) -> None:
    mine, theirs = named(found), named(expected)
    assert mine.keys() == theirs.keys()
    assert mine
    for name, value in theirs.items():
        assert not mine[name].requires_grad
        torch.testing.assert_close(mine[name], value, rtol=0, atol=ROUNDING, msg=lambda s, n=name: f"{n}: {s}")


CASES = [
    (zoo.gpt2, "shards=2", 6),
    (zoo.gpt2, "stages=2", 5),
    (zoo.resnet, "shards=2", 4),
    (zoo.encoder, "shards=2", 1),
    (zoo.encoder, "stages=2 shards=2", 5),
    (zoo.cnn, "stages=2 shards=[2,1]", 6),
    (zoo.masked, "stages=2 shards=2 micro_batches=2", 6),
    (zoo.mlp, "stages=2", 1),
    (zoo.mlp, "stages=[2,1] micro_batches=4", 6),
]


@pytest.mark.parametrize(("job", "strategy", "samples"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_the_output_is_that_of_one_process(
    fork_server: ForkServer, job: Callable[[], zoo.Job], strategy: str, samples: int
) -> None:
    given, state, inputs, split = program(job), moved(job), rows(job().inputs, samples), Strategy.parse(strategy)
    request = InferenceRequest(given, split, state, 60.0, divides=True)
    with WorkerPool(request, split.workers, 1, fork_server) as crew:
        for few in (samples, max(1, samples - 1)):  # the second time by what was made for the first
            some = rows(inputs, few)
            compare(join_answers(crew.ask(some), split, some), itself(given, state, some))


def batchnorm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 4)).double()


def small(model: Callable[[], nn.Module] = batchnorm) -> Program:
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(12, 6, generator=draw, dtype=torch.float64)
    targets = torch.randint(4, (12,), generator=draw)
    return Program(model=model, loss=nn.functional.cross_entropy, optimizer=SGD, train=(inputs, targets), batch_size=4)


def test_a_run_a_folder_and_a_state_say_what_is_asked(tmp_path: Path) -> None:
    given, before = small(), leaks.files()
    run = paceline.train(given, "shards=2", steps=3, progress=False, out=tmp_path / "run")
    inputs = given.train[0][:5]  # type: ignore[index]
    expected = itself(given, dict(run.state), inputs)
    for state in (run, tmp_path / "run", dict(run.state)):
        compare(predict(given, inputs, state=state), expected)
    compare(predict(given, inputs, "shards=2", state=run), expected)
    start = predict(given, inputs)
    compare(start, itself(given, given.build().state_dict(), inputs))
    assert not torch.equal(start, expected)
    assert not leaks.since(before)


def test_another_form_of_input_is_captured_anew(fork_server: ForkServer) -> None:
    """And the first form is answered by what was made for it."""
    given, inputs = small(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()), small().train[0]  # type: ignore[index]
    for divides in (True, False):
        request = InferenceRequest(given, Strategy(shards=2), None, 60.0, divides=divides)
        with WorkerPool(request, 2, 1, fork_server) as crew:
            for some in (inputs[:4], inputs.view(2, 6, 6), inputs[:3]):
                expected = itself(given, given.build().state_dict(), some)
                compare(join_answers(crew.ask(some), Strategy(shards=2), some), expected)


def test_a_predictor_answers_again_and_again_inside_its_block() -> None:
    given = small()
    inputs, state = given.train[0], given.build().state_dict()  # type: ignore[index]
    with predictor(given) as ask:
        for some in (inputs, inputs[:1], inputs[2:5]):
            compare(ask(some), itself(given, state, some))
        with pytest.raises(InputError, match="has no tensor of samples; give a batch"):
            ask(torch.tensor(1.0))
        compare(ask(inputs), itself(given, state, inputs))
    with pytest.raises(InputError, match="answers inside its block; write with"):
        ask(inputs)
    with pytest.raises(InputError, match="replicas=2 are copies of one model"):
        predictor(given, "replicas=2")


@pytest.mark.usefixtures("two_threads")
def test_this_process_is_left_as_it_was() -> None:
    torch.manual_seed(5)
    expected, threads = torch.rand(3), torch.get_num_threads()
    torch.manual_seed(5)
    predict(small(), torch.ones(2, 6, dtype=torch.float64), "threads=1")
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)  # the same numbers, bit for bit
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"strategy": "replicas=2"}, "replicas=2 are copies of one model, of which one answers; write replicas=1"),
        ({"strategy": "device=xla"}, "device=xla, but torch sees none here; write device=cpu"),
        ({"engine": "virtual"}, "engine for predict 'virtual'"),
        ({"engine": "distributed", "strategy": "shards=2"}, "= 2 workers, but torchrun started 1; start 2"),
        ({"inputs": "words"}, "inputs='words' has no tensor of samples"),
        ({"inputs": torch.ones(0, 6)}, "give a batch of at least one sample"),
        ({"state": {}}, "state does not fit the program's model: "),
    ],
)
def test_what_can_not_be_done_is_refused(words: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        predict(small(), **{"inputs": torch.ones(2, 6, dtype=torch.float64)} | words)


class Dies(nn.Module):
    """In evaluation; in the process that made it, not in the one that asks."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.head, self.how = nn.Linear(6, 6), nn.Linear(6, 4), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "raises":
            raise ValueError("the tape is torn")
        if os.environ["RANK"] == "1":
            signal.raise_signal(signal.SIGKILL)
        return self.head(self.first(x).relu())


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("raises", InputError, "the tape is torn"),
        ("dies", WorkerError, r"rank 1 \(process \d+ on .*\) ended|rank 1 killed"),
    ],
)
def test_what_fails_in_a_worker_reaches_the_caller_and_leaves_nobody(
    fork_server: ForkServer, how: str, kind: type[Exception], said: str
) -> None:
    before = leaks.files()
    question = InferenceRequest(small(functools.partial(Dies, how)), Strategy(shards=2), None, 20.0)
    with pytest.raises(kind, match=said), WorkerPool(question, 2, 1, fork_server) as crew:
        crew.ask(torch.ones(3, 6))
    assert not fork_server._children
    assert not leaks.since(before)


SCRIPT = """
import functools, sys, torch
from paceline import predict
from tests.test_predict import compare, itself, small
given = small()
inputs = given.train[0][:5]
expected = itself(given, given.build().state_dict(), inputs)
for strategy in ("shards=2", "stages=2 micro_batches=2"):
    compare(predict(given, inputs, strategy, engine="distributed:gloo"), expected)
"""


def test_ranks_that_torchrun_started_all_have_the_output(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    process = torchrun(script, ranks=2, folder=tmp_path)
    said = ended(process)
    assert process.returncode == 0, said


def command(*words: str | Path) -> "subprocess.CompletedProcess[str]":
    main = "from paceline.cli.main import main; main()"
    line = [sys.executable, "-c", main, "predict", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=100)


def test_the_command_reads_a_file_and_writes_one(tmp_path: Path) -> None:
    inputs = torch.rand(5, 64, generator=torch.Generator().manual_seed(1))
    torch.save(inputs, tmp_path / "x.pt")
    words = ("digits", "--strategy", "shards=2", "--input", tmp_path / "x.pt", "--out", tmp_path / "y.pt", "--json")
    done = command(*words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"strategy": "shards=2", "out": str(tmp_path / "y.pt"), "shapes": [[5, 10]]}
    digits = load_program("digits", data=None, seed=None, batch_size=None)
    expected = itself(digits, digits.build().state_dict(), inputs)
    torch.testing.assert_close(torch.load(tmp_path / "y.pt", weights_only=True), expected)


@pytest.mark.parametrize("content", [b"hi\n", b"words", b"", b"\xff" * 40])
def test_files_that_torch_save_has_not_written(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(InputError, match=r"x.pt can't be read: it holds no tensors that torch.save has written"):
        read_inputs(tmp_path / "x.pt")


def test_the_command_refuses_what_is_no_input(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_text("words", encoding="utf-8")
    done = command("digits", "--input", tmp_path / "x.pt", "--out", tmp_path / "y.pt")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{tmp_path / 'x.pt'} can't be read: it holds no tensors" in done.stderr
    done = command("digits", "--input", tmp_path / "none.pt", "--out", tmp_path / "y.pt")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{tmp_path / 'none.pt'} is no file; write the path of what torch.save has written" in done.stderr
    assert not (tmp_path / "y.pt").exists()
