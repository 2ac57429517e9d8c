"""Sandblaster L-BFGS beside Downpour: what the times consist of, the tables, and the command in small."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "sandblaster"

Load = Callable[[str], Any]

MACHINE = {"processor": "A", "cores": "2", "system": "Linux 6", "torch": "2", "python": "3", "date": "2026-01-01"}


@pytest.fixture
def contenders(load: Load, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, whose replicas all take the same time."""
    module = load("contenders")
    monkeypatch.setattr(module, "SPREAD", 1e-9)
    return module


def updates_per_s(contenders: Any, side: str, size: int, replicas: int, **fields: Any) -> float:
    seconds = 10.0
    found = contenders.run(side, contenders.Setting(size, 0.1), replicas, 0, seconds=seconds, **fields)
    return found.updates / seconds


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize(("side", "size"), [("synchronous SGD", 32), ("Sandblaster SGD", 1), ("Sandblaster SGD", 4)])
def test_a_batch_takes_its_samples_its_messages_and_its_server(
    contenders: Any, side: str, size: int, replicas: int
) -> None:
    portions = size if side == "Sandblaster SGD" else 1
    samples = 1024 / (size * replicas) if side == "Sandblaster SGD" else size
    turn_s = samples * contenders.SAMPLE_S + 2 * (contenders.TRANSFER_S + contenders.LATENCY_S)
    server_s = (3 + 3 * portions * replicas) * contenders.PASS_S / replicas
    batch_s = portions * turn_s + server_s
    # Within 10 s one may be under way.
    assert 1 / batch_s - 0.1 <= updates_per_s(contenders, side, size, replicas) <= 1 / batch_s + 1e-6


def test_downpour_does_not_wait_but_for_the_links_of_few_servers(contenders: Any) -> None:
    turn_s = 8 * contenders.SAMPLE_S + 2 * (contenders.TRANSFER_S + contenders.LATENCY_S)
    free = updates_per_s(contenders, "Downpour SGD", 8, 32)
    # Those of all replicas that arrive at once wait for each other, 3 passes of a 32nd of A each.
    assert 32 / (turn_s + 3 * contenders.PASS_S) <= free <= 32 / turn_s
    bound = updates_per_s(contenders, "Downpour SGD", 8, 32, servers=2)
    assert bound == pytest.approx(2 / contenders.TRANSFER_S, rel=0.05)
    assert bound < free / 3


def test_every_contender_has_as_many_settings_and_a_sample_takes_each_as_long(contenders: Any) -> None:
    assert {len(set(each.grid)) for each in contenders.CONTENDERS.values()} == {12}
    for contender in contenders.CONTENDERS.values():
        times = dict(word.split("=", 1) for word in contenders.times_of(contender, 10, 4, 4).split())
        assert times["compute"].startswith(f"normal:mean={10 * contenders.SAMPLE_S:.6g},")


@pytest.mark.parametrize(
    ("policy", "portions", "over"),
    [
        ("sandblaster:portions=16", 16, 1.35),
        ("sandblaster:portions=16,backups=false", 16, 2.25),
        ("sandblaster:portions=64", 64, 1.0125),
        ("sandblaster:portions=64,backups=false", 64, 1.125),
        ("synchronous", 8, 4.5),
    ],
)
def test_what_a_slow_replica_costs(contenders: Any, policy: str, portions: int, over: float) -> None:
    """Times are sums of few numbers: what differs is rounding."""
    assert contenders.seconds_over_ideal(policy, portions, batches=5) == pytest.approx(over, rel=1e-9)


@pytest.mark.parametrize("portions", [1, 4])
def test_over_a_network_a_batch_takes_one_a_and_a_delta_for_each_portion(contenders: Any, portions: int) -> None:
    """A single replica sends inside its host, in 2 passes."""
    sent = 2 * contenders.PASS_S
    expected = sent + 1024 * contenders.SAMPLE_S + portions * (sent + 3 * contenders.PASS_S) + 100 * contenders.PASS_S
    # What is left out is the latency inside a host, 5 us for each message.
    assert contenders.batch_s(portions, 1, network=True) == pytest.approx(expected, abs=1e-4)


def test_several_portions_pay_where_a_replica_is_slow_and_a_is_sent_once(contenders: Any) -> None:
    """Times are drawn from a seed, and do not depend on the host."""
    took = {
        (network, slow, n): contenders.batch_s(n, 8, network=network, slow=slow)
        for network in (False, True)
        for slow in (False, True)
        for n in (1, 2)
    }
    assert [key[:2] for key in took if key[2] == 2 and took[key] < took[*key[:2], 1]] == [(True, True)]


def test_lbfgs_reaches_the_target_in_fewer_batches_and_sooner_with_more_replicas(contenders: Any) -> None:
    found = {n: contenders.run("Sandblaster L-BFGS", contenders.Setting(1, 1.0, 10), n, 0) for n in (2, 16)}
    assert found[2].updates == found[16].updates  # the same sums but for rounding
    assert found[16].time_s < found[2].time_s / 2
    plain = contenders.run("Sandblaster SGD", contenders.Setting(1, 1.5), 16, 0)
    assert found[16].time_s < plain.time_s
    assert found[16].history[-1].test_accuracy > 0.9


def test_what_does_not_reach_the_target_has_no_time(contenders: Any) -> None:
    found = contenders.run("Downpour SGD", contenders.Setting(8, 0.6), 64, 0)
    assert found.time_s is None
    assert math.inf > min(record.test_loss for record in found.history) > contenders.TARGET


