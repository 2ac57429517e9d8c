"""What docs/choosing-a-policy.md has a reader run on a cluster that is not there."""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.planner.cluster_file import from_toml

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "choosing-a-policy.md").read_text(encoding="utf-8")
SECTION = PAGE[PAGE.index("## On a cluster that is not there") :]
CLUSTER = re.findall(r"^```toml cluster.toml\n(.*?)^```$", SECTION, re.M | re.S)[0]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.toml").write_text(CLUSTER, encoding="utf-8")
    return tmp_path


def test_the_command_runs_and_host_3_goes_and_is_back() -> None:
    command = re.findall(r"^    (paceline train .*\\\n.*)$", SECTION, re.M)[0].replace("\\\n", " ")
    done = CliRunner().invoke(app, [*shlex.split(command)[1:], "--no-progress", "--json"])
    assert done.exit_code == 0, done.output
    left = json.loads(done.stdout)["left"]
    assert [each["replica"] for each in left if each["time_s"] == 2.0] == [3, 7]


def test_the_program_without_a_model_runs(capsys: pytest.CaptureFixture[str]) -> None:
    lines = re.findall(r"^    ((?:import paceline|pace =|print\().*)$", SECTION, re.M)
    exec("\n".join(lines), {})
    update_s, staleness = map(float, capsys.readouterr().out.split())
    assert 0 < update_s < 1 < staleness


def test_the_planner_reads_the_file_with_a_device() -> None:
    assert from_toml(f'device = "A100-80GB"\n{CLUSTER}').hosts == 4
