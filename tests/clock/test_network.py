"""Networks: their files, messages that queue for links, hosts that go and come back."""

import math
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.clock import Network, Times
from paceline.clock.cluster_file import Links
from paceline.clock.distributions import Constant
from paceline.clock.hosts import HostChanges
from paceline.clock.network import Absence, Failures, Traffic
from paceline.core.errors import InputError
from paceline.planner.cluster_file import read

LINKS = Links(inside_bytes_per_s=100.0, between_bytes_per_s=10.0, latency_s=0.25, between_latency_s=0.5)
FILE = """
hosts = 4
devices_per_host = 2
name = "ours"
[device]
flops_per_s = 1e12
memory_bytes = 4e9
memory_bytes_per_s = 1e11
[links]
inside_bytes_per_s = 1e9
between_bytes_per_s = 1e8
latency_s = 1e-4
[[absences]]
host = 3
from_s = 100
until_s = 200.0
[[absences]]
host = 1
from_s = 50.0
[failures]
mean_time_between_s = 3600.0
mean_time_to_repair_s = 60.0
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(FILE)
    return path


# --------------------------------------------------------------------------------------------------------------- files


def test_one_file_is_read_by_both(cluster: Path) -> None:
    network, planned = Network.read(str(cluster)), read(cluster)
    assert network.links == planned.messages.links == Links(1e9, 1e8, 1e-4, 1e-4)  # type: ignore[attr-defined]
    assert network.hosts == planned.hosts == 4
    assert planned.devices_per_host == 2
    assert network.absences == (Absence(3, 100.0, 200.0), Absence(1, 50.0, math.inf))
    assert network.failures == Failures(3600.0, 60.0)


def test_times_with_a_network_read_back(cluster: Path) -> None:
    text = f"compute=1 transfer=0 apply=0.5 gradient=0 network={cluster}"
    assert str(Times.parse(text)) == text
    assert Times.parse(text) == Times.parse(f"network={cluster} compute=1 apply=0.5")
    assert Times.parse(text).network == Network.read(str(cluster))
    assert Times(network=Network(2, LINKS)).network == Network(2, LINKS)


def test_the_path_is_relative_to_the_working_directory(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cluster.parent)
    assert Times.parse("network=cluster.toml").network == Network.read("cluster.toml")


def test_messages_take_the_time_of_one_of_the_two() -> None:
    with pytest.raises(InputError, match=r"and so does transfer; write 'compute=0.01 network=cluster.toml'"):
        Times(transfer=Constant(1.0), network=Network(2, LINKS))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("hosts = 4", "host = 4", "unknown key of the file 'host'; did you mean 'hosts'"),
        ("hosts = 4", "", "the file has no hosts; write hosts = … under it"),
        ("hosts = 4", "hosts = 0", "hosts=0, but it must be a whole number of at least 1"),
        ("hosts = 4", 'hosts = "4"', "hosts = '4' is not a whole number"),
        ("between_bytes_per_s = 1e8", "between_bytes_per_s = -1e8", "between_bytes_per_s = -100000000.0, which is not"),
        ("between_bytes_per_s = 1e8", "between_bytes_per_s = nan", "between_bytes_per_s = nan, which is not above 0"),
        ("between_bytes_per_s = 1e8", "", r"\[links\] has no between_bytes_per_s; write between_bytes_per_s = …"),
        ("between_bytes_per_s = 1e8", "bytes_per_s = 1e8", r"unknown key of \[links\] 'bytes_per_s'"),
        ("[links]", "[linkes]", "unknown key of the file 'linkes'; did you mean 'links'"),
        ("host = 3", "host = 4", r"\[\[absences\]\] says host = 4, but hosts = 4 are numbered from 0 to 3"),
        ("host = 3", "host = -1", "says host = -1, but hosts = 4 are numbered"),
        (
            "until_s = 200.0",
            "until_s = 100.0",
            "says from_s = 100.0 and until_s = 100.0; write 0 or more for the first",
        ),
        ("until_s = 200.0", "to_s = 200.0", r"unknown key of \[absences\] 'to_s'; did you mean 'host'|until_s"),
        ("from_s = 50.0", "", r"\[absences\] has no from_s"),
        ("[[absences]]\nhost = 1", "[other]\nhost = 1", "unknown key of the file 'other'"),
        (
            "mean_time_to_repair_s = 60.0",
            "mean_time_to_repair_s = 0",
            "mean_time_to_repair_s = 0.0, which is not above",
        ),
        ("mean_time_to_repair_s = 60.0", "", r"\[failures\] has no mean_time_to_repair_s"),
        ("hosts = 4", "hosts 4", "this is no TOML"),
    ],
)
def test_files_that_are_refused(cluster: Path, before: str, after: str, message: str) -> None:
    assert before in FILE
    cluster.write_text(FILE.replace(before, after))
    with pytest.raises(InputError, match=message) as refusal:
        Times.parse(f"network={cluster}")
    assert str(refusal.value).startswith(f"network={cluster}: ")


def test_absences_are_sections_of_their_own(cluster: Path) -> None:
    cluster.write_text("hosts = 2\nabsences = 3\n[links]\ninside_bytes_per_s = 1\nbetween_bytes_per_s = 1")
    with pytest.raises(
        InputError, match=r"absences are sections of their own; write \[\[absences\]\] before the lines"
    ):
        Network.read(str(cluster))


@pytest.mark.parametrize(("path", "message"), [("nowhere.toml", "can't be read"), ("a b.toml", "must hold no blank")])
def test_a_file_that_is_not_there(path: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Network.read(path)


# ------------------------------------------------------------------------------------------------------------- messages


def test_a_message_takes_bytes_over_bandwidth_and_latency() -> None:
    traffic = Traffic(Network(2, LINKS), servers=1, size_bytes=20)
    assert traffic.pull(0, 1.0) == 1.0 + 20 / 100 + 0.25
    assert traffic.pull(1, 1.0) == 1.0 + 20 / 10 + 0.5


def test_messages_queue_first_in_first_out_for_each_direction_of_a_link() -> None:
    traffic = Traffic(Network(3, LINKS), servers=1, size_bytes=20)
    assert [traffic.pull(1, 0.0), traffic.pull(2, 0.5), traffic.pull(1, 1.0)] == [2.5, 4.5, 6.5]
    assert traffic.push(1, 1.0) == 3.5, "the other direction is free"
    assert traffic.push(2, 1.0) == 5.5


def test_inside_a_host_nobody_waits() -> None:
    traffic = Traffic(Network(1, LINKS), servers=1, size_bytes=20)
    assert {traffic.pull(replica, 0.0) for replica in range(5)} == {0.2 + 0.25}


def test_a_message_waits_for_both_of_its_links() -> None:
    traffic = Traffic(Network(4, LINKS), servers=4, size_bytes=80)
    # A slice takes 2 s: from hosts 1, 2 and 3 one after the other, for they share the incoming link of host 0.
    assert traffic.pull(0, 0.0) == 6.5
    # To host 1: the one of host 0 begins at once; that of host 2, which sends until 4, then; that of host 3 at 6.
    assert traffic.pull(1, 0.0) == 8.5


@pytest.mark.parametrize(("servers", "seconds"), [(1, 4.0), (2, 2.0)])
def test_two_servers_halve_the_transfer(servers: int, seconds: float) -> None:
    traffic = Traffic(Network(2, LINKS), servers=servers, size_bytes=40)
    assert max(traffic.pull(replica, 0.0) for replica in range(2)) == seconds + 0.5


def test_more_servers_than_hosts_share_them() -> None:
    traffic = Traffic(Network(2, LINKS), servers=4, size_bytes=40)
    assert traffic.pull(0, 0.0) == 2.5  # two of four slices of 1 s come from host 1


def test_messages_of_a_host_that_is_away_wait() -> None:
    traffic = Traffic(Network(3, LINKS), servers=1, size_bytes=20)
    traffic.hold(0, 10.0)
    assert traffic.push(1, 1.0) == 12.5
    assert traffic.pull(1, 1.0) == 12.5


@given(
    messages=st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.floats(0.0, 5.0)), min_size=1, max_size=40),
    servers=st.integers(1, 5),
)
def test_no_link_carries_two_messages_at_once(messages: list[tuple[bool, int, float]], servers: int) -> None:
    """Of each replica and direction messages arrive in order, and no earlier than its link can carry them all."""
    hosts, now_s = 4, 0.0
    traffic = Traffic(Network(hosts, LINKS), servers, size_bytes=20 * servers)
    last: dict[tuple[bool, int], float] = {}
    carried: dict[tuple[bool, int], int] = {}
    for pulls, replica, after_s in messages:
        now_s += after_s
        arrives_s = (traffic.pull if pulls else traffic.push)(replica, now_s)
        host = replica % hosts
        carried[pulls, host] = carried.get((pulls, host), 0) + sum(s % hosts != host for s in range(servers))
        assert arrives_s >= max(now_s, last.get((pulls, replica), 0.0))
        last[pulls, replica] = arrives_s
        link = traffic.incoming_s if pulls else traffic.outgoing_s
        assert link[host] >= 2.0 * carried[pulls, host] - 1e-9


# ---------------------------------------------------------------------------------------------------------------- hosts


def test_absences_that_overlap_are_one() -> None:
    times = ((5.0, 7.0), (1.0, 3.0), (2.0, 4.0), (4.0, 4.5))
    network = Network(2, LINKS, (*(Absence(0, *each) for each in times), Absence(1, 0.0, 9.0)))
    assert list(network.absences_of(0, seed=0)) == [(1.0, 4.5), (5.0, 7.0)]
    assert list(network.absences_of(1, seed=0)) == [(0.0, 9.0)]


def test_a_host_that_goes_for_good_fails_no_more() -> None:
    network = Network(1, LINKS, (Absence(0, 50.0),), Failures(10.0, 1.0))
    *before, last = network.absences_of(0, seed=0)
    assert last[1] == math.inf
    assert len(before) > 1


def test_failures_are_drawn_from_seed_and_host() -> None:
    network = Network(2, LINKS, failures=Failures(10.0, 1.0))
    first, again, other_host, other_seed = (
        list(islice(network.absences_of(host, seed), 2000)) for host, seed in ((0, 0), (0, 0), (1, 0), (0, 1))
    )
    assert first == again
    assert first not in (other_host, other_seed)
    ups = [begin - end for (_, end), (begin, _) in pairwise(first)]
    assert sum(ups) / len(ups) == pytest.approx(10.0, rel=0.1)
    assert sum(end - begin for begin, end in first) / len(first) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("handled", [0, 1, 2, 7])
def test_changes_go_on_after_the_last_one(handled: int) -> None:
    network = Network(3, LINKS, (Absence(1, 2.0, 3.0), Absence(2, 2.0)), Failures(10.0, 4.0))
    whole = HostChanges(network, seed=3)
    for _ in range(handled):
        whole.pop()
    resumed = HostChanges(network, seed=3, last=whole.last)
    assert [resumed.pop() for _ in range(20)] == [whole.pop() for _ in range(20)]


def test_a_run_that_begins_later_meets_the_absences_that_last() -> None:
    network = Network(3, LINKS, (Absence(0, 1.0, 5.0), Absence(1, 1.0, 3.0), Absence(2, 9.0)))
    changes = HostChanges(network, seed=0, start_s=4.0)
    assert [changes.pop()[:2] for _ in range(3)] == [(1.0, 0), (5.0, 0), (9.0, 2)]
    assert changes.next_s == math.inf
