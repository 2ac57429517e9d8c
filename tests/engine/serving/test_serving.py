"""Processes that join a server by its address, train by loops of their own and leave."""

import gc
import json
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import paceline
from paceline import InputError, Run
from paceline.aggregation import Aggregation
from paceline.callbacks import Callback
from paceline.core.registry import family_of
from tests.combinations import OPTIONS
from tests.engine import own_loops
from tests.engine.local.commands import eventually
from tests.engine.own_loops import BATCH, data, equal, loader
from tests.engine.serving.serving_cases import Script, Served, beside, gradient_step, rows, start, state_of

Serve = Callable[..., Served]

FAMILY = family_of(Aggregation)
assert FAMILY is not None
# What may be elastic on Ray: of Hogwild a replica knows its next batches by itself. Portions are of batches of a run.
POLICIES = sorted(set(FAMILY.entries) - {"hogwild", "sandblaster"})


def batches(count: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return so many batches, which differ."""
    inputs, targets = data()
    chosen = torch.randint(0, len(inputs), (count, BATCH), generator=torch.Generator().manual_seed(seed))
    return [(inputs[rows], targets[rows]) for rows in chosen]


@pytest.mark.parametrize("make", ["sgd", "adamw"])
@pytest.mark.parametrize("policy", ["asynchronous", "synchronous"])
def test_alone_it_is_the_plain_loop(served: Serve, make: str, policy: str) -> None:
    server = served(f"replicas=1..3 aggregation={policy}", make)
    with server.joined(make) as (worker, model, optimizer):
        own = loader(BATCH)
        own_loops.train(model, optimizer, lambda: worker.data(own))
        assert (worker.replica, len(worker.data(own))) == (0, 6)
    run = server.run()
    expected = own_loops.plain(own_loops.MAKERS[make])
    equal(state_of(model), expected)
    equal(dict(run.state), expected)
    assert run.summary["updates"] == 18
    assert run.left == []


def test_what_a_loader_draws_is_what_it_drew_before(script: Callable[[str], Script], tmp_path: Path) -> None:
    inputs, targets = data()
    shuffled = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), 16, shuffle=True)
    torch.manual_seed(4)
    expected = [batch[1].tolist() for batch in shuffled]
    server = script("serve")  # another process, with a generator of its own
    eventually((tmp_path / "run" / "server.json").exists)
    model, optimizer = start()
    torch.manual_seed(4)
    with paceline.join(model=model, optimizer=optimizer, address=tmp_path / "run") as worker:
        assert [batch[1].tolist() for batch in worker.data(shuffled)] == expected
        other, steps = start()
        torch.manual_seed(4)
        with paceline.join(model=other, optimizer=steps, address=tmp_path / "run") as second:
            assert [batch[1].tolist() for batch in second.data(shuffled)] != expected, "another order"
    assert server.process.poll() is None


def test_two_synchronous_ones_are_a_batch_of_twice_the_size(served: Serve) -> None:
    server = served("replicas=2..2 aggregation=synchronous")

    def script() -> dict[str, torch.Tensor]:
        with server.joined() as (worker, model, optimizer):
            for inputs, targets in batches(12):
                gradient_step(model, (inputs[worker.replica :: 2], targets[worker.replica :: 2]))
                optimizer.step()
        return state_of(model)

    trained = beside(script, script)
    model, optimizer = start()
    for batch in batches(12):
        gradient_step(model, batch)
        optimizer.step()
    for state in (*trained, dict(server.run().state)):
        equal(state, state_of(model))


def test_two_asynchronous_ones_in_turns_apply_gradients_of_the_a_that_each_has(served: Serve) -> None:
    server = served("replicas=2..3 aggregation=asynchronous")
    turns, left = [threading.Semaphore(1), threading.Semaphore(0)], [threading.Event(), threading.Event()]
    own = [batches(9, seed=replica) for replica in (0, 1)]

    def script() -> tuple[int, dict[str, torch.Tensor]]:
        with server.joined() as (worker, model, optimizer):
            me = worker.replica
            for batch in own[me]:
                assert turns[me].acquire(timeout=60.0)
                gradient_step(model, batch)
                optimizer.step()
                turns[1 - me].release()
            if me == 0:  # it leaves with what the other one has trained, too
                left[0].wait(60.0)
            left[me - 1].set()
        return me, state_of(model)

    trained = beside(script, script)
    # By hand: each computes at the A that it has pulled, which is as old as the other's last step.
    model, optimizer = start()
    read = [state_of(model), state_of(model)]
    for step in range(18):
        me, current = step % 2, state_of(model)
        model.load_state_dict(read[me])
        gradient_step(model, own[me][step // 2])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(current[name])
        optimizer.step()
        read[me] = state_of(model)
    assert {me for me, _ in trained} == {0, 1}
    run = server.run()
    for state in (*(state for _, state in trained), dict(run.state)):
        equal(state, state_of(model))
    assert run.summary["staleness_mean"] == pytest.approx(17 / 18)


def test_who_comes_late_begins_with_a_as_it_is(served: Serve) -> None:
    server = served()
    with server.joined() as (first, model, optimizer):
        assert first.replica == 0
        for batch in batches(5):
            gradient_step(model, batch)
            optimizer.step()
        there = state_of(model)
        with server.joined() as (second, other, steps):
            assert second.replica == 1
            equal(state_of(other), there, 0.0)
            gradient_step(other, batches(1)[0])
            steps.step()
            trained = state_of(other)
        equal(state_of(other), trained, 0.0)
        with server.joined() as (third, _, _):
            assert third.replica == 1, "the lowest number that is free"
    equal(state_of(model), trained, 0.0)  # A as it was when this one left
    run = server.run()
    assert run.summary["updates"] == 6
    assert run.left == []


@pytest.mark.parametrize("policy", POLICIES)
def test_under_every_policy_all_may_leave_and_others_come(served: Serve, policy: str) -> None:
    strategy = f"replicas=2..3 aggregation={policy}{OPTIONS.get(policy, '')}"
    server = served(strategy, seconds=600.0, callbacks=[StopsAfterLog()])
    own = batches(6)

    def script() -> None:
        with server.joined() as (worker, model, optimizer):
            for inputs, targets in own:
                model.zero_grad()
                worker.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
                optimizer.step()

    beside(script, script)
    eventually(lambda: not rows(server.out))
    assert not server.ended
    beside(script, script)
    eventually(lambda: not rows(server.out))
    with server.joined() as (worker, model, optimizer):
        gradient_step(model, own[0])
        worker.backward(torch.nn.functional.cross_entropy(model(own[0][0]), own[0][1]))
        optimizer.step()
        worker.log({"last": 1.0})
        while True:
            worker.backward(torch.nn.functional.cross_entropy(model(own[0][0]), own[0][1]))
            optimizer.step()
    run = server.run()
    assert run.summary["stopped"] == "the last was logged"
    assert run.summary["updates"] > 0


class StopsAfterLog(Callback):
    """Ends training once something is logged."""

    def on_log(self, replica: int, step: int, values: Any, run: Any) -> None:
        run.stop("the last was logged")


def test_a_budget_in_steps_ends_the_loops(served: Serve) -> None:
    server = served("replicas=1..2 aggregation=synchronous", steps=4)
    made = 0
    with server.joined() as (_, model, optimizer):
        while True:
            gradient_step(model, batches(1)[0])
            optimizer.step()
            made += 1
    run = server.run()
    assert (made, run.summary["updates"]) == (4, 4)
    equal(state_of(model), dict(run.state), 0.0)


def test_a_budget_outlasts_those_that_leave(served: Serve) -> None:
    server = served("replicas=1..2", steps=6)
    for _ in range(2):
        assert not server.ended
        with server.joined() as (_, model, optimizer):
            for batch in batches(2):
                gradient_step(model, batch)
                optimizer.step()
    # The step that each was at when it left counts as one that was made.
    assert server.run().summary["updates"] == 4


def test_a_stop_that_a_loop_asks_for_ends_all(served: Serve) -> None:
    server = served("replicas=2..2 aggregation=asynchronous")

    def script() -> None:
        with server.joined() as (worker, model, optimizer):
            if worker.replica == 0:
                worker.stop("enough")
            while True:
                gradient_step(model, batches(1)[0])
                optimizer.step()

    beside(script, script)
    assert server.run().summary["stopped"] == "enough"


def test_the_programs_batches_are_dealt_out_once(served: Serve, tmp_path: Path) -> None:
    program = own_loops.program()
    server = served("replicas=2..3 aggregation=asynchronous", program=program, epochs=3)

    def script() -> int:
        samples = 0
        with paceline.join(program, address=server.out) as worker:
            for batch in worker.batches():
                samples += batch.samples
                worker.step(batch)
        return samples

    each = beside(script, script)
    run = server.run()
    # Free-running replicas overshoot by less than a batch each.
    assert 3 * own_loops.SAMPLES <= sum(each) <= 3 * own_loops.SAMPLES + 2 * BATCH
    assert "test_accuracy" in run.history[-1].row()
    loaded = paceline.load(server.out)
    assert (loaded.engine, loaded.summary["updates"]) == ("serving", run.summary["updates"])


def test_a_loop_over_another_loader_may_join_a_program_with_data(served: Serve) -> None:
    program = own_loops.program(model=own_loops.make_model, optimizer=own_loops.SGD)
    server = served("replicas=1..3", program=program, steps=3)
    model, optimizer = start()
    with paceline.join(model=model, optimizer=optimizer, address=server.out):
        for batch in batches(4):
            gradient_step(model, batch)
            optimizer.step()
    run = server.run()
    equal(state_of(model), dict(run.state), 0.0)


def test_the_norm_of_an_update_is_bound_by_the_server(served: Serve) -> None:
    server = served("replicas=1..3", clip_norm=own_loops.BOUND)
    with server.joined() as (worker, model, optimizer):
        own = loader(BATCH)
        own_loops.train(model, optimizer, lambda: worker.data(own))
    equal(state_of(model), own_loops.plain(own_loops.SGD, own_loops.BOUND))
    server.run()


def test_compressed_gradients(served: Serve) -> None:
    server = served("replicas=1..3 aggregation=synchronous compression=bf16")
    with server.joined() as (worker, model, optimizer):
        own = loader(BATCH)
        own_loops.train(model, optimizer, lambda: worker.data(own))
    equal(state_of(model), own_loops.plain(own_loops.SGD), 0.05)  # bf16 has eight bits
    server.run()


def test_threads_are_those_that_the_server_says(served: Serve) -> None:
    before = torch.get_num_threads()
    server = served("replicas=1..2 threads=1")
    torch.set_num_threads(3)
    try:
        with server.joined():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    server.run()


def test_checkpoints_and_resumes(served: Serve, tmp_path: Path) -> None:
    saved = {"checkpoint": tmp_path / "ckpt", "checkpoint_every": "3 steps"}
    own = batches(10)

    def trained(some: list[Any], **settings: Any) -> tuple[Run, dict[str, torch.Tensor]]:
        server = served("replicas=1..2", "adamw", **saved, **settings)
        with server.joined("adamw") as (_, model, optimizer):
            for batch in some:
                gradient_step(model, batch)
                optimizer.step()
        run = server.run()
        for path in sorted(server.out.iterdir()):
            path.unlink()
        server.out.rmdir()
        return run, state_of(model)

    first, _ = trained(own[:4])
    second, state = trained(own[4:], resume=True)
    assert (first.summary["updates"], second.summary["updates"]) == (4, 10)
    model, optimizer = start("adamw")
    for batch in own:
        gradient_step(model, batch)
        optimizer.step()
    equal(state, state_of(model))
    with pytest.raises(InputError, match=r"paceline\.serve"):
        paceline.resume(tmp_path / "ckpt", paceline.Program(model=own_loops.make_model, optimizer=own_loops.ADAMW))


def test_the_token_is_in_a_file_that_others_cannot_read_and_nothing_is_left(served: Serve) -> None:
    server = served()
    file = server.out / "server.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    told = json.loads(file.read_text())
    assert (told["host"], len(told["token"])) == ("127.0.0.1", 64)
    with server.joined():
        assert list(rows(server.out)) == [0]
    server.run()
    assert sorted(path.name for path in server.out.iterdir()) == [
        *("history.csv", "manifest.json", "model.safetensors", "spans.jsonl", "strategy.toml", "summary.json")
    ]
    with pytest.raises(InputError, match="no server is under way there"), server.joined():
        pass


def test_neither_sockets_nor_threads_nor_memory_are_left(served: Serve) -> None:
    def once() -> None:
        server = served("replicas=2..3 aggregation=asynchronous")

        def script() -> None:
            with server.joined() as (_, model, optimizer):
                for batch in batches(3):
                    gradient_step(model, batch)
                    optimizer.step()

        beside(script, script)
        server.run()
        for path in server.out.iterdir():
            path.unlink()
        server.out.rmdir()

    once()  # what is opened once a process
    process, kept = psutil.Process(), set(threading.enumerate())
    gc.collect()
    files, shared = process.num_fds(), {path for path in Path("/dev/shm").iterdir() if "paceline" in path.name}
    once()
    gc.collect()
    eventually(lambda: set(threading.enumerate()) <= kept)
    eventually(lambda: process.num_fds() <= files)
    assert {path for path in Path("/dev/shm").iterdir() if "paceline" in path.name} <= shared


def test_by_host_and_port_with_the_token_of_the_environment(served: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", "a token of sixteen or more")
    server = served("replicas=1..2")
    told = json.loads((server.out / "server.json").read_text())
    assert told["token"] == "a token of sixteen or more"
    model, optimizer = start()
    with paceline.join(model=model, optimizer=optimizer, address=f"127.0.0.1:{told['port']}") as worker:
        assert worker.replica == 0
    server.run()
