"""All that train refuses, before anything starts, in words that say what to write instead; and what it returns."""

import functools
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import paceline
from paceline import InputError, Program, Run, train
from paceline.api.train import check, open_engine
from paceline.core.safe_files import reserved
from paceline.device import kept_generators
from paceline.engine.virtual.engine import VirtualEngine
from tests.engine import programs


class StartedError(AssertionError):
    """The run was not refused."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> VirtualEngine:
    """The virtual engine, which must not be asked to run."""

    def run(*_: Any) -> Any:
        raise StartedError

    monkeypatch.setattr(VirtualEngine, "run", run)
    return VirtualEngine()


def refused(match: str, program: Any = None, strategy: Any = "replicas=2", **settings: Any) -> None:
    given = {"steps": 1, "engine": "virtual", "progress": False} | settings
    with pytest.raises(InputError, match=match):
        train(program or programs.program(), strategy, **given)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"steps": None}, "a run needs one budget, but has none; write seconds=60, or steps=, or epochs=, or until="),
        ({"seconds": 3}, "has steps=1 and seconds=3; write seconds=60"),
        ({"steps": 0}, "steps=0 must be a whole number above 0; write steps=10"),
        ({"steps": -1}, "steps=-1 must be a whole number above 0"),
        ({"steps": 2.5}, "steps=2.5 must be a whole number above 0; write steps=2"),
        ({"steps": True}, "steps=True must be a whole number above 0"),
        ({"steps": "10"}, "steps='10' must be a whole number above 0"),
        ({"steps": None, "seconds": float("inf")}, "seconds=inf must be a finite number above 0"),
        ({"steps": None, "seconds": float("nan")}, "seconds=nan must be a number above 0"),
        ({"steps": None, "epochs": 0}, "epochs=0 must be a number above 0"),
        ({"evaluate_every": 0}, "evaluate_every=0 must be a number above 0"),
        ({"steps": None, "until": "train_loss<=1"}, "alone does not say how often to evaluate; write evaluate_every=1"),
        (
            {"until": "accuracy"},
            "'accuracy' is no condition, .* write until='test_accuracy>=0.97'. Fields: time_s",
        ),
        ({"until": "train_loss < .5"}, "write until='train_loss<=.5'"),
        ({"until": "train_loss<=1.2.3"}, "is no condition"),
        ({"until": "train_loss<=e"}, "is no condition"),
        ({"until": 5}, "until=5 is no condition"),
        ({"until": "train_los<=1"}, "unknown history field in until= 'train_los'; did you mean 'train_loss'"),
        ({"until": "test_accuracy>=1"}, "unknown history field in until= 'test_accuracy'"),
        ({"engine": "vitual"}, "unknown engine 'vitual'; did you mean 'virtual'"),
        (
            {"engine": "distributed"},
            r"replicas=2 needs 2 processes, .* torchrun --nproc-per-node 2 script.py, or write engine='local'",
        ),
        ({"engine": "distributed:"}, "engine='distributed:' names no backend; write engine='distributed:gloo'"),
        ({"engine": "distributed:mpi"}, "unknown backend 'mpi'; known: gloo, hierarchical, nccl, shm"),
        (
            {"engine": "distributed:nccl"},
            "moves memory of device=cuda, but device=cpu; write engine='distributed:gloo'",
        ),
        ({"engine": "ray:"}, "engine='ray:' names no cluster; write engine='ray:auto'"),
        ({"engine": "local", "times": "compute=1"}, "engine=local runs in real time; write engine='virtual'"),
        ({"steps": None, "until": "train_los<=1"}, "unknown history field in until= 'train_los'"),
        ({"times": "compute=-1"}, "compute=-1, but it must be 0 or more; write compute=0"),
        ({"times": "compute=normal:mean=0,std=-1"}, "compute=normal:mean=0,std=-1: std=-1, but"),
        ({"times": ""}, "times='' says nothing; write 'compute="),
        ({"out": ""}, "'' names no folder"),
        ({"out": 3}, "3 names no folder"),
        ({"times": "comput=1"}, "unknown time 'comput'; did you mean 'compute'"),
        ({"times": 0.01}, "times=0.01 is no Times and no text; write times='compute=0.01"),
        ({"delay": "gaussian:mean=1"}, "unknown distribution 'gaussian'"),
        ({"delay": 0.5}, "delay=0.5 is no Delay and no text; write delay='fraction=0.5 normal"),
        ({"on_nonfinite": "ignore"}, "unknown on_nonfinite 'ignore'"),
        ({"timeout_s": 0}, "timeout_s=0 must be a number of seconds above 0; write timeout_s=60"),
        ({"tensorboard": True}, "tensorboard=True writes next to the saved run; write out='runs/a' too"),
    ],
)
def test_settings(engine: VirtualEngine, settings: dict[str, Any], match: str) -> None:
    refused(match, **settings)


@pytest.mark.parametrize(
    ("strategy", "match"),
    [
        ("replicas=0", "replicas=0, but it must be a whole number of at least 1; write replicas=1"),
        ("replicas=2 aggregation=asynchronos", "unknown aggregation 'asynchronos'; did you mean 'asynchronous'"),
        ("replicas=2 aggregation=buffered:kk=2", "unknown option of buffered 'kk'; did you mean 'k'"),
        ("replicas=2 aggregation=buffered:k=0", "buffered:k=0, but it must be a whole number of at least 1"),
        ("replicas=2 aggregation=buffered:k=3", "k=3 Δs can never wait together.*write buffered:k=2"),
        ("replicas=2 aggregation=synchronous:backups=2", "backups=2 leaves no replica to wait for"),
        (
            "replicas=2 compression=fp16",
            "compression=fp16 is .* by engine='ray' or 'distributed' alone, not by engine=virtual",
        ),
        (
            "replicas=2 shard_optimizer=true",
            "shard_optimizer=True is .* by engine='distributed' alone.* leave it out",
        ),
        ("replicas=2 shard_parameters=true", "shard_parameters=True is supported by engine='distributed' alone"),
        ("replicas=2 aggregation=hogwild", "aggregation=hogwild writes memory that replicas share.*engine=local"),
        ("accumulate=2 aggregation=local-steps", "accumulate=2 is for policies that send gradients.*longer period"),
        ("replicas=51 partition=disjoint", "there are 51 replicas and 50 samples; write partition=global"),
        (3, "strategy is int, not a Strategy or its text; write 'replicas=4'"),
    ],
)
def test_strategies(engine: VirtualEngine, strategy: Any, match: str) -> None:
    refused(match, strategy=strategy)


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused only where there is no GPU")
def test_a_device_that_is_not_there() -> None:
    refused("device=cuda, but torch sees none here; write device=cpu", strategy="device=cuda", engine="local")


def test_a_device_that_torch_does_not_know() -> None:
    refused("device=gpu is no type of device that torch knows; write device=cpu", strategy="device=gpu")


def test_a_device_that_is_no_name() -> None:
    refused(
        "device='cuda:1' is no type of device; write device=cpu, device=cuda or device=auto", strategy="device=cuda:1"
    )


class Wrong(nn.Module):
    """Its output has nothing to do with what it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, :3] * self.weight).detach()


