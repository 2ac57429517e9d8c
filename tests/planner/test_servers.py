"""Servers of A on several hosts: closed forms beside simulated messages, placement, and the plans that have them."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

import paceline
from paceline import LocalSteps, Strategy
from paceline.aggregation import parse
from paceline.api.mesh_drawing import draw_mesh
from paceline.api.plan import Plans
from paceline.cli.main import app
from paceline.clock.cluster_file import Links
from paceline.clock.distributions import Constant
from paceline.clock.network import Network
from paceline.clock.times import Delay, Times
from paceline.core.errors import InputError
from paceline.planner.answer import answer
from paceline.planner.cluster_file import from_toml
from paceline.planner.explain import gains
from paceline.planner.policies import pace
from paceline.planner.served_plans import host_links, served_pace
from paceline.planner.servers import SERVERS, ServedReplicas, placement, server_counts

LINKS = Links(inside_bytes_per_s=1e9, between_bytes_per_s=25e6, latency_s=5e-6, between_latency_s=1e-4)
A_BYTES, APPLY_S = 4e6, 0.002  # 0.16 s on a link


def group(hosts: int, replicas: int, servers: int, batch_s: float, delay: Delay | None = None) -> ServedReplicas:
    """Replicas of A_BYTES on such links."""
    return ServedReplicas(hosts, replicas, servers, A_BYTES, LINKS, batch_s, APPLY_S, delay=delay)


def simulated_rate(policy: str, served: ServedReplicas, arrivals: int = 4000) -> float:
    """Batches a second, by messages over a network."""
    times = Times(Constant(served.batch_s), apply=Constant(served.apply_s), network=Network(served.hosts, served.links))
    sizes = {"size_bytes": served.size_bytes, "servers": served.servers}
    found = pace(policy, served.replicas, times, served.delay, arrivals=arrivals, **sizes)  # type: ignore[arg-type]
    return found.batches / found.update_s


# ------------------------------------------------------------------------------------------------------------ placement


@pytest.mark.parametrize(("hosts", "replicas", "servers"), [(1, 3, 1), (2, 2, 2), (4, 8, 4), (4, 6, 3), (3, 2, 5)])
def test_placement_is_that_of_the_drawing_and_of_virtual_time(hosts: int, replicas: int, servers: int) -> None:
    placed, network = placement(hosts, replicas, servers), Network(hosts, LINKS)
    assert [share.replicas for share in placed] == [
        tuple(ranks) for ranks in draw_mesh(f"replicas={replicas}", hosts, engine="ray").hosts
    ]
    for host, share in enumerate(placed):
        assert share.replicas == tuple(r for r in range(replicas) if network.host_of(r) == host)
        assert share.servers == tuple(s for s in range(servers) if network.host_of(s) == host)


# ------------------------------------------------------------------------------------- closed forms beside a simulation


def test_a_replica_that_shares_nothing_is_exact() -> None:
    for hosts, servers in ((1, 1), (2, 2), (4, 4)):
        served = group(hosts, 1, servers, 0.1)
        assert served.rate == pytest.approx(simulated_rate("asynchronous", served), rel=1e-3)


@pytest.mark.parametrize(
    ("hosts", "replicas", "servers", "batch_s", "within"),
    [
        # One server, whose link is free: 3 %; full, with many that wait for it: 1 / (N + 1) of N replicas.
        (4, 4, 1, 3.0, 0.03),
        (4, 16, 1, 0.3, 0.04),
        (4, 32, 1, 0.1, 0.03),
        # Several, whose links are free.
        (2, 2, 2, 1.0, 0.03),
        (4, 4, 2, 3.0, 0.06),
        (4, 4, 4, 3.0, 0.03),
        (8, 8, 8, 3.0, 0.03),
    ],
)
def test_asynchronous_rates(hosts: int, replicas: int, servers: int, batch_s: float, within: float) -> None:
    served = group(hosts, replicas, servers, batch_s)
    assert served.rate == pytest.approx(simulated_rate("asynchronous", served), rel=within)


def test_whole_messages_on_one_link_are_a_bound_for_shared_ones() -> None:
    """A closed network of N replicas at a link's two directions: N / (N + 1) where they meet by chance, 1 in turn."""
    for replicas in (4, 8, 16):
        served = group(4, replicas, 1, 1e-4)
        remote = [rate for each, rate in zip(served.classes, served.rates, strict=True) if each.phases[0].demands]
        many = replicas - replicas // 4
        assert many * remote[0] * A_BYTES / LINKS.between_bytes_per_s == pytest.approx(many / (many + 1), rel=0.02)
        assert served.rate < simulated_rate("asynchronous", served)


