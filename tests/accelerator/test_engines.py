"""Each engine × form × policy on an accelerator: the CPU's results, and nothing of A, Δ or optimizer copied."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from paceline.comm.fork_server import ForkServer
from tests import combinations, ranks
from tests.accelerator import running
from tests.accelerator.copied_bytes import Copied, of_trace
from tests.accelerator.engine_cases import BATCH_BYTES, STEPS
from tests.accelerator.target import Target
from tests.engine.distributed_cases import ended, kept, torchrun

SCRIPT = Path(__file__).with_name("engines_script.py")

SMALL_BYTES = 64
"""Of a step's loss, whether Δ is finite and, where workers have parts of it that is clipped, its norm: 8 for each."""

OPTIONS_BYTES = 2 * 3 * 6 * 8
"""What main reads of loops' optimizers at an update, of which an asynchronous step of two replicas makes two: six
numbers in float64, before and after it, and once more where a Δ comes from another device."""


A_BYTES = 8 * (6 * 8 + 8 + 8 * 3 + 3)
"""Of the parameters of ``programs.mlp``."""

LAYER_BYTES = 4 * 8 * 8
"""Of its hidden layer's output on a batch."""

ROUNDING = 1e-15
"""The norm of a Δ whose elements several workers have is a sum of theirs, which may end in another last digit; so may
outputs of about 1 of which shards have added up terms."""

COMBINATIONS_S = 540.0
"""Of some forty runs, each of up to four processes, which on a real device take seconds to begin."""

OWN, HOST = "own", "host"
"""Backends: the device's, and one that goes through the host's memory."""


def words_of(target: Target, backend: str, size: int) -> tuple[str, str, str]:
    """Return the words for a rank's script; skips where the device's own backend can't have so many ranks."""
    name = target.backend(size) if backend == OWN else "gloo"
    if name is None:
        pytest.skip(f"{size} ranks need as many devices of type {target.kind}, with a backend of their own")
    return name, target.kind, target.module


@pytest.mark.parametrize("which", ["virtual", "distributed:gloo"])
def test_one_process(session_fork_server: ForkServer, target: Target, which: str) -> None:
    cases = "tests.accelerator.engine_cases:alone"
    outcomes = running.run(session_fork_server, cases, device=target.module, engine=which, kind=target.kind)
    for name, (difference, to_host, to_device) in outcomes.items():
        assert difference <= target.bound(name.partition(" ")[0]), (name, difference)
        assert 0 < to_host <= SMALL_BYTES, (name, to_host)
        assert 0 < to_device <= BATCH_BYTES + SMALL_BYTES, (name, to_device)


@pytest.mark.parametrize(("size", "backend"), [(2, OWN), (2, HOST), (4, OWN), (4, HOST)])
def test_several_processes(play: ranks.Play, tmp_path: Path, target: Target, size: int, backend: str) -> None:
    play(SCRIPT, *words_of(target, backend, size), size=size, folder=tmp_path)
    for outcomes in kept(tmp_path, "outcomes", size):
        for name, (difference, to_host, to_device) in outcomes.items():
            bound = max(target.bound(name.partition(" ")[0]), ROUNDING if "clipped" in name else 0.0)
            assert difference <= bound, (name, difference)
            if backend == OWN:
                assert to_host <= SMALL_BYTES, (name, to_host)
                assert to_device <= BATCH_BYTES + SMALL_BYTES, (name, to_device)
    if target.simulated and backend == OWN:
        assert_one_order(kept(tmp_path, "asked", size))


def assert_one_order(of_ranks: Sequence[Mapping[str, list[str]]]) -> None:
    """Raise AssertionError unless ranks ask for messages and collectives in one order, as NCCL has them."""
    seen = defaultdict[str, list[list[str]]](list)
    for messages in of_ranks:
        for what, asked in messages.items():
            seen[what].append(asked)
    assert any("messages" in what for what in seen)
    assert any("collectives" in what for what in seen)
    for what, (one, *others) in seen.items():
        assert others, what
        assert all(each == one for each in others), what