def thrower(*_: Any) -> Any:
    raise ZeroDivisionError("no")


def unfrozen(*_: Any) -> nn.Module:
    return programs.mlp().requires_grad_(False)


class Broken:
    """A data set whose samples can't be read."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        raise OSError("disk on fire")


class Triples(Broken):
    def __getitem__(self, index: int) -> Any:
        return 1.0, 2.0, 3.0


class Clamped(nn.Linear):
    """Writes its own parameter as it is used."""

    bound = 0.1

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-self.bound, self.bound)
        return super().forward(x)


class ClampedLater(Clamped):
    """Writes its weight from the first batch on, and changes it later."""

    bound = 100.0


SGD = functools.partial(torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"model": lambda: 3}, r"model\(\) returned int, not an nn.Module"),
        (
            {"model": lambda: nn.LazyLinear(3)},
            "weight has no shape before a first forward pass; give the layer its sizes",
        ),
        ({"model": lambda: nn.Linear("6", 3)}, r"model\(\) failed: TypeError"),
        (
            {"model": lambda: nn.Linear(5, 3).double()},
            r"can't take a batch of the training set \(input float64 \[4, 6\]\)",
        ),
        ({"model": lambda: nn.Linear(6, 3)}, "can't take a batch of the training set.*dtype"),
        (
            {"model": lambda: nn.Linear(6, 1).double()},
            r"output float64 \[4, 1\] does not fit the loss on target int64 \[4\]",
        ),
        (
            {"model": lambda: Clamped(6, 3).double()},
            "writes its parameter weight in forward or backward .* write aggregation=local-steps:period=1",
        ),
        ({"model": lambda: ClampedLater(6, 3).double()}, "writes its parameter weight in forward or backward"),
        ({"model": Wrong}, "the loss does not depend on any parameter"),
        ({"model": unfrozen}, "the loss does not depend on any parameter"),
        ({"loss": lambda o, t: nn.functional.cross_entropy(o, t, reduction="none")}, r"shape \(4,\), not a scalar"),
        ({"loss": lambda o, t: o.sum().reshape(1)}, r"shape \(1,\), not a scalar; take its mean"),
        ({"loss": lambda o, t: 1.0}, "loss returned float, not a tensor"),
        ({"loss": lambda o, t: o.argmax(1).double().mean()}, "the loss does not depend on any parameter"),
        ({"loss": thrower}, "does not fit the loss .*ZeroDivisionError: no"),
        ({"optimizer": lambda ps: 3}, r"optimizer\(parameters\) returned int, not a torch optimizer"),
        ({"optimizer": thrower}, r"optimizer\(parameters\) failed: ZeroDivisionError"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS calls the loss several times a step"),
        ({"scheduler": thrower}, r"scheduler\(optimizer\) failed: ZeroDivisionError"),
        ({"scheduler": ReduceLROnPlateau}, "scheduler ReduceLROnPlateau can't be stepped once per update"),
        (
            {"metrics": {"loss": lambda o, t: 0.0}},
            "test_loss is the program's loss in every record; write another name",
        ),
        ({"metrics": {"f1": lambda o, t: o}}, "metric 'f1' must give one number for output and target"),
        ({"train": Broken()}, "the first batch of train can't be had: OSError: disk on fire"),
        ({"train": Triples()}, r"a batch must be \(input, target\), but is list of 3; put several inputs in one tuple"),
        ({"train": lambda r, p, s: []}, r"train\(replica=0, replicas=2, seed=3\) gave no batch"),
        ({"train": lambda r, p, s: [1]}, r"a batch must be \(input, target\), but is int"),
        ({"train": thrower}, "the first batch of train can't be had: ZeroDivisionError: no"),
        ({"batch_size": None, "global_batch_size": 5}, "global_batch_size=5 can't be split evenly over replicas=2"),
        (
            {"loader": {"shuffle": True}},
            "which samples make a batch is said by batch_size= and seed=; leave shuffle out",
        ),
        ({"loader": {"num_worker": 1}}, "unknown option of loader= 'num_worker'; did you mean 'num_workers'"),
        ({"loader": {"collate_fn": thrower}}, "the first batch of train can't be had: ZeroDivisionError: no"),
    ],
)
def test_programs(engine: VirtualEngine, fields: dict[str, Any], match: str) -> None:
    refused(match, programs.program(**fields))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (
            {"model": programs.mlp()},
            r"\(model=…\) is one Sequential, but every .*; write model=lambda: ",
        ),
        (
            {"optimizer": torch.optim.SGD(programs.mlp().parameters())},
            r"\(optimizer=…\) is one SGD, but .*; write opt",
        ),
    ],
)
def test_a_program_has_functions_that_make_modules_and_optimizers(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match) as refusal:
        programs.program(**fields)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("program", [None.__class__, "digits", programs.program])
def test_what_is_no_program(engine: VirtualEngine, program: Any) -> None:
    refused("program is .*, not a Program; write paceline.Program", program)


@pytest.mark.parametrize(
    ("settings", "strategy", "fields", "match"),
    [
        ({"steps": None, "epochs": 1}, "replicas=2", {}, "epochs= needs a training set of known length"),
        ({}, "replicas=2 partition=disjoint", {}, "partition=disjoint needs a training set to divide"),
        ({}, "replicas=2", {"batch_size": None, "global_batch_size": 8}, "global_batch_size= has no effect"),
    ],
)
def test_data_that_come_from_a_function(
    engine: VirtualEngine, settings: dict[str, Any], strategy: str, fields: dict[str, Any], match: str
) -> None:
    refused(match, programs.program(train=lambda r, p, s: [programs.data()], **fields), strategy, **settings)


def test_an_output_folder_that_is_there(engine: VirtualEngine, tmp_path: Path) -> None:
    refused("exists, and nothing is overwritten; write another folder", out=tmp_path)


def test_an_output_folder_of_a_run_under_way(engine: VirtualEngine, tmp_path: Path) -> None:
    """It would train to its end, and then find that the other one has saved its run there."""
    with reserved(tmp_path / "a"):
        refused("another run that has not ended is to be saved in", out=tmp_path / "a")


def test_a_working_folder_that_is_gone(engine: VirtualEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    refused("the working folder has been removed; write cd and a folder that exists")


def test_torchrun(engine: VirtualEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    refused("this one was started by torchrun; run it with python", engine="local")


def test_what_is_good_is_not_refused(engine: VirtualEngine) -> None:
    check(programs.program(), "replicas=2", engine="virtual", steps=1)
    check(programs.program(), "replicas=2", engine=engine, until="train_loss<=-1.5e-3", evaluate_every=1)
    with pytest.raises(StartedError):
        train(programs.program(), engine="virtual", steps=1, progress=False)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("check", functools.partial(check, engine="virtual")),
        ("compare", lambda program, text, **settings: paceline.compare(program, [text], engine="virtual", **settings)),
    ],
)
def test_an_argument_that_there_is_not(name: str, call: Any) -> None:
    with pytest.raises(InputError, match=f"unknown argument of {name} 'stepz'; did you mean 'steps'"):
        call(programs.program(), "replicas=1", stepz=5)


def test_refusing_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    train(programs.program(model=programs.dropout), "replicas=2", engine="virtual", steps=2, progress=False)
    assert torch.equal(torch.rand(3), expected)


# -------------------------------------------------------------------------------------------------- what train returns


def scored(**fields: Any) -> Program:
    return programs.program(test=programs.data(samples=20), **fields)


@pytest.fixture(scope="module")
def finished() -> Run:
    program = scored(scheduler=functools.partial(StepLR, step_size=3))
    return train(program, "replicas=3 aggregation=buffered:k=2", engine="virtual", steps=5, trace=True, progress=False)


def test_a_run_tells_how_it_was_made(finished: Run) -> None:
    assert (finished.program_name, finished.engine) == ("program", "virtual")
    assert str(finished.strategy) == "replicas=3 aggregation=buffered:k=2"
    assert finished.left == []
    assert finished.summary["test_accuracy"] == finished.history[-1].test_accuracy is not None
    assert finished.summary["notes"] == {"gradient_batching": "up to 32 attempts that wait in one call"}
    assert not {"peak_memory_bytes", "step_time_s", "payload_bytes_per_step"} & finished.summary.keys()
    assert finished.spans
    for name, value in finished.model.state_dict().items():
        assert torch.equal(finished.state[name], value)


def test_a_run_can_be_saved_as_it_ends(tmp_path: Path) -> None:
    program, folder = scored(), tmp_path / "new" / "run"
    run = train(program, "replicas=2", engine="virtual", steps=3, out=folder, progress=False)
    loaded = paceline.load(folder, program)
    assert loaded.to_json() == run.to_json()
    assert all(torch.equal(loaded.model.state_dict()[n], v) for n, v in run.model.state_dict().items())


def test_metrics_of_the_programs_own() -> None:
    program = scored(metrics={"top2": lambda o, t: (o.topk(2).indices == t[:, None]).any(1).double().mean()})
    run = train(program, engine="virtual", steps=3, progress=False)
    output, target = run.model(program.test[0]), program.test[1]
    expected = (output.topk(2).indices == target[:, None]).any(1).double().mean().item()
    assert run.summary["test_top2"] == run.history[-1].test_metrics["top2"] == expected
    assert run.summary["test_accuracy"] is None


def test_accuracy_is_scored_where_the_output_is_scores_of_classes() -> None:
    regression = scored(loss=lambda o, t: (o.sum(1) - t).square().mean(), metrics=None)
    assert train(regression, engine="virtual", steps=1, progress=False).summary["test_accuracy"] is not None
    inputs, targets = programs.data()
    floats = programs.program(train=(inputs, targets.double()), test=(inputs, targets.double()), loss=regression.loss)
    assert train(floats, engine="virtual", steps=1, progress=False).summary["test_accuracy"] is None


def test_an_open_engine_is_used_and_stays_open() -> None:
    closed: list[bool] = []

    class Engine(VirtualEngine):
        def close(self) -> None:
            closed.append(True)

    with Engine() as engine:
        for _ in range(2):
            train(programs.program(), engine=engine, steps=1, progress=False)
            assert not closed
    assert closed == [True]


def test_open_engine_opens_by_name() -> None:
    with open_engine("virtual") as engine:
        assert engine.name == "virtual"


def test_progress_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Watch:
        def __call__(self, *_: Any) -> "Watch":
            return self

        def __enter__(self) -> Any:
            return told.append

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(sys.modules[check.__module__], "watcher", Watch())  # paceline.train is also a function
    train(scored(), "replicas=2", engine="virtual", steps=10, evaluate_every=5)
    assert [(p.fraction, p.updates, p.gradients) for p in told] == [(0.0, 0, 0), (0.5, 5, 10), (1.0, 10, 20)]
    assert told[0].loss is None
    assert told[1].loss > 0


def test_a_model_is_made_while_a_run_ends_in_another_thread() -> None:
    entered, making = threading.Event(), threading.Event()

    def run() -> None:
        with kept_generators([]):  # as a run does
            entered.set()
            making.wait(60.0)

    other = threading.Thread(target=run)
    other.start()
    assert entered.wait(60.0)

    def make() -> nn.Module:
        making.set()
        other.join(0.2)  # it restores torch's generator now, if it may
        return nn.Linear(3, 2)

    made, alone = (programs.program(model=each).build() for each in (make, lambda: nn.Linear(3, 2)))
    other.join()
    assert torch.equal(made.weight, alone.weight)
