"""``paceline plan``: what it prints, with which exit code it ends, and what it does not load."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.plan import print_answer, print_shared
from paceline.clock.cluster_file import Links
from paceline.planner.answer import answer
from paceline.planner.cluster import Cluster, Described
from paceline.planner.devices import device
from paceline.planner.multi_job import SharedJob, shared
from paceline.planner.program.measured_workload import elsewhere
from paceline.planner.search.objective import Objectives
from paceline.planner.search.search import search
from tests.cli.conftest import Invoke
from tests.planner.plain_workload import Plain, cluster
from tests.planner.profiles import PROFILE

SHAPE = """
[model]
layers = 2
hidden = 64
heads = 4
vocab = 1000
sequence = 32

[train]
global_batch = 8
precision = "fp32"
optimizer = "adam"
"""

CLUSTER = """
hosts = 1
devices_per_host = 4
[device]
flops_per_s = 1e11
memory_bytes = {memory}
memory_bytes_per_s = 1e10
kind = "cpu"
[links]
inside_bytes_per_s = 1e9
between_bytes_per_s = 1e9
"""


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SHAPE, encoding="utf-8")
    return path


@pytest.fixture
def host(tmp_path: Path) -> Path:
    path = tmp_path / "host.toml"
    path.write_text(CLUSTER.format(memory="8e9"), encoding="utf-8")
    return path


def test_all_that_was_promised_is_printed(invoke: Invoke, shape: Path, host: Path) -> None:
    done = invoke("plan", shape, "--cluster", host)
    assert done.exit_code == 0, done.output
    for word in ("step", "from", "samples/s", "of peak", "memory", "bubble", "exposed", "sent a step", "stage 0"):
        assert word in done.stdout
    for word in ("first bottleneck", "10 % more", "knee", "rule of thumb", "where from", "slower"):
        assert word in done.stdout
    assert 'paceline train PROGRAM --strategy "' in done.stdout


def test_json_is_one_object_with_the_same(invoke: Invoke, shape: Path, host: Path) -> None:
    done = invoke("plan", shape, "--cluster", host, "--json")
    told = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert (told["fits"], told["workers"], told["objective"], len(told["plans"])) == (True, 4, "throughput", 5)
    best, *others = told["plans"]
    assert best["step_s"] == pytest.approx(sum(best["terms_s"].values()))
    assert best["low_s"] < best["step_s"] < best["high_s"]
    assert best["samples_per_s"] == pytest.approx(8 / best["step_s"])
    assert best["peak_bytes"] == max(held["total"] for held in best["memory_bytes"])
    assert set(best["sent_bytes"]) == {"shards", "stages", "replicas"}
    assert best["why_not"] == ""
    assert all(each["why_not"] and each["step_s"] >= best["step_s"] for each in others)
    assert [point["workers"] for point in told["curve"]["points"]] == [1, 2, 4]
    assert {"layers' times", "context", "spread"} <= set(told["provenance"])
    assert len(told["rules"]) == 4


def test_memory_is_an_objective_of_its_own(invoke: Invoke, shape: Path, host: Path) -> None:
    peaks = [
        json.loads(invoke("plan", shape, "--cluster", host, "--json", "--objective", objective).stdout)["plans"][0]
        for objective in ("throughput", "memory")
    ]
    assert peaks[1]["peak_bytes"] < peaks[0]["peak_bytes"]
    assert peaks[1]["step_s"] > peaks[0]["step_s"]


def test_goodput_may_choose_another_batch(invoke: Invoke, shape: Path, host: Path) -> None:
    words = ("plan", shape, "--cluster", host, "--json", "--objective", "goodput", "--noise-scale")
    small, large = (json.loads(invoke(*words, scale).stdout)["plans"][0]["arrangement"] for scale in ("0.1", "1e6"))
    samples = [each["replicas"] * each["micro_batch"] * each["micro_batches"] for each in (small, large)]
    assert samples[0] < samples[1]


def test_delays_let_policies_compete(invoke: Invoke, shape: Path, host: Path) -> None:
    delay = "fraction=0.5 exponential:mean=1"
    told = json.loads(invoke("plan", shape, "--cluster", host, "--json", "--delay", delay).stdout)
    assert all("waiting" in each["provenance"] for each in told["plans"])


def test_when_nothing_fits_it_says_what_would(invoke: Invoke, shape: Path, tmp_path: Path) -> None:
    tiny = tmp_path / "tiny.toml"
    tiny.write_text(CLUSTER.format(memory="1e6"), encoding="utf-8")
    done = invoke("plan", shape, "--cluster", tiny)
    assert done.exit_code == 1
    assert "nothing fits" in done.stdout
    assert "workers with" in done.stdout
    told = invoke("plan", shape, "--cluster", tiny, "--json")
    assert told.exit_code == 1
    assert json.loads(told.stdout)["fits"] is False


def test_several_share_the_workers(invoke: Invoke, shape: Path, host: Path) -> None:
    done = invoke("plan", shape, shape, "--cluster", host, "--steps", "10", "--steps", "30")
    assert done.exit_code == 0, done.output
    assert "best: " in done.stdout
    told = json.loads(invoke("plan", shape, shape, "--cluster", host, "--json").stdout)
    assert told["programs"] == ["small", "small"]
    assert told["best"]["seconds"] <= min(told["turns"]["seconds"], told["split"]["seconds"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--objective", "speed"), "unknown objective 'speed'"),
        (("--objective", "goodput"), "noise_scale"),
        (("--delay", "often"), "distribution"),
        (("--workers", "0"), "workers=0"),
        (("--steps", "3"), "--steps 3 is for several programs"),
        (("--profile", "x.json"), "a shape has no code to measure"),
        (("--noise-scale", "100"), "leave noise_scale out, or write objective=goodput"),
        (("--verify", "2"), "verify=2"),
    ],
)
def test_wrong_input_is_refused(invoke: Invoke, shape: Path, host: Path, words: tuple[str, ...], said: str) -> None:
    done = invoke("plan", shape, "--cluster", host, *words)
    assert done.exit_code == 2
    assert said in done.stderr
    assert not done.stdout


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("9x9 Z900", "unknown device 'Z900'"),
        ("nowhere.toml", "nowhere.toml can't be read"),
        ("4x8", 'names no device; write "4x8 H100-80GB"'),
        ("0x8 A100-80GB", 'has no device; write "1x8 A100-80GB"'),
        ("4x0 A100-80GB", "'4x0 A100-80GB' has no device"),
    ],
)
def test_unknown_clusters_are_refused(invoke: Invoke, shape: Path, where: str, said: str) -> None:
    done = invoke("plan", shape, "--cluster", where)
    assert done.exit_code == 2
    assert said in done.stderr


def test_a_shape_without_a_cluster_is_refused(invoke: Invoke, shape: Path) -> None:
    done = invoke("plan", shape)
    assert done.exit_code == 2
    assert "cluster=" in done.stderr


def test_no_torch(shape: Path, host: Path) -> None:
    """Through the command itself, in a fresh interpreter."""
    code = """
