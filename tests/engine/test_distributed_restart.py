"""torchrun --max-restarts starts all ranks again when one is killed; the run goes on without another line of script."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("distributed_restart_script.py")
SAYS = re.compile(r"start (\d): 12 updates, (\w{64}); (.*)")


def started(backend: str, folder: Path, *words: str) -> re.Match[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", str(SCRIPT), backend, str(folder), *words]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    said = SAYS.search(done.stdout)
    assert done.returncode == 0, done.stderr
    assert said is not None, done.stdout
    return said


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> re.Match[str]:
    """A run that was not killed; the sum of two has the same bits on every backend."""
    return started("gloo", tmp_path_factory.mktemp("whole"), "whole")


@pytest.mark.parametrize("backend", ["shm", "gloo", "hierarchical"])
def test_a_restarted_run_ends_with_the_bits_of_one_that_was_not_killed(
    tmp_path: Path, whole: re.Match[str], backend: str
) -> None:
    killed = started(backend, tmp_path / "killed")
    assert (whole[1], killed[1]) == ("0", "1")
    assert killed[2] == whole[2]
    assert re.match(r"went on from update [2-6] of ", killed[3])
