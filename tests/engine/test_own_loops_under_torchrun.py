"""Own loops in ranks that torchrun has started, by launch and by join: each trains what the plain torch loop trains."""

import signal
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline import InputError, Program
from tests.engine import own_loops
from tests.engine.distributed_cases import kept
from tests.engine.own_loops import ADAMW, BATCH, SGD, equal, loader, make_model, train
from tests.ranks import Play

SCRIPT = Path(__file__).with_name("own_loops_script.py")


@pytest.fixture(scope="module")
def alone(play: Play, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one rank left."""
    folder: Path = tmp_path_factory.mktemp("alone")
    play(SCRIPT, size=1, folder=folder)
    return folder


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_train_what_the_plain_loop_trains(play: Play, alone: Path, tmp_path: Path, size: int) -> None:
    if size == 1:
        tmp_path = alone
    else:
        play(SCRIPT, size=size, folder=tmp_path)
    for name, make in (("sgd", SGD), ("adamw", ADAMW)):
        expected = own_loops.plain(make)
        for model, updates in kept(tmp_path, f"launch {name} synchronous", size):
            equal(model.state_dict(), expected)
            assert updates == 18
        for model, state in kept(tmp_path, f"join {name} synchronous", size):
            equal(model.state_dict(), expected)
            plain = Program(model=make_model, optimizer=SGD).build()
            optimizer = make(plain.parameters())
            own = loader(BATCH)
            train(plain, optimizer, lambda own=own: own)
            compared(state, optimizer.state_dict())
    for model, updates in kept(tmp_path, "gan", size):
        equal(model.state_dict(), own_loops.plain_gan())
        assert updates == 36


def test_the_first_rank_takes_what_loops_log(play: Play, tmp_path: Path) -> None:
    play(SCRIPT, "told", size=2, folder=tmp_path)
    for policy in ("synchronous", "asynchronous"):
        (stopped, logged), (other, nothing) = kept(tmp_path, f"told {policy}", 2)
        assert stopped == other == "five are enough"
        assert nothing == []
        for replica in (0, 1):
            steps = [step for own, step, _ in logged if own == replica]
            assert steps == list(range(1, len(steps) + 1))
            assert len(steps) >= (5 if replica else 4 * (policy == "synchronous"))  # the other goes its own pace else


@pytest.mark.parametrize("size", [1, 2])
def test_ctrl_c_ends_the_block_on_all_ranks_with_what_there_is(play: Play, tmp_path: Path, size: int) -> None:
    play(SCRIPT, "interrupted", size=size, folder=tmp_path)
    for policy in ("synchronous", "local-steps:period=2", "asynchronous"):
        (model, steps), *others = kept(tmp_path, f"interrupted {policy}", size)
        assert steps >= 5
        assert not model.state_dict().keys() ^ make_model().state_dict().keys()
        assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), make_model().parameters(), strict=True))
        for other, made in others:
            equal(other.state_dict(), model.state_dict())
            assert made == steps or policy == "asynchronous", "all ranks end after the same step"


def test_a_second_ctrl_c_is_raised_at_once() -> None:
    model, went_on, before = make_model(), list[int](), signal.getsignal(signal.SIGINT)

    def script() -> None:
        with paceline.join(model=model, optimizer=SGD(model.parameters())):
            for number in range(3):
                signal.raise_signal(signal.SIGINT)
                went_on.append(number)

    with pytest.raises(KeyboardInterrupt):
        script()
    assert went_on == [0]
    assert signal.getsignal(signal.SIGINT) is before


def compared(state: dict[str, Any], expected: dict[str, Any]) -> None:
    """The optimizer's state is that of the plain loop's, parameter by parameter."""
    assert state["param_groups"][0]["lr"] == expected["param_groups"][0]["lr"]
    assert state["param_groups"][0]["params"] == expected["param_groups"][0]["params"]
    assert state["state"].keys() == expected["state"].keys()
    for index, own in expected["state"].items():
        equal(state["state"][index], own)


def test_one_rank_under_other_policies_trains_what_the_plain_loop_trains(alone: Path) -> None:
    for name in ("launch sgd asynchronous", "join sgd asynchronous", "join sgd local-steps:period=2"):
        ((model, _),) = kept(alone, name, 1)
        equal(model.state_dict(), own_loops.plain(SGD))


def test_a_script_that_joins_alone_draws_what_it_would_have_drawn() -> None:
    def trained(joins: bool) -> dict[str, Any]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Dropout(0.5), torch.nn.Linear(6, 3)).double()
        optimizer = SGD(model.parameters())
        data = torch.utils.data.TensorDataset(*own_loops.data())
        batches = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
        if not joins:
            train(model, optimizer, lambda: batches)
            return model.state_dict()
        with paceline.join(model=model, optimizer=optimizer) as worker:
            train(model, optimizer, lambda: worker.data(batches))
        return model.state_dict()

    equal(trained(True), trained(False))


def test_goes_on_from_the_state_of_the_script_s_optimizer() -> None:
    model = Program(model=make_model, optimizer=SGD).build()
    optimizer, own = ADAMW(model.parameters()), loader(BATCH)
    train(model, optimizer, lambda: own, epochs=1)
    saved = deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, lambda: own, epochs=1)
    again = Program(model=make_model, optimizer=SGD).build()
    again.load_state_dict(saved[0])
    resumed = ADAMW(again.parameters())
    resumed.load_state_dict(saved[1])
    later = loader(BATCH)
    list(later)
    with paceline.join(model=again, optimizer=resumed) as worker:
        train(again, resumed, lambda: worker.data(later), epochs=1)
    equal(again.state_dict(), model.state_dict())


def test_an_error_of_the_script_is_raised_as_it_is() -> None:
    model = make_model()
    with pytest.raises(ZeroDivisionError), paceline.join(model=model, optimizer=SGD(model.parameters())):
        1 / 0  # noqa: B018


def test_the_end_of_the_budget_ends_the_block() -> None:
    model = make_model()
    optimizer, steps = SGD(model.parameters()), 0
    with paceline.join(model=model, optimizer=optimizer, steps=3):
        while True:
            optimizer.zero_grad()
            model(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
            optimizer.step()
            steps += 1
    assert steps == 3


def test_refusals_say_what_to_write() -> None:
    model = make_model()
    with (
        pytest.raises(InputError, match=r"torchrun --nproc-per-node 2"),
        paceline.join(model=model, optimizer=SGD(model.parameters()), strategy="replicas=2"),
    ):
        pass
    with (
        pytest.raises(InputError, match=r"write Program\(clip_norm=…\)"),
        paceline.join(Program(model=make_model, optimizer=SGD), clip_norm=1.0),
    ):
        pass
    with (
        pytest.raises(InputError, match=r"launch\(loop"),
        paceline.join(model=model, optimizer=SGD(model.parameters()), engine="local"),
    ):
        pass
    with (
        pytest.raises(InputError, match=r"has no 0\.weight"),
        paceline.join(model=model, optimizer=SGD(model[2].parameters())),
    ):
        pass
    with pytest.raises(InputError, match=r"join\(model=model, optimizer=optimizer\)"), paceline.join(model=model):
        pass
    with (
        pytest.raises(InputError, match=r"only the first worker of each replica has a loop .* write paceline\.launch"),
        paceline.join(own_loops.program(), strategy="replicas=2 stages=2 aggregation=asynchronous"),
    ):
        pass


def test_a_state_is_loaded_before_the_block_and_a_model_is_where_the_strategy_computes() -> None:
    model = make_model()
    optimizer = SGD(model.parameters())
    with pytest.raises(InputError, match="load the state before"), paceline.join(model=model, optimizer=optimizer):
        optimizer.load_state_dict(optimizer.state_dict())
    assert not {"step", "state_dict", "load_state_dict"} & vars(optimizer).keys()
    elsewhere = torch.nn.Linear(2, 2, device="meta")
    with (
        pytest.raises(InputError, match="write device=meta"),
        paceline.join(model=elsewhere, optimizer=SGD(elsewhere.parameters())),
    ):
        pass