import sys
from paceline.cli.main import app
try:
    app(sys.argv[1:])
except SystemExit as left:
    print(left.code, "torch" in sys.modules)
"""
    words = ["plan", str(shape), "--cluster", str(host), "--json"]
    environment = os.environ | {"COLUMNS": "160"}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=100, env=environment
    )
    assert done.stdout.splitlines()[-1] == "0 False", done.stderr


def test_a_pipeline_shows_its_first_last_and_fullest_stage(capsys: pytest.CaptureFixture[str]) -> None:
    workload, on = (
        Plain(milliseconds=(1.0,) * 12, parameters=60_000, most_shards=1, global_batch=4),
        cluster(per_host=12),
    )
    print_answer(answer("deep", search(workload, on).plans, workload, on, Objectives()), "deep")
    printed = capsys.readouterr().out
    assert "stages=12" in printed
    assert "stage 0 " in printed
    assert "stage 11" in printed
    assert "stage 5 " not in printed


def test_models_that_fit_nowhere_together(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [SharedJob("large", Plain(parameters=10**9))]
    print_shared(shared(jobs, cluster()), jobs)
    assert "nothing fits" in capsys.readouterr().out


def test_a_step_that_is_launches_and_nothing_else_has_no_other_bottleneck(capsys: pytest.CaptureFixture[str]) -> None:
    on = Cluster(1, 1, device("A100-80GB"), Described(Links(1e9, 1e9)), "one")
    workload, objectives = elsewhere(PROFILE, on, 8), Objectives(unbuilt=True)
    print_answer(answer("small", search(workload, on, objectives).plans, workload, on, objectives), "small")
    assert "first bottleneck   launches of kernels" in capsys.readouterr().out