@pytest.mark.parametrize("policy", ["synchronous", "local-steps:period=4"])
@pytest.mark.parametrize(("hosts", "servers"), [(1, 1), (2, 1), (2, 2)])
def test_policies_under_which_all_begin_together(policy: str, hosts: int, servers: int) -> None:
    served = group(hosts, 2, servers, 0.1)
    found = served_pace(policy, served)
    assert found.batches / found.update_s == pytest.approx(simulated_rate(policy, served), rel=1e-3)


@pytest.mark.parametrize(("replicas", "servers"), [(4, 1), (4, 2), (4, 4), (8, 2), (8, 4)])
@pytest.mark.parametrize("batch_s", [1e-4, 0.1, 3.0])
def test_no_resource_is_busier_than_always(replicas: int, servers: int, batch_s: float) -> None:
    served = group(4, replicas, servers, batch_s, Delay.parse("fraction=0.5 exponential:mean=0.1"))
    assert 0 < served.busiest(served.rates)[1] < 1


def test_delays_make_replicas_slower_and_links_emptier() -> None:
    prompt, late = group(4, 4, 4, 0.1), group(4, 4, 4, 0.1, Delay.parse("fraction=0.5 exponential:mean=1"))
    assert late.rate < prompt.rate
    assert late.busiest(late.rates)[1] < prompt.busiest(prompt.rates)[1]
    assert group(4, 4, 4, 0.1, Delay.parse("fraction=0.5 pareto:scale=1,shape=0.9")).rate > 0  # infinite means


def test_a_server_that_updates_slowly_is_the_bound() -> None:
    served = ServedReplicas(1, 8, 1, 4.0, LINKS, batch_s=0.01, apply_s=0.1)
    assert served.busiest(served.rates)[0] == SERVERS
    assert served.rate == pytest.approx(simulated_rate("asynchronous", served), rel=0.02)


def test_more_servers_divide_the_link_of_one() -> None:
    steps = [served_pace("synchronous", group(4, 8, n, 0.1)).update_s for n in server_counts(4)]
    assert steps == sorted(steps, reverse=True)


@pytest.mark.parametrize(
    ("policy", "within"),
    [
        ("synchronous", 0.02),  # 18,000 Δs: a standard error of 0.6 % in 4,500 rounds
        ("synchronous:backups=1", 0.02),
        ("buffered:k=2,cancel=true", 0.02),
        ("local-steps:period=4", 0.02),
        ("stale-synchronous:bound=1", 0.04),
        ("asynchronous", 0.02),
        ("buffered:k=2", 0.15),  # those that wait for the second are held longer than its share
        ("decoupled:period=4", 0.06),
    ],
)
def test_paces_of_late_replicas_on_one_host(policy: str, within: float) -> None:
    delay = Delay.parse("fraction=0.5 exponential:mean=0.2")
    served = ServedReplicas(1, 4, 1, 8e7, LINKS, 0.1, APPLY_S, delay=delay)  # 0.08 s in memory
    found, rate = served_pace(policy, served), simulated_rate(policy, served, arrivals=20_000)
    assert found.batches / found.update_s == pytest.approx(rate, rel=within)


