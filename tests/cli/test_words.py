"""What a command refuses by its words alone, before torch is imported; and completion, which imports none either."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Runs each command in a fork of one process, which has imported the command line.
RUN = """
import json, os, sys
from paceline.cli.main import main
for words, environment in json.loads(sys.argv[1]):
    files = os.memfd_create("out"), os.memfd_create("err")
    pid = os.fork()
    if pid == 0:
        os.dup2(files[0], 1), os.dup2(files[1], 2)
        sys.argv, code = ["paceline", *words], 0
        os.environ |= environment
        try:
            main()
        except SystemExit as left:
            code = left.code or 0
        print("torch" in sys.modules, file=sys.stderr)
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    said = [os.pread(file, os.fstat(file).st_size, 0).decode() for file in files]
    print(json.dumps([code, *said]), flush=True)
"""

REFUSED = [
    (["train", "digits", "--strategy", "replicas=4 agregation=synchronous"], "did you mean 'aggregation'?"),
    (["train", "digits", "--strategy", "aggregation=asynchronos"], "did you mean 'asynchronous'?"),
    (["train", "digits", "--strategy", "stages=x", "--show-stages"], "stages=x, but it must be"),
    (["train", "own.py:program", "--strategy", "replicas=0 aggregation=own"], "write replicas=1"),
    (["train", "own.py:program", "--strategy", "replica=2 schedule=own compression=own"], "did you mean 'replicas'?"),
    (["train", "digits", "--strategy", ""], "strategy='' says nothing; write replicas=1"),
    (["share", "digits", "synthetic", "--strategy", " "], "strategy=' ' says nothing; write replicas=1"),
    (
        ["train", "digits", "--strategy", "replicas=99999999999999"],
        "it can be 1,000,000 at most; write replicas=1000000",
    ),
    (["compare", "digits", "--strategy", "replicas=1", "--strategy", "replica=2"], "did you mean 'replicas'?"),
    (["compare", "digits", "--strategy", "replicas=1", "--baseline", "replica=1"], "did you mean 'replicas'?"),
    (["share", "digits", "synthetic", "--strategy", "shard=2"], "did you mean 'shards'?"),
    (["predict", "digits", "--input", "x", "--out", "y", "--strategy", "stage=2"], "did you mean 'stages'?"),
    (["train", "digits", "--until", "accuracy>0.9"], 'write --until "test_accuracy>=0.9". Fields: time_s, '),
    (["train", "digits", "--until", "train_los<=1"], 'write --until "train_loss<=1". Fields: time_s, '),
    (["train", "digits", "--preemptible"], "write --checkpoint DIR too"),
    (["train", "digit"], "unknown program 'digit'; did you mean 'digits'?"),
    (["predict", "nothing.py:p", "--input", "x", "--out", "y"], "there is no file "),
    (["train", "digits", "--engine", "virtul"], "unknown engine 'virtul'; did you mean 'virtual'?"),
    (["train", "digits", "--steps", "0"], "steps=0 must be a whole number above 0; write steps=10"),
    (["train", "digits", "--seconds", "inf"], "seconds=inf must be a finite number above 0"),
    (["train", "digits", "--evaluate-every", "-1"], "evaluate_every=-1.0 must be a number above 0"),
    (["train", "digits", "--seed", "-1"], "seed=-1 must be a whole number from 0"),
    (["train", "digits", "--batch-size", "0"], "batch_size=0 must be a whole number of samples"),
    (["train", "digits", "--on-death", "maybe"], "unknown on_death 'maybe'; known: continue, replace, stop"),
    (["train", "digits", "--on-nonfinite", "ignore"], "unknown on_nonfinite 'ignore'"),
    (["train", "digits", "--suspect-after-s", "0"], "must be a number of seconds above 0; write suspect_after_s=5"),
    (["train", "digits", "--delay", "gaussian:mean=0"], "unknown distribution 'gaussian'"),
    (["train", "digits", "--times", "compute=-1"], "compute=-1, but it must be 0 or more; write compute=0"),
    (["train", "digits", "--times", ""], "times='' says nothing; write 'compute="),
    (["train", "digits", "--resume"], "write checkpoint='ckpt' too"),
    (["train", "digits", "--checkpoint", "x", "--checkpoint-every", "soon"], "is neither a time nor a number of steps"),
    (["share", "digits", "synthetic", "--scheduler", "prio"], "did you mean 'priority'?"),
    (["share", "digits", "synthetic", "--slice-steps", "0"], "write slice_steps=1"),
    (["serve", "digits", "--address", "nohost:99999"], "address='nohost:99999' is not HOST:PORT"),
    (["serve", "digits", "--timeout-s", "0"], "write timeout_s=60"),
    (["watch", "runs/a", "--port", "99999"], "--port 99999 is no port; write one from 1024 to 65535"),
    (["share", "digits"], "digits alone has nobody to share with; write two programs or more"),
]
SHELLS = ("bash", "zsh", "fish")
COMPLETED = {"tr": {"train", "trace"}, "train --show-s": {"--show-stages", "--show-shards"}}

Answers = list[tuple[int, str, list[str]]]


def shell(name: str) -> tuple[list[str], dict[str, str]]:
    return ["--show-completion", name], {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}


def typed(text: str) -> tuple[list[str], dict[str, str]]:
    words = {"COMP_WORDS": f"paceline {text}", "COMP_CWORD": str(len(text.split()))}
    return [], {"_PACELINE_COMPLETE": "complete_bash", **words}


@pytest.fixture(scope="module")
def answers() -> Answers:
    """Of each command its exit code, its output, and the lines on stderr, the last is whether torch was there."""
    commands = [*((words, {}) for words, _ in REFUSED), *map(shell, SHELLS), *map(typed, COMPLETED)]
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(commands)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(commands)
    return [(code, out, err.strip().splitlines()) for code, out, err in found]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=[" ".join(words)[:60] for words, _ in REFUSED])
def test_words_that_mean_nothing_are_refused_before_torch_is_imported(answers: Answers, number: int) -> None:
    code, output, lines = answers[number]
    assert (code, output, lines[-1]) == (2, "", "False")
    assert REFUSED[number][1] in "\n".join(lines)


@pytest.mark.parametrize(
    "strategy",
    [
        "replicas=2 aggregation=of-the-file:bound=2",
        "stages=2 schedule=of-the-file",
        "compression=of-the-file aggregation=of-the-file:over=(buffered:k=2)",
    ],
)
def test_what_only_a_programs_own_file_registers_is_left_to_it(invoke: Any, calls: Any, strategy: str) -> None:
    assert invoke("train", "own:program", "--strategy", strategy).exit_code == 0
    assert calls.of("train")[0] == ("the program", strategy)


def test_metrics_of_a_program_may_end_a_run(invoke: Any, calls: Any) -> None:
    assert invoke("train", "own:program", "--until", "test_f1>=0.5").exit_code == 0
    assert calls.of("train")[1]["until"] == "test_f1>=0.5"


@pytest.mark.parametrize("number", range(len(SHELLS)), ids=SHELLS)
def test_completion_is_shown_for_each_shell(answers: Answers, number: int) -> None:
    code, script, lines = answers[len(REFUSED) + number]
    assert (code, lines) == (0, ["False"])
    assert "_PACELINE_COMPLETE" in script


def test_commands_and_options_are_completed_without_torch(answers: Answers) -> None:
    for (code, found, lines), expected in zip(answers[-len(COMPLETED) :], COMPLETED.values(), strict=True):
        assert (code, set(found.split()), lines) == (0, expected, ["False"])


TRAINS = """
import paceline
from paceline.datasets import load_program

