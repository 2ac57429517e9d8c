"""Virtual time over a network: messages that queue, servers of A in slices, hosts that go and come back."""

from pathlib import Path
from typing import Any

import pytest

from paceline import InputError, Run, launch, train
from paceline.clock import Network, Times, parse
from paceline.clock.cluster_file import Links
from paceline.clock.network import Absence, Failures
from paceline.clock.times import Delay
from paceline.core.records import ReplicaExit
from paceline.trace.spans import SERVER
from tests import oracle
from tests.engine import programs

BYTES = 83 * 8
"""Of A: the small program's parameters, in float64."""

# A message takes 0.25 s + 0.25 s inside a host and 2 s + 0.5 s between two; in two slices 0.125 s and 1 s of that.
LINKS = Links(4 * BYTES, BYTES / 2, latency_s=0.25, between_latency_s=0.5)


def run(strategy: str, hosts: int, *absences: Absence, failures: Failures | None = None, **settings: Any) -> Run:
    given = Times.parse(settings.pop("times", "compute=1"))
    network = Network(hosts, LINKS, absences, failures)
    times = Times(given.compute, apply=given.apply, gradient=given.gradient, network=network)
    program = settings.pop("program", None) or programs.program()
    return train(program, strategy, engine="virtual", times=times, progress=False, **settings)


def spans(run: Run, replica: int, *actions: str) -> list[tuple[float, float]]:
    """(begin, end) of a replica's actions, in seconds."""
    return [(s.start_ns / 1e9, s.end_ns / 1e9) for s in run.spans if s.replica == replica and s.action in actions]


# ------------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("strategy", "hosts", "round_s"),
    [
        # One replica, beside its server: both messages inside the host, and an update of one gradient.
        ("replicas=1", 1, 0.5 + 1 + 0.5 + 0.75),
        # Replica 1 is on the other host.
        ("replicas=2 servers=1", 2, 2.5 + 1 + 2.5 + 1),
        # Replicas 1 and 2 share the server's link: the second A leaves at 2, the second Δ waits for the first.
        ("replicas=3 servers=1", 3, 3 * 2 + 2 * 0.5 + 1 + 1.25),
        # Two servers have half of each message, over two links, and half of each update.
        ("replicas=2 servers=2", 2, 1.5 + 1 + 1.5 + 0.5),
        # As many servers as hosts, if the strategy does not say.
        ("replicas=2", 2, 1.5 + 1 + 1.5 + 0.5),
        # Replicas go round the hosts: 0 and 2 are beside the server, and 1 alone uses the link.
        ("replicas=3 servers=1", 2, 2.5 + 1 + 2.5 + 1.25),
        # A comes once, however many Δs a replica computes of it.
        ("replicas=1 aggregation=sandblaster:portions=3", 1, 0.5 + 3 * (1 + 0.5) + 1.25),
    ],
)
def test_a_round_takes_what_its_messages_take(strategy: str, hosts: int, round_s: float) -> None:
    trained = run(strategy, hosts, steps=3, times="compute=1 apply=0.5 gradient=0.25")
    assert trained.summary["seconds"] == pytest.approx(3 * round_s)


def test_replicas_at_their_own_pace() -> None:
    trained = run("replicas=2 servers=1 aggregation=asynchronous", 2, steps=3)
    assert trained.summary["seconds"] == pytest.approx(3 * (2.5 + 1 + 2.5))
    assert trained.summary["utilisation"] == pytest.approx([3 / 18, 3 / 18])


def test_what_is_computed_is_the_same() -> None:
    """A network decides when, and never what: synchronous training is still one process."""
    trained = run("replicas=3 servers=2", 2, steps=6)
    oracle.assert_same(trained.model, oracle.one_process(programs.program(), 3, 6), 1e-12)


def test_a_push_waits_for_the_link_from_the_end_of_its_computation_on() -> None:
    """The replica that computes for long has begun first, and does not hold the other one's push."""
    delay = Delay(parse("20"), fraction=0.34)
    seed = next(s for s in range(99) if delay.slowed(3, s) == {1})
    program = programs.program(seed=seed)
    trained = run("replicas=3 servers=1 aggregation=asynchronous", 3, steps=1, delay=delay, trace=True, program=program)
    assert spans(trained, 1, "push") == [(23.5, 26.0)]
    assert spans(trained, 2, "push") == [(5.5, 8.0)]