# ---------------------------------------------------------------------------------------------------------------- plans

SHAPE = """
[model]
layers = {layers}
hidden = {hidden}
heads = 4
vocab = 1000
sequence = {sequence}
[train]
global_batch = 16
precision = "fp32"
"""

CLUSTER = """
hosts = {hosts}
devices_per_host = {each}
[device]
flops_per_s = 1e10
memory_bytes = 16e9
memory_bytes_per_s = 5e10
kind = "{kind}"
[links]
inside_bytes_per_s = 1e10
between_bytes_per_s = {between}
"""

LARGE, SMALL = {"layers": 8, "hidden": 1024, "sequence": 64}, {"layers": 2, "hidden": 16, "sequence": 64}


def planned(
    tmp_path: Path, size: dict[str, int], *, hosts: int = 4, each: int = 2, mbit: int = 200, **options: object
) -> Plans:
    """Plans for a shape on hosts with links of so many Mbit/s each."""
    shape, hosts_file = tmp_path / "shape.toml", tmp_path / "hosts.toml"
    shape.write_text(SHAPE.format(**size), encoding="utf-8")
    kind = options.pop("kind", "cpu")
    text = CLUSTER.format(hosts=hosts, each=each, between=mbit * 1e6 / 8 / each, kind=kind)
    hosts_file.write_text(text, encoding="utf-8")
    return paceline.plan(shape, cluster=hosts_file, **options)  # type: ignore[arg-type]


def test_a_large_model_behind_slow_links_gets_several_servers(tmp_path: Path) -> None:
    plans = planned(tmp_path, LARGE, engine="ray")
    servers = plans.best.servers
    assert servers is not None
    assert servers.count > 1
    assert servers.steps_s[servers.count] < servers.steps_s[1]
    assert f"servers={servers.count}" in str(plans.best.strategy)
    assert plans.best.provenance["servers"] == str(servers)
    assert f"{servers.count}, with which a step takes" in str(servers)


def test_a_small_model_or_one_host_gets_one(tmp_path: Path) -> None:
    for size, hosts, mbit in ((SMALL, 4, 100_000), (LARGE, 1, 200)):
        best = planned(tmp_path, size, hosts=hosts, mbit=mbit, engine="ray").best
        assert best.servers is not None
        assert best.servers.count == 1
        assert best.arrangement.replicas > 1
    assert str(best.servers) == "one, as replicas on one host share its memory"


def test_the_printed_strategy_is_the_plan(tmp_path: Path) -> None:
    plans = planned(tmp_path, LARGE, engine="ray", delay="fraction=0.5 exponential:mean=1")
    assert len({type(plan.strategy.aggregation) for plan in plans if plan.strategy}) > 4
    for plan in plans:
        assert plan.servers is not None
        strategy = Strategy.coerce(str(plan.strategy))
        assert strategy == plan.strategy
        assert strategy.servers == plan.servers.count
        drawn = draw_mesh(strategy, 4, engine="ray").hosts
        mesh = strategy.mesh
        assert [{mesh.coordinate(rank).replica for rank in ranks} for ranks in drawn] == [
            set(share.replicas) for share in plan.servers.hosts
        ]
        assert all(len(ranks) <= plans.cluster.devices_per_host for ranks in drawn)


def test_terms_add_up_and_are_not_negative(tmp_path: Path) -> None:
    for plan in planned(tmp_path, LARGE, engine="ray", delay="fraction=0.5 exponential:mean=1"):
        assert plan.servers is not None
        assert plan.cost.step_s == pytest.approx(plan.servers.steps_s[plan.servers.count])
        assert plan.samples_per_s == pytest.approx(plan.arrangement.samples / plan.cost.step_s)
        assert min(plan.cost.terms.values()) >= -1e-9


