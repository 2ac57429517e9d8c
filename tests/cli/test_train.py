"""``paceline train``: what it asks for, what it prints."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline import show_mesh
from paceline.cli.options import DEFAULT_SECONDS, Shared
from paceline.cli.train import default_strategy
from paceline.core.errors import InputError
from paceline.core.records import ReplicaExit

ALONE = {
    "engine": "local",
    "steps": None,
    "epochs": None,
    "seconds": DEFAULT_SECONDS,
    "until": None,
    "evaluate_every": None,
    "delay": None,
    "times": None,
    "noise_scale": False,
    "on_nonfinite": "stop",
    "on_death": None,
    "suspect_after_s": 5.0,
    "out": None,
    "trace": False,
    "tensorboard": False,
    "progress": None,
    "checkpoint": None,
    "checkpoint_every": None,
    "keep": 3,
    "resume": False,
    "accept_changes": False,
}


def test_a_program_alone_is_enough(invoke: Any, calls: Any) -> None:
    assert invoke("train", "digits").exit_code == 0
    assert calls.of("load_program") == (("digits",), {"data": None, "seed": None, "batch_size": None})
    assert calls.of("train") == (("the program", default_strategy()), ALONE)


@pytest.mark.parametrize(("cores", "replicas"), [(None, 1), (1, 1), (2, 2), (64, 4)])
def test_the_default_strategy_is_a_replica_a_core_at_most_four(
    monkeypatch: pytest.MonkeyPatch, cores: int | None, replicas: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert default_strategy() == f"replicas={replicas}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--steps", "50"], {"steps": 50, "seconds": None}),
        (["--epochs", "1.5"], {"epochs": 1.5, "seconds": None}),
        (["--seconds", "3"], {"seconds": 3.0}),
        (["--until", "test_accuracy>=0.9"], {"until": "test_accuracy>=0.9", "seconds": None}),
        (["--until", "train_loss<=0.1", "--seconds", "9"], {"until": "train_loss<=0.1", "seconds": 9.0}),
        (["--engine", "virtual"], {"engine": "virtual"}),
        (["--evaluate-every", "0.5"], {"evaluate_every": 0.5}),
        (["--delay", "constant:value=0.1"], {"delay": "constant:value=0.1"}),
        (["--times", "compute=0.02"], {"times": "compute=0.02"}),
        (["--noise-scale"], {"noise_scale": True}),
        (["--on-nonfinite", "skip"], {"on_nonfinite": "skip"}),
        (["--on-death", "replace"], {"on_death": "replace"}),
        (["--suspect-after-s", "2"], {"suspect_after_s": 2.0}),
        (["--out", "runs/a"], {"out": Path("runs/a")}),
        (["--trace"], {"trace": True}),
        (["--tensorboard"], {"tensorboard": True}),
        (["--progress"], {"progress": True}),
        (["--no-progress"], {"progress": False}),
        (["--checkpoint", "ckpt"], {"checkpoint": Path("ckpt")}),
        (["--checkpoint", "c", "--checkpoint-every", "9 s"], {"checkpoint": Path("c"), "checkpoint_every": "9 s"}),
        (["--keep", "5"], {"keep": 5}),
        (["--checkpoint", "ckpt", "--resume"], {"checkpoint": Path("ckpt"), "resume": True}),
        (["--accept-changes"], {"accept_changes": True}),
    ],
)
def test_each_option_reaches_train(invoke: Any, calls: Any, words: list[str], expected: dict[str, Any]) -> None:
    assert invoke("train", "digits", *words).exit_code == 0
    assert calls.of("train")[1] == ALONE | expected


def test_program_options_reach_the_program(invoke: Any, calls: Any) -> None:
    words = ("train", "mnist", "--data", "sets", "--seed", "7", "--batch-size", "64", "--strategy", "replicas=3")
    assert invoke(*words).exit_code == 0
    assert calls.of("load_program")[1] == {"data": Path("sets"), "seed": 7, "batch_size": 64}
    assert calls.of("train")[0] == ("the program", "replicas=3")


def test_it_prints_a_short_table_of_what_was_measured(invoke: Any, calls: Any) -> None:
    lines = [" ".join(line.split()) for line in invoke("train", "digits").stdout.splitlines()]
    assert lines[0] == "replicas=4"
    assert {
        "test accuracy 97.12%",
        "updates of A 1,200",
        "discarded 12",
        "cancelled steps 40",
        "samples/s 4,321",
    } <= set(lines)
    assert not any(line.startswith("test loss") for line in lines), "it was not scored"


def test_it_says_which_batches_are_worth_their_samples(invoke: Any, calls: Any) -> None:
    told = {"noise_scale_mean": 511.6, "noise_scale_error": 0.04, "noise_scale_biased": 0.25, "efficiency": 0.888}
    calls.results["train"].summary |= told
    lines = [" ".join(line.split()) for line in invoke("train", "digits").stdout.splitlines()]
    assert {"noise scale, samples 512", "standard error 4.0%", "efficiency 88.8%"} <= set(lines)
    assert any(line.startswith("useful batch ≤ 512; beyond it each doubling wastes 33 %") for line in lines)
    assert any("25 % of it from gradients of different A" in line for line in lines)


def test_it_names_the_replicas_that_left(invoke: Any, calls: Any) -> None:
    calls.results["train"].left = [ReplicaExit(3, "killed by [SIGKILL]", 1.25)]
    assert "replica 3 left at 1.2 s: killed by [SIGKILL]\n" in invoke("train", "digits").stdout


def test_json_is_one_object_and_nothing_else(invoke: Any, calls: Any) -> None:
    done = invoke("train", "digits", "--json")
    assert json.loads(done.stdout) == calls.results["train"].to_json()
    assert done.stdout.count("\n") == 1


def test_an_interrupted_run_is_printed_and_ends_with_130(invoke: Any, calls: Any) -> None:
    calls.results["train"].summary["interrupted"] = True
    done = invoke("train", "digits")
    assert done.exit_code == 130
    assert "97.12%" in done.stdout
    assert "interrupted" in done.stderr


@pytest.mark.parametrize(
    ("signal", "saved", "options", "code"),
    [
        ("SIGTERM", 1200, (), 143),
        ("SIGTERM", 1200, ("--preemptible", "--checkpoint", "ckpt"), 0),
        ("SIGTERM", 1100, ("--preemptible", "--checkpoint", "ckpt"), 143),
        ("SIGTERM", None, ("--preemptible", "--checkpoint", "ckpt"), 143),
        ("SIGINT", 1200, ("--preemptible", "--checkpoint", "ckpt"), 130),
    ],
)
def test_a_preempted_run_that_is_saved_ends_with_0(
    invoke: Any, calls: Any, signal: str, saved: int | None, options: tuple[str, ...], code: int
) -> None:
    calls.results["train"].summary |= {"interrupted": True, "signal": signal}
    if saved is not None:
        calls.results["train"].summary["notes"]["checkpoint_updates"] = saved
    done = invoke("train", "digits", *options)
    assert done.exit_code == code
    assert "97.12%" in done.stdout


def test_a_preemptible_run_is_to_be_saved(invoke: Any, calls: Any) -> None:
    done = invoke("train", "digits", "--preemptible")
    assert done.exit_code == 2
    assert "--checkpoint DIR" in done.stderr


def test_a_run_that_could_not_be_saved_is_printed_and_ends_with_1(invoke: Any, calls: Any) -> None:
    calls.results["train"].summary["not_saved"] = "the disk is full"
    done = invoke("train", "digits", "--out", "runs/a")
    assert done.exit_code == 1
    assert "97.12%" in done.stdout


def test_shared_options_are_listed_in_the_help_of_both_commands(invoke: Any) -> None:
    for command in ("train", "compare"):
        text = invoke(command, "--help").stdout
        for name in Shared.__dataclass_fields__:
            assert f"--{name.replace('_', '-')}" in text, f"{command} lacks {name}"


def test_show_stages_prints_the_cut_and_trains_nothing(invoke: Any, calls: Any) -> None:
    done = invoke("train", "mnist", "--strategy", "stages=2", "--show-stages", "--seed", "7")
    assert (done.exit_code, done.stdout) == (0, "the table\n")
    assert calls.of("load_program") == (("mnist",), {"data": None, "seed": 7, "batch_size": None})
    assert calls.of("show_stages") == (("the program", "stages=2"), {})
    assert [name for name, *_ in calls.made] == ["load_program", "show_stages"]


def test_show_stages_json_is_one_object(invoke: Any, calls: Any) -> None:
    done = invoke("train", "mnist", "--strategy", "stages=2", "--show-stages", "--json")
    assert json.loads(done.stdout) == {"strategy": "stages=2", "table": "the table"}


def test_show_stages_refuses_in_words(invoke: Any, calls: Any) -> None:
    calls.results["show_stages"] = InputError("stages=1 leaves the model whole")
    done = invoke("train", "mnist", "--show-stages", "--json")
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", "error: stages=1 leaves the model whole\n")


def test_show_shards_prints_the_division_and_trains_nothing(invoke: Any, calls: Any) -> None:
    done = invoke("train", "mnist", "--strategy", "shards=2", "--show-shards", "--seed", "7")
    assert (done.exit_code, done.stdout) == (0, "the table of shards\n")
    assert calls.of("load_program") == (("mnist",), {"data": None, "seed": 7, "batch_size": None})
    assert calls.of("sharding_of") == (("the program", "shards=2"), {})
    assert [name for name, *_ in calls.made] == ["load_program", "sharding_of"]


def test_show_shards_json_is_a_list_of_rows(invoke: Any, calls: Any) -> None:
    done = invoke("train", "mnist", "--strategy", "shards=2", "--show-shards", "--json")
    rows = [{"module": "0", "cut": "column"}]
    assert json.loads(done.stdout) == {"strategy": "shards=2", "shards": 2, "rows": rows}


def test_show_shards_refuses_in_words(invoke: Any, calls: Any) -> None:
    calls.results["sharding_of"] = InputError("shards=1 leaves the operators whole")
    done = invoke("train", "mnist", "--show-shards", "--json")
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", "error: shards=1 leaves the operators whole\n")


def test_show_mesh_draws_and_trains_nothing(invoke: Any, calls: Any) -> None:
    done = invoke("train", "mnist", "--strategy", "replicas=2 shards=2", "--show-mesh", "--hosts", "2")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"{show_mesh('replicas=2 shards=2', hosts=2)}\n"
    assert calls.made == []


def test_show_mesh_knows_where_ray_has_replicas(invoke: Any, calls: Any) -> None:
    words = ("train", "mnist", "--strategy", "replicas=3 shards=2", "--engine", "ray", "--show-mesh", "--hosts", "2")
    done = invoke(*words)
    assert done.stdout == f"{show_mesh('replicas=3 shards=2', 2, engine='ray')}\n"
    assert calls.made == []


def test_show_mesh_json_is_one_object(invoke: Any, calls: Any) -> None:
    done = invoke("train", "mnist", "--strategy", "replicas=4", "--show-mesh", "--hosts", "2", "--json")
    shown = json.loads(done.stdout)
    assert (shown["strategy"], shown["hosts"]) == ("replicas=4", [[0, 1], [2, 3]])
    assert calls.made == []


def test_what_can_be_shown_is_asked_for_one_at_a_time(invoke: Any, calls: Any) -> None:
    done = invoke("train", "mnist", "--strategy", "stages=2", "--show-mesh", "--show-stages")
    said = "error: --show-stages and --show-mesh each print something else; write one of them\n"
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", said)
    done = invoke("train", "mnist", "--hosts", "2")
    assert (done.exit_code, calls.made) == (2, [])
    assert done.stderr == "error: --hosts 2 is for a drawing; write --show-mesh too, or leave it out\n"


def test_show_mesh_refuses_what_can_not_be_trained() -> None:
    main = "from paceline.cli.main import main; main()"
    words = ("train", "digits", "--strategy", "stages=2 aggregation=hogwild", "--show-mesh")
    done = subprocess.run([sys.executable, "-c", main, *words], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: aggregation=hogwild: replicas write one A in place")