def test_a_run_that_was_interrupted_has_no_result(contenders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted = SimpleNamespace(summary={"interrupted": True, "updates": 3}, history=[])
    monkeypatch.setattr(contenders, "train", lambda *_, **__: interrupted)
    with pytest.raises(KeyboardInterrupt, match="no row"):
        contenders.run("Downpour SGD", contenders.Setting(8, 0.6), 2, 0)


def test_a_warm_start_is_of_one_replica(contenders: Any) -> None:
    setting = contenders.Setting(32, 0.15)
    cold = contenders.run("Downpour Adagrad", setting, 8, 0, seconds=4.0)
    warm = contenders.run("Downpour Adagrad", setting, 8, 0, seconds=4.0, alone_s=2.0)
    assert warm.history[-1].time_s == cold.history[-1].time_s
    # Half the time there is one of eight.
    assert cold.updates / 3 < warm.updates < cold.updates * 2 / 3


def test_mnist_from_a_folder(load: Load, tmp_path: Path) -> None:
    for prefix, n in (("train", 6), ("t10k", 4)):
        for kind, array in (("images-idx3", np.zeros((n, 28, 28))), ("labels-idx1", np.arange(n))):
            header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
            (tmp_path / f"{prefix}-{kind}-ubyte").write_bytes(header + array.astype(np.uint8).tobytes())
    program = load("contenders").problem(0, tmp_path)
    (train, _), (test, targets) = program.train, program.test
    assert tuple(train.shape) == (4, 784)  # the greatest power of 2 in 6
    assert tuple(test.shape) == (6, 784)
    assert targets.tolist() == [4, 5, 0, 1, 2, 3]
    assert program.build()(train).shape == (4, 10)


def row(seed: int, side: str, setting: str, time_s: float | str, **fields: Any) -> dict[str, Any]:
    keys = {"servers": "each", "replicas": 8, "side": side, "setting": setting, "alone_s": 0.0, "seed": seed}
    return keys | {"time_s": time_s, "least_loss": 0.1, "updates": 9} | fields | MACHINE


def test_the_best_setting_is_that_of_the_least_median(load: Load, tmp_path: Path) -> None:
    page = load("page")
    sheet = page.Sheet(tmp_path / "rows.csv", page.KEYS)
    for seed, (a, b) in enumerate([(1.0, 3.0), (9.0, 2.0), (8.0, "")]):
        sheet.put(row(seed, "Downpour SGD", "8; 0.2", a))
        sheet.put(row(seed, "Downpour SGD", "32; 0.2", b))
        sheet.put(row(seed, "Downpour Adagrad", "8; 0.01", 1.0 if seed == 0 else ""))
    sheet.put(row(0, "Downpour SGD", "128; 0.2", 0.5))  # with one seed alone
    assert page.best(sheet.rows, "each", 8, "Downpour SGD") == ("32; 0.2", 3.0)
    assert page.best(sheet.rows, "each", 8, "Downpour Adagrad") is None
    assert page.best(sheet.rows, "8", 8, "Downpour SGD") is None


def test_the_command_in_small(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One setting of each of two contenders, three seeds; again nothing is measured."""
    measure, page = load("measure"), load("page")
    kept = {"Downpour Adagrad": (32, 0.15, 0), "Sandblaster L-BFGS": (1, 1.0, 10)}
    for name, setting in kept.items():
        contender = replace(measure.CONTENDERS[name], grid=[measure.Setting(*setting)])
        monkeypatch.setitem(measure.CONTENDERS, name, contender)
    for name in set(measure.CONTENDERS) - set(kept):
        monkeypatch.delitem(measure.CONTENDERS, name)
    small = {"REPLICAS": (8,), "FEW_SERVERS": 2, "OF_FEW": (8,), "CURVES": {8: 4.0}, "PORTIONS": (8,)}
    other = {"ROUNDS": ((2, True),), "WARMED": ("Downpour Adagrad",), "WARM_REPLICAS": (8,)}
    for name, value in (small | other).items():
        monkeypatch.setattr(measure, name, value)
        if hasattr(page, name):
            monkeypatch.setattr(page, name, value)
    monkeypatch.setattr(measure.contenders, "POINTS", 40)
    measure.main(["--out", str(tmp_path), "--processes", "1"])
    text = (tmp_path / "README.md").read_text("utf-8")
    times = {kind: page.Sheet(tmp_path / "results" / f"{kind}.csv", page.KEYS).rows for kind in ("times", "curves")}
    # Three seeds of each of two contenders, with many servers and with few; and of a warm start.
    assert len(times["times"]) == 2 * 2 * 3 + 3
    assert len(times["curves"]) == 2 * 3
    for side, setting in kept.items():
        time_s = page.best(times["times"], "each", 8, side)[1]
        assert time_s < page.best(times["times"], "2", 8, side)[1], "the links of two servers"
        assert page.said(time_s) in next(line for line in text.splitlines() if line.startswith("| 8 |"))
        assert page.curve(times["curves"], 8, side)[-1][1] > 0.9, setting
    sent = ("for each portion", "once", "once, no backups")
    assert [f"| 2, an eighth slow | {how} |" in text for how in sent] == [True] * 3
    for picture in ("replicas.svg", "accuracy.svg"):
        assert ElementTree.parse(tmp_path / "results" / picture).getroot().tag.endswith("svg")
    monkeypatch.setattr(measure, "done", None)
    measure.main(["--out", str(tmp_path), "--processes", "1"])
    assert (tmp_path / "README.md").read_text("utf-8") == text