def test_messages_are_handed_to_the_network_in_order_of_time() -> None:
    """While the server is at work until 54, replica 1 pushes over the link that A of replica 0 takes at 54."""
    delay = Delay(parse("10"), fraction=0.5)
    seed = next(s for s in range(99) if delay.slowed(2, s) == {1})
    program = programs.program(seed=seed)
    trained = run(
        *("replicas=2 servers=2 aggregation=asynchronous", 2),
        **{"steps": 2, "delay": delay, "trace": True, "program": program, "times": "compute=1 apply=100"},
    )
    assert spans(trained, SERVER, "apply")[0] == (4.0, 54.0)
    assert spans(trained, 1, "push")[0] == (12.5, 14.0)
    assert spans(trained, 0, "pull") == [(0.0, 1.5), (54.0, 55.5)]


def test_spans_tile_the_time_of_a_replica() -> None:
    trained = run("replicas=3 servers=1 aggregation=buffered:k=2", 3, steps=4, trace=True, times="compute=1 apply=0.5")
    for replica in range(3):
        mine = spans(trained, replica, "wait", "pull", "compute", "push")
        assert mine[0][0] == 0.0
        assert [b for b, _ in mine[1:]] == pytest.approx([e for _, e in mine[:-1]])


def test_the_same_seed_is_the_same_run() -> None:
    settings: dict[str, Any] = {"failures": Failures(20.0, 4.0), "seconds": 100, "times": "compute=exponential:mean=1"}
    one, other = (run("replicas=6 aggregation=asynchronous servers=2", 3, **settings) for _ in range(2))
    assert one.to_json() == other.to_json()
    oracle.assert_same(one.model, dict(other.model.named_parameters()), 0.0)


# ---------------------------------------------------------------------------------------------- hosts that come and go


def test_a_host_goes_and_comes_back() -> None:
    trained = run("replicas=3 servers=1 aggregation=asynchronous", 3, Absence(2, 20.0, 30.0), seconds=60, trace=True)
    assert trained.left == [ReplicaExit(2, "host 2 went away", 20.0)]
    begun = [begin for begin, _ in spans(trained, 2, "wait", "pull")]
    assert not [begin for begin in begun if 20.0 < begin < 30.0]
    assert 30.0 in begun
    alone = [end - begin for begin, end in spans(trained, 1, "pull") if 22.0 < begin < 30.0]
    assert alone == pytest.approx([2.5]), "it has the link for itself"
    assert trained.summary["gradients"] == trained.summary["applied"] + trained.summary["discarded"]


def test_rounds_go_on_without_the_replicas_that_are_away() -> None:
    trained = run("replicas=3 servers=1", 3, Absence(2, 0.5, 1000.0), seconds=1000, trace=True)
    assert [end for _, end in spans(trained, 1, "push")][:4] == pytest.approx([6.0, 12.0, 18.0, 24.0])
    assert trained.summary["updates"] == pytest.approx(1000 / 6, abs=1)


def test_without_a_server_of_a_slice_updates_wait() -> None:
    trained = run(
        *("replicas=3 servers=2 aggregation=asynchronous", 3, Absence(1, 20.0, 30.0)),
        **{"seconds": 60, "trace": True, "times": "compute=1 apply=1"},
    )
    updates = spans(trained, SERVER, "apply")
    assert not [begin for begin, _ in updates if 20.0 < begin < 30.0]
    assert next(begin for begin, _ in updates if begin >= 30.0) == 30.0
    assert len([begin for begin, _ in updates if begin < 20.0]) > 2
    assert [each.replica for each in trained.left] == [1]


def test_a_host_that_goes_for_good_takes_its_replicas_along() -> None:
    trained = run("replicas=3 servers=1 aggregation=asynchronous", 3, Absence(2, 10.0), steps=5)
    assert trained.left == [ReplicaExit(2, "host 2 went away", 10.0)]
    assert 10 < trained.summary["gradients"] < 15
    assert trained.summary["seconds"] < 60