program = load_program("synthetic")


def go() -> None:
    {call}


{guard}go()
"""


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("train", 'paceline.train(program, "replicas=2", steps=1)'),
        ("launch", "paceline.launch(lambda worker: None, program)"),
        ("compare", 'paceline.compare(program, ["replicas=1"], steps=1)'),
        (
            "train",
            "\n    try:\n        paceline.train(program, steps=1)\n    except paceline.InputError:\n        pass",
        ),
    ],
)
def test_a_file_that_trains_as_it_is_imported_is_told_what_to_write(
    invoke: Any, tmp_path: Path, name: str, call: str
) -> None:
    file = tmp_path / "script.py"
    text = TRAINS.format(call=call, guard="")
    file.write_text(text)
    done = invoke("train", f"{file}:program", "--engine", "virtual", "--steps", "1")
    assert done.exit_code == 2
    line = len(text.splitlines())
    assert f"{file} trains, in line {line}, while it is imported" in done.stderr
    assert f'it calls paceline.{name}. Write\n    if __name__ == "__main__":\n' in done.stderr


def test_a_guarded_file_is_trained(invoke: Any, tmp_path: Path) -> None:
    file = tmp_path / "guarded.py"
    guard = 'if __name__ == "__main__":\n    '
    file.write_text(TRAINS.format(call='paceline.train(program, "replicas=2", steps=1)', guard=guard))
    done = invoke("train", f"{file}:program", "--engine", "virtual", "--steps", "1", "--strategy", "replicas=1")
    assert done.exit_code == 0, done.stderr


def test_a_module_that_trains_as_it_is_imported_is_refused_too(
    invoke: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TRAINS.format(call="paceline.train(program, steps=1)", guard="")
    (tmp_path / "trains_on_import.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    done = invoke("train", "trains_on_import:program", "--engine", "virtual", "--steps", "1")
    assert done.exit_code == 2
    assert f"trains_on_import trains, in line {len(text.splitlines())}, while it is imported" in done.stderr