def test_servers_compete_with_all_reduce_where_replicas_are_late(tmp_path: Path) -> None:
    assert all(plan.servers is None for plan in planned(tmp_path, LARGE))
    delayed = planned(tmp_path, LARGE, delay="fraction=0.5 exponential:mean=30")
    served = [plan for plan in delayed if plan.servers is not None]
    assert served
    assert len(served) < len(delayed)
    assert not any(plan.servers for plan in planned(tmp_path, LARGE, hosts=1, delay="exponential:mean=30"))


def test_the_report_says_who_is_where_and_what_to_run(tmp_path: Path) -> None:
    plans = planned(tmp_path, LARGE, engine="ray")
    report = answer(plans.name, plans, plans.workload, plans.cluster, plans.objectives, plans.overlap_model)
    told = report.json("digits")["plans"][0]
    assert "--engine ray:auto" in told["command"]
    hosts = told["servers"]["hosts"]
    assert [host["host"] for host in hosts] == [0, 1, 2, 3]
    assert sorted(server for host in hosts for server in host["servers"]) == list(
        range(plans.best.strategy.servers or 0)
    )  # type: ignore[union-attr]
    assert sum(len(host["replicas"]) for host in hosts) == plans.best.arrangement.replicas


def test_more_bandwidth_between_hosts_gains_what_messages_take(tmp_path: Path) -> None:
    plans = planned(tmp_path, LARGE, engine="ray")
    assert isinstance(plans.best.strategy, Strategy)
    assert isinstance(plans.best.strategy.aggregation, LocalSteps)
    found = {each.resource: each for each in gains(plans.best, plans.workload, plans.cluster, plans.overlap_model)}
    messages_s = plans.best.cost.terms["replicas"]
    assert 0.8 * messages_s / 11 < found["between"].seconds <= messages_s / 11  # of 1.1 times the bandwidth


def test_all_devices_of_a_host_share_its_link() -> None:
    cluster = from_toml(CLUSTER.format(hosts=2, each=4, between=1e6, kind="cpu"))
    assert host_links(cluster).between_bytes_per_s == pytest.approx(4e6 * 0.8)
    alone = from_toml(CLUSTER.format(hosts=2, each=1, between=1e6, kind="cpu").replace("inside_bytes_per_s = 1e10", ""))
    assert host_links(alone).inside_bytes_per_s == pytest.approx(0.8 * 5e10 / 2)  # a copy in memory


def test_what_can_not_have_servers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the cluster, of GPUs, says nothing of that; write a device with kind ="):
        planned(tmp_path, LARGE, kind="cuda", engine="ray")
    with pytest.raises(InputError, match="unknown engine to plan for 'rai'; did you mean 'ray'"):
        planned(tmp_path, LARGE, engine="rai")
    with pytest.raises(InputError, match=r"engine='ray' plans servers for the links between hosts, .* write cluster="):
        paceline.plan(tmp_path / "shape.toml", engine="ray")


def test_the_command_prints_a_table_of_hosts(tmp_path: Path) -> None:
    planned(tmp_path, LARGE)  # writes the files
    words = ["plan", str(tmp_path / "shape.toml"), "--cluster", str(tmp_path / "hosts.toml"), "--engine", "ray"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["host", "servers", "replicas", "A", "and", "the", "optimizer's", "state"] in lines
    assert [line[:3] for line in lines if line[:1] == ["host"]][1:] == [
        ["host", str(host), str(host)] for host in range(4)
    ]
    assert "where from         servers: 4, with which a step takes" in done.stdout
    refused = CliRunner().invoke(app, [*words, words[1]])
    assert refused.exit_code == 2
    assert "programs that share hosts have no servers" in refused.output


def test_smooth_switch_is_between_asynchronous_and_synchronous() -> None:
    served, policies = group(4, 8, 2, 0.1), ("asynchronous", "smooth-switch:every=500", "synchronous")
    early, between, late = (served_pace(policy, served).step_s(8) for policy in policies)
    assert early < between < late
    assert parse(policies[1]).needs == frozenset()
