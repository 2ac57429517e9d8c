"""Scripts of Hugging Face's Trainer and of Lightning, ported: they train what they trained, alone and as two ranks."""

import difflib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "ported"
NEEDS = {"trainer": ("transformers", "accelerate"), "lightning": ("lightning", "sklearn")}
BATCH = {"trainer": 16, "lightning": 64}
EPOCHS = 2

ROUNDING = 1e-9
"""In float64: sums of the same products in another order, of 16 and 48 steps; Adam divides some by roots near 0."""


def absent(framework: str) -> list[str]:
    return [name for name in NEEDS[framework] if importlib.util.find_spec(name) is None]


@pytest.fixture(scope="module", params=list(NEEDS))
def framework(request: pytest.FixtureRequest) -> str:
    if missing := absent(request.param):
        pytest.skip(f"needs {', '.join(missing)}: pip install 'paceline[transformers,lightning]'")
    return str(request.param)


def run(script: str, out: Path, *words: str, ranks: int = 0, check: bool = True, batch: int = 0) -> str:
    """Run an example; with ``script`` of two words, the second and third are a strategy and settings for it."""
    name, *other = script.split("|")
    framework = name.partition("_")[0]
    batch = batch or BATCH[framework] // max(ranks, 1)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    path = [str(FOLDER / f"{name}.py")]
    if other:
        path = [str(ROOT / "tests" / "integrations" / "with_strategy.py"), *path, *other]
    options = ["--out", str(out), "--epochs", str(EPOCHS), "--batch-size", str(batch), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *torchrun, *path, *options], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0 or not check, done.stderr[-4000:]
    return done.stdout + done.stderr


def assert_same(out: Path, expected: Path, rounding: float) -> None:
    ours, theirs = torch.load(out / "model.pt"), torch.load(expected / "model.pt")
    torch.testing.assert_close(ours, theirs, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("framework", list(NEEDS))
def test_at_most_three_lines_differ(framework: str) -> None:
    texts = [(FOLDER / f"{framework}_{kind}.py").read_text().splitlines() for kind in ("plain", "joined")]
    lines = difflib.unified_diff(*texts, n=0, lineterm="")
    new = [line for line in lines if line.startswith("+") and not line.startswith("+++") and line[1:].strip()]
    assert 0 < len(new) <= 3, new


@pytest.fixture(scope="module")
def plain(framework: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the plain script leaves."""
    out: Path = tmp_path_factory.mktemp("plain")
    run(f"{framework}_plain", out)
    return out


@pytest.mark.parametrize("ranks", [2, 0], ids=["two", "alone"])
def test_trains_what_the_plain_script_trains(framework: str, plain: Path, ranks: int, tmp_path: Path) -> None:
    """Clipping, a schedule, evaluations and the best model included."""
    run(f"{framework}_joined", tmp_path, ranks=ranks)
    assert_same(tmp_path, plain, ROUNDING)


def test_accumulates_and_resumes_as_the_plain_script_does(framework: str, tmp_path: Path) -> None:
    longer = str(EPOCHS + 1)
    for kind, ranks in (("plain", 0), ("joined", 2)):
        run(f"{framework}_{kind}", tmp_path / kind, "--accumulate", "2", ranks=ranks)
        run(f"{framework}_{kind}", tmp_path / kind, "--accumulate", "2", "--epochs", longer, "--resume", ranks=ranks)
    assert_same(tmp_path / "joined", tmp_path / "plain", ROUNDING)


def test_where_a_is_at_a_server_the_optimizers_state_is_not_saved_and_it_says_so_once(
    framework: str, tmp_path: Path
) -> None:
    script = f"{framework}_joined|replicas=2 aggregation=asynchronous|{{}}"
    text = run(script, tmp_path, ranks=2)
    assert text.count("saved without the optimizer's state") == 1
    assert "accuracy" in text
    assert "the optimizer, which begins anew" in run(script, tmp_path, "--epochs", "3", "--resume", ranks=2)


def test_a_budget_ends_training_and_nothing_else(framework: str, tmp_path: Path) -> None:
    text = run(f'{framework}_joined|replicas=2|{{"steps": 5}}', tmp_path, ranks=2)
    assert "accuracy" in text
    assert (tmp_path / "model.pt").exists()


def test_fewer_batches_than_replicas_are_refused(framework: str, tmp_path: Path) -> None:
    text = run(f"{framework}_joined", tmp_path, ranks=2, batch=4096, check=False)
    assert "a pass has 1 batches, fewer than the 2 replicas" in text


def test_arguments_that_start_ddp_are_refused(tmp_path: Path) -> None:
    if missing := absent("trainer"):
        pytest.skip(f"needs {', '.join(missing)}")
    code = (
        "import torch, transformers; from paceline.integrations.transformers import Trainer\n"
        f"Trainer(torch.nn.Linear(2, 2), transformers.TrainingArguments({str(tmp_path)!r}, use_cpu=True))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert "make one DDP process of each rank; write from paceline.integrations.transformers import" in done.stderr


WITHOUT = """
import importlib, sys, paceline
assert not {"transformers", "lightning", "accelerate"} & {*sys.modules}, "paceline imports neither"
for module in ("transformers", "lightning"):
    sys.modules[module] = None
    try:
        importlib.import_module(f"paceline.integrations.{module}")
    except ImportError as error:
        print(error)
"""


def test_without_its_package_a_module_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    for module in ("transformers", "lightning"):
        assert f"pip install 'paceline[{module}]'" in done.stdout


def test_a_loop_of_fabric_is_clipped_as_one_process_clips(tmp_path: Path) -> None:
    """The bound is below the norms of all gradients: clipping those of each replica would be something else."""
    if missing := absent("lightning"):
        pytest.skip(f"needs {', '.join(missing)}")
    script = str(ROOT / "tests" / "integrations" / "fabric_script.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for command, batch, out in (([], "16", "one"), (torchrun, "8", "two")):
        subprocess.run([sys.executable, *command, script, batch, str(tmp_path / out)], check=True, timeout=300)
    one, two = torch.load(tmp_path / "one"), torch.load(tmp_path / "two")
    torch.testing.assert_close(two, one, rtol=ROUNDING, atol=ROUNDING)