@pytest.mark.parametrize("which", ["virtual", "distributed:gloo"])
def test_no_step_waits_for_the_device(
    session_fork_server: ForkServer, tmp_path: Path, target: Target, which: str
) -> None:
    cases, words = "tests.accelerator.late_cases:alone", {"engine": which, "kind": target.kind, "folder": str(tmp_path)}
    outcomes = running.run(session_fork_server, cases, device=target.module, **words)
    assert_near(outcomes, target)


def assert_near(outcomes: Mapping[str, float], target: Target) -> None:
    """Raise AssertionError unless each run is as near to the CPU's as it has to be."""
    for name, difference in outcomes.items():
        # Of buckets the squares of parameters are added up in another order, and ranks add up those of their parts.
        summed = "noise" in name or "clipped" in name
        bound = ROUNDING if summed and target.simulated else target.bound(name.partition(" ")[0])
        assert difference <= bound, (name, difference)


def test_no_step_of_two_ranks_waits_for_the_device(play: ranks.Play, tmp_path: Path, target: Target) -> None:
    script = SCRIPT.with_name("late_script.py")
    play(script, *words_of(target, OWN, 2), size=2, folder=tmp_path)
    for outcomes in kept(tmp_path, "late", 2):
        assert_near(outcomes, target)


def test_worker_processes(session_fork_server: ForkServer, target: Target) -> None:
    """A is in the device's memory, which all share."""
    cases = "tests.accelerator.local_cases:differences"
    found = running.run(session_fork_server, cases, device=target.module, on=asdict(target))
    assert all(difference <= target.bound("momentum") for difference in found.values()), found


def test_worker_processes_copy_the_batch_alone(session_fork_server: ForkServer, target: Target, tmp_path: Path) -> None:
    cases = "tests.accelerator.local_cases:copied"
    outcomes = running.run(session_fork_server, cases, device=target.module, on=asdict(target), folder=str(tmp_path))
    assert_batches_alone(outcomes)


def assert_batches_alone(outcomes: Mapping[str, list[dict[str, int]]]) -> None:
    """Raise AssertionError unless workers copy their batches alone, and main, the last, nothing."""
    for strategy, (*workers, main) in outcomes.items():
        assert workers, strategy
        for each in workers:
            assert 0 < each["to_host"] <= SMALL_BYTES, (strategy, workers)
            assert 0 < each["to_device"] <= BATCH_BYTES + SMALL_BYTES, (strategy, workers)
        assert max(main.values()) <= SMALL_BYTES + OPTIONS_BYTES, (strategy, main)


def test_a_killed_worker_process_is_replaced(session_fork_server: ForkServer, target: Target, tmp_path: Path) -> None:
    """Its step is made anew, checkpoints are those of the device's A, and no memory of the device stays behind."""
    cases = "tests.accelerator.local_cases:after_a_death"
    found = running.run(session_fork_server, cases, device=target.module, on=asdict(target), folder=str(tmp_path))
    assert found["difference"] <= target.bound("momentum"), found
    assert found["resumed"] <= target.bound("momentum"), found
    assert found["segments"] == 0, found


def test_actors(session_fork_server: ForkServer, target: Target, tmp_path: Path) -> None:
    """Each step a replica reads A and writes Δ, and stages and shards pass each other a layer's output, and no more."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'paceline[ray]'")
    cases, on = "tests.accelerator.ray_cases:outcomes", asdict(target)
    found = running.run(session_fork_server, cases, device=target.module, on=on, folder=str(tmp_path))
    for strategy, (difference, deltas, copied) in found.items():
        assert difference <= target.bound("momentum"), (strategy, difference)
        passed = LAYER_BYTES if "stages" in strategy or "shards" in strategy else 0
        assert len(copied) == (2 if "replicas=2" in strategy else 1), strategy
        assert deltas == len(copied) * STEPS // (2 if "period=2" in strategy else 1), strategy
        for to_host, to_device in copied:
            assert 0 < to_host <= A_BYTES + passed + SMALL_BYTES, (strategy, to_host)
            assert 0 < to_device <= A_BYTES + BATCH_BYTES + passed + SMALL_BYTES, (strategy, to_device)


def test_actors_that_share_gpus(session_fork_server: ForkServer, target: Target, tmp_path: Path) -> None:
    """Of a Ray that counts two, three replicas have one each, two of them the same, and see no other."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'paceline[ray]'")
    if not target.simulated:
        pytest.skip("has as many GPUs as Ray is told")
    cases, on = "tests.accelerator.ray_cases:shared_gpus", asdict(target)
    found = running.run(session_fork_server, cases, device=target.module, on=on, folder=str(tmp_path))
    assert sorted(visible for visible, _ in found) == ["0", "0", "1"]
    assert all(own == [int(visible)] for visible, own in found), found