def test_a_run_does_not_wait_for_replicas_that_are_done() -> None:
    away = Absence(2, 100.0, 1000.0)
    trained = run("replicas=3 servers=1 aggregation=asynchronous", 3, away, steps=2)
    assert (trained.left, trained.summary["gradients"]) == ([], 6)
    assert trained.summary["seconds"] < 100


def test_but_for_those_that_are_not() -> None:
    trained = run("replicas=2 servers=1 aggregation=asynchronous", 2, Absence(1, 10.0, 1000.0), steps=3)
    assert trained.summary["seconds"] == pytest.approx(1006.0)
    assert trained.summary["gradients"] == 3 + 2, "the Δ under way is lost, and its step with it"


def test_an_epoch_stays_exact() -> None:
    away = Absence(1, 10.0, 30.0), Absence(2, 5.0)
    trained = run("replicas=3 servers=1", 3, *away, epochs=3)
    assert len(trained.left) == 2
    summary = trained.summary
    assert summary["samples_per_s"] * summary["seconds"] == pytest.approx(3 * programs.SAMPLES)


POLICIES = [
    *("synchronous", "synchronous:backups=1", "asynchronous", "stale-synchronous:bound=1", "smooth-switch:every=10"),
    *("buffered:k=2", "buffered:k=2,hold=false", "buffered:k=2,cancel=true", "local-steps:period=2"),
    *("local-steps:period=2,over=asynchronous", "elastic-averaging:period=2", "sandblaster:portions=7"),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_failures_under_any_policy(policy: str) -> None:
    trained = run(
        *(f"replicas=5 servers=2 aggregation={policy}", 4),
        **{"failures": Failures(30.0, 5.0), "seconds": 300, "times": "compute=exponential:mean=1 apply=0.1"},
    )
    summary = trained.summary
    assert len(trained.left) > 10
    assert {each.replica for each in trained.left} == set(range(5))
    assert summary["gradients"] == summary["applied"] + summary["discarded"]
    assert summary["updates"] > 10
    assert summary["seconds"] == 300


def test_a_users_loop_goes_on_where_its_host_is_back() -> None:
    def loop(worker: Any) -> None:
        for batch in worker.batches():
            worker.step(batch)

    network = Network(2, LINKS, (Absence(1, 10.0, 20.0),))
    strategy = "replicas=2 servers=1 aggregation=asynchronous"
    trained = launch(
        loop, programs.program(), strategy, engine="virtual", seconds=60, times=Times(network=network), progress=False
    )
    assert trained.left == [ReplicaExit(1, "host 1 went away", 10.0)]
    assert trained.summary["gradients"] > 10


# ------------------------------------------------------------------------------------------------------------- refusals


def test_servers_need_a_network() -> None:
    with pytest.raises(InputError, match=r"servers=2 .*write times='compute=0.01 network=cluster.toml', or servers=1"):
        train(programs.program(), "replicas=2 servers=2", engine="virtual", steps=1, progress=False)


@pytest.mark.parametrize("servers", ["servers=2", ""])
def test_a_slice_of_a_is_not_lost_for_good(servers: str) -> None:
    with pytest.raises(InputError, match=r"host 1 has a server of A, and goes for good at 5 s; write until_s = …"):
        run(f"replicas=2 {servers}", 2, Absence(1, 5.0), steps=1)


def test_other_engines_take_no_network() -> None:
    times = Times(network=Network(1, LINKS))
    with pytest.raises(InputError, match="times= sets virtual time, but engine=local runs in real time"):
        train(programs.program(), "replicas=1", engine="local", steps=1, times=times, progress=False)


def test_a_network_takes_time_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("hosts = 1\n[links]\ninside_bytes_per_s = 1e3\nbetween_bytes_per_s = 1e3\nlatency_s = 0.168\n")
    times = f"compute=0 network={path}"
    trained = train(programs.program(), "replicas=1", engine="virtual", seconds=5, times=times, progress=False)
    assert trained.summary["updates"] == 3  # 2 · (0.664 s + 0.168 s) each
