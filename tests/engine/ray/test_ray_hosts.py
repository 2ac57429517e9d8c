"""A Ray of several hosts with links between them: what becomes of a host that is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs Ray: pip install 'paceline[ray]'")

SCRIPT = Path(__file__).with_name("hosts_script.py")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


def told(folder: Path, strategy: str, lost: str, **options: Any) -> dict[str, Any]:
    """What became of a run whose host of this number was lost."""
    apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    words = [sys.executable, str(SCRIPT), str(folder), strategy, json.dumps(options), lost]
    done = subprocess.run([*apart, *words], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_replicas_span_hosts_and_a_lost_host_takes_its_own_alone(tmp_path: Path) -> None:
    """Each host has one core, so the replicas are on hosts 0 and 1, 2 and 0, and 1 and 2; host 2 has a server, too.

    Its standby is on host 0, and host 2 has that of server 1.
    """
    whole = "replicas=3 servers=2 stages=2 micro_batches=2"
    run = told(tmp_path, "replicas=3 servers=3 standby=1 shards=2 aggregation=asynchronous", "2", whole=whole)
    assert "failed" not in run, run
    assert run["same"] is True
    assert run["updates"] >= 9
    assert sorted(replica for replica, _ in run["left"]) == [1, 2]
    assert all(reason for _, reason in run["left"])


def test_or_ends_the_run_with_a_server_that_has_no_standby(tmp_path: Path) -> None:
    run = told(tmp_path, "replicas=3 servers=3 aggregation=asynchronous", "1")
    assert "server " in run["failed"]
    assert "died, and its slice of A with it" in run["failed"]