def test_predictions(session_fork_server: ForkServer, target: Target) -> None:
    cases = "tests.accelerator.local_cases:predictions"
    found = running.run(session_fork_server, cases, device=target.module, on=asdict(target))
    for strategy, difference in found.items():
        # On the CPU one shard may have answered with the model itself, whose sums are in another order.
        assert difference <= max(target.bound("momentum"), ROUNDING if "shards" in strategy else 0.0), found


@pytest.mark.timeout(2 * COMBINATIONS_S)
@pytest.mark.parametrize("which", ["virtual", "local"])
def test_every_policy_over_every_form(session_fork_server: ForkServer, target: Target, which: str) -> None:
    if which == "local" and target.simulated:
        pytest.skip("all cells of worker processes take two minutes; test_worker_processes has one of each kind")
    cases, on = f"tests.accelerator.combination_cases:{which}", asdict(target)
    found = running.run(session_fork_server, cases, device=target.module, within_s=COMBINATIONS_S, on=on)
    assert_all_but_hogwild(found)


@pytest.mark.timeout(2 * COMBINATIONS_S)
def test_every_policy_over_every_form_on_ranks(tmp_path: Path, target: Target) -> None:
    """Under torchrun itself: after some dozen groups on Gloo that meet in one file, ranks find each other no more."""
    found, script = list[tuple[str, ...]](), Path(combinations.__file__).with_name("combinations_script.py")
    for size in sorted(set(combinations.WORKERS.values())):
        process = torchrun(script, "distributed:gloo", target.kind, target.module, ranks=size, folder=tmp_path)
        said = ended(process, within_s=COMBINATIONS_S)
        assert process.returncode == 0, said
        found += json.loads((tmp_path / f"{size}.json").read_text(encoding="utf-8"))
    assert_all_but_hogwild(found)


def assert_all_but_hogwild(found: list[tuple[str, ...]]) -> None:
    """Raise AssertionError unless all cells ran but those of replicas that write one A of the host."""
    assert len(found) == len(combinations.policies()) * len(combinations.FORMS)
    refused = {(policy, reason) for policy, _, _, reason in found if reason}
    assert {policy for policy, _ in refused} == {"hogwild"}, refused


def test_collectives_of_one_rank(session_fork_server: ForkServer, target: Target) -> None:
    backend = target.backend(1)
    if backend is None:
        pytest.skip(f"torch has no backend for device={target.kind}")
    cases = "tests.accelerator.device_cases:collectives"
    running.run(session_fork_server, cases, device=target.module, kind=target.kind, backend=backend)


def test_memory_is_what_is_predicted(session_fork_server: ForkServer, real: Target) -> None:
    found = running.run(
        session_fork_server, "tests.accelerator.device_cases:memory", device=real.module, kind=real.kind
    )
    # Besides, three more vectors at the most: autograd's gradient until it is in Δ, the A that is scored, and what the
    # optimizer's kernels and the libraries take meanwhile.
    assert found["predicted"] <= found["allocated"] <= found["predicted"] + 3 * 4, found


def test_a_trace_of_the_profiler_is_counted() -> None:
    def event(category: str, name: str, size: int) -> dict[str, object]:
        return {"cat": category, "name": name, "args": {"bytes": size}}

    copies = [
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 8),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 8),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 224),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 1000),
        event("cuda_runtime", "cudaMemcpyAsync", 1000),
    ]
    assert of_trace({"traceEvents": copies}) == Copied(to_host=16, to_device=224)
    assert of_trace({"traceEvents": [event("kernel", "add", 0)]}) == Copied(to_host=0, to_device=0)
    with pytest.raises(RuntimeError, match="recorded no kernel"):
        of_trace({"traceEvents": [event("cpu_op", "aten::add", 0)]})
