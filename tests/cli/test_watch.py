"""``paceline watch``: its page over HTTP, and in a browser where one is installed."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from paceline import InputError, train
from paceline.callbacks import Callback, RunHandle
from paceline.callbacks.out_files import ProgressFile
from paceline.cli.watch import WatchServer
from paceline.core.records import Record, ReplicaExit
from paceline.engine.base import Progress
from paceline.report.live import MOST_POINTS, Curve, WatchedRun
from tests.engine import programs

HOSTILE = "</script><script>alert(1)</script>"


class Viewer:
    """Asks a server, as its page does."""

    def __init__(self, server: WatchServer) -> None:
        server._next_s = -1.0
        self.server, self.seen = server, -1

    def get(self, path: str, host: str | None = None) -> tuple[int, str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", path, headers={} if host is None else {"Host": host})
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), answer.headers

    def data(self) -> dict[str, Any]:
        self.server._next_s = 0.0  # at once, however long the last drawing took
        status, text, _ = self.get(f"/{self.server.token}/data?seen={self.seen}")
        assert status == 200
        data: dict[str, Any] = json.loads(text)
        self.seen = data["version"]
        return data


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Viewer]:
    """A viewer of the page of a run."""
    watched = WatchedRun(folder)
    with WatchServer(watched) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield Viewer(server)
        finally:
            server.shutdown()
            thread.join()
            watched.close()


@pytest.fixture
def handle(tmp_path: Path) -> RunHandle:
    return RunHandle("digits", "replicas=2", "local", tmp_path / "run", [])


@pytest.fixture
def file(handle: RunHandle, tmp_path: Path) -> Iterator[ProgressFile]:
    """What main of a run writes."""
    file = ProgressFile(tmp_path / "run")
    file.on_start(handle)
    yield file
    file.on_end(None)


def record(number: int) -> Record:
    return Record(float(number), number, 2 * number, 1, 0.0, 1.0 / (number + 1), test_metrics={"f1": 0.5})


def test_a_wrong_address_is_refused(file: ProgressFile, tmp_path: Path) -> None:
    with serving(tmp_path / "run") as viewer:
        port, token = viewer.server.server_port, viewer.server.token
        assert len(token) >= 32
        for path in ("/", f"/{token[:-1]}/", f"/{token}x/", "/wrong/data", f"/wrong/{token}/"):
            status, text, _ = viewer.get(path)
            assert (status, token in text) == (403, False), path
        assert viewer.get(f"/{token}/", host=f"example.org:{port}")[0] == 403, "another site's name"
        assert viewer.get(f"/{token}/other")[0] == 404
        status, text, headers = viewer.get(f"/{token}/")
        assert (status, viewer.server.server_address[0]) == (200, "127.0.0.1")
        assert "http://" not in text.replace("http://www.w3.org", ""), "nothing from elsewhere"
        assert "https://" not in text
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")


def test_the_page_grows_with_the_run(file: ProgressFile, handle: RunHandle, tmp_path: Path) -> None:
    with serving(tmp_path / "run") as viewer:
        first = viewer.data()
        assert "digits on the local engine" in first["html"]
        assert "starting" in first["html"]
        assert "html" not in viewer.data(), "nothing is new"
        file.progress(Progress("training", 0.25, time_s=1.5, updates=1200, loss=0.5))
        assert "training, 25% of the budget, 2 s, 1,200 updates" in viewer.data()["html"]
        sizes = list[int]()
        for number in range(3):
            file.on_record(record(number), handle)
            html = viewer.data()["html"]
            assert "Train loss" in html
            sizes.append(len(html))
        assert "test_f1" in html
        assert sizes[0] < sizes[2], "another point"
        for replica in (0, 1):
            for step in range(3):
                file.on_log(replica, step, {"grad_norm": step + replica}, handle)
        html = viewer.data()["html"]
        assert "grad_norm" in html
        assert "replica 1" in html
        file.on_departure(ReplicaExit(1, f"killed {HOSTILE}", 2.0), handle)
        file.on_checkpoint(Path("ckpt/step-20"), handle)
        html = viewer.data()["html"]
        assert "replica 1 left after 2.0 s: killed &lt;/script&gt;" in html
        assert HOSTILE not in html
        assert "saved in ckpt/step-20" in html
        rows = [{"role": "coordinator", "pid": 7}, {"role": "replica", "replica": 1, "stage": 0, "shard": 0, "pid": 8}]
        (tmp_path / "run" / "workers.json").write_text(json.dumps(rows))
        html = viewer.data()["html"]
        assert "<td>coordinator</td><td>7</td>" in html
        assert "<td>replica 1, stage 0, shard 0</td><td>8</td>" in html
        file.on_end(None)
        data = viewer.data()
        assert "ended, by an error" in data["html"]
        assert data["over"] is True


def test_names_that_are_logged_are_text(file: ProgressFile, handle: RunHandle, tmp_path: Path) -> None:
    file.on_log(0, 1, {f'"{HOSTILE}': 1.0}, handle)
    with serving(tmp_path / "run") as viewer:
        html = viewer.data()["html"]
    assert "<script" not in html
    assert "&lt;script&gt;" in html


def test_lines_that_are_none_are_passed_over(file: ProgressFile, handle: RunHandle, tmp_path: Path) -> None:
    with (tmp_path / "run" / "progress.jsonl").open("a") as lines:
        for line in ("{", "[]", "7", '{"event": "record", "at": 0, "time_s": "x"}', '{"event": "log", "at": 0}'):
            lines.write(f"{line}\n")
        lines.write('{"event": "progress", "at": 0, "time_s": 1, "loss": NaN, "remarks": 7}\n')
        lines.write('{"event": "rec')  # it is being written
    watched = WatchedRun(tmp_path / "run")
    assert (watched.records, watched.logged, watched.loss.x) == ([], {}, [])
    assert "digits" in watched.html()
    watched.close()


class Looks(Callback):
    """Looks at the page at each record."""

    def __init__(self, viewers: contextlib.ExitStack) -> None:
        self.viewers, self.pages = viewers, list[str]()
        self.viewer: Viewer | None = None

    def on_record(self, record: Record, run: RunHandle) -> None:
        if self.viewer is None:
            assert run.out is not None
            self.viewer = self.viewers.enter_context(serving(run.out))
        self.pages.append(self.viewer.data()["html"])


@pytest.mark.parametrize("name", ["virtual", "local"])
def test_a_run_is_shown_from_its_start_to_its_end(tmp_path: Path, engines: dict[str, Any], name: str) -> None:
    with contextlib.ExitStack() as viewers:
        looks = Looks(viewers)
        settings: dict[str, Any] = {"steps": 40, "evaluate_every": 10, "out": tmp_path / "run", "progress": False}
        run = train(
            programs.program(test=programs.data(samples=20)),
            "replicas=2",
            engine=engines[name],
            callbacks=[looks],
            **settings,
        )
        assert len(looks.pages) == len(run.history)
        assert "Test loss" in looks.pages[-1]
        assert looks.viewer is not None
        data = looks.viewer.data()
        assert data["over"] is True
        assert '<p id="state">ended</p>' in data["html"]
        assert "<h3>Results</h3>" in data["html"], "the report of the saved run"
    assert not (tmp_path / "run" / "progress.jsonl").exists()
    with serving(tmp_path / "run") as viewer:
        assert "<h3>Results</h3>" in viewer.data()["html"]


def test_a_run_that_failed_leaves_no_folder(tmp_path: Path) -> None:
    class Tears(Callback):
        def on_record(self, record: Record, run: RunHandle) -> None:
            assert (tmp_path / "run" / "progress.jsonl").exists()
            self.watched = WatchedRun(tmp_path / "run")
            raise ValueError("torn")

    tears = Tears()
    with pytest.raises(Exception, match="torn"):
        train(programs.program(), engine="virtual", steps=4, out=tmp_path / "run", callbacks=[tears])
    assert not (tmp_path / "run").exists()
    tears.watched.poll()
    assert "ended, by an error" in tears.watched.html(), "the open file has its last line"
    tears.watched.close()


def test_a_run_whose_process_is_no_more_is_lost(file: ProgressFile, tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    file.write("process", pid=ended.pid, host=socket.gethostname())
    watched = WatchedRun(tmp_path / "run")
    watched.poll()
    assert "ended without a report" in watched.html()
    watched.close()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no run is under way in .*; name the folder that out= or --out names"):
        WatchedRun(tmp_path / "none")


def test_a_port_in_use_is_refused(file: ProgressFile, tmp_path: Path) -> None:
    with serving(tmp_path / "run") as viewer, pytest.raises(InputError, match="leave --port out"):
        WatchServer(viewer.server._run, viewer.server.server_port)


def test_a_curve_keeps_no_more_than_can_be_seen() -> None:
    curve = Curve()
    for x in range(10 * MOST_POINTS):
        curve.add(x, -x)
    assert MOST_POINTS / 2 <= len(curve.x) <= MOST_POINTS
    assert curve.x == sorted(curve.x)
    assert curve.y == [-x for x in curve.x]
    assert curve.x[0] == 0


def test_the_command_serves_until_ctrl_c(file: ProgressFile, tmp_path: Path) -> None:
    # A shell in the background has its processes ignore Ctrl-C.
    lines = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)",
        "from paceline.cli.main import main",
    )
    command = [sys.executable, "-c", "; ".join([*lines, "main()"]), "watch", str(tmp_path / "run")]
    process = subprocess.Popen([*command, "--no-browser"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    url = urlsplit(next(word for word in line.split() if word.startswith("http://")))
    connection = http.client.HTTPConnection(str(url.hostname), int(url.port or 0), timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", url.path + "data?seen=-1")
        assert "digits on the local engine" in json.loads(connection.getresponse().read())["html"]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "Ended.\n", "")


def test_in_a_browser(file: ProgressFile, handle: RunHandle, tmp_path: Path) -> None:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with api.sync_playwright() as playwright:
        path = os.environ.get("PACELINE_CHROMIUM") or playwright.chromium.executable_path
        if not os.path.exists(path):
            pytest.skip("needs a browser: playwright install chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        with serving(tmp_path / "run") as viewer:
            page, errors = browser.new_page(), list[str]()
            page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.goto(viewer.server.url)
            page.wait_for_selector("text=digits on the local engine")
            assert page.locator("figure svg").count() == 0
            for number in range(3):
                file.on_record(record(number), handle)
            page.wait_for_selector("figure svg")
            file.on_end(None)
            page.wait_for_selector("text=ended, by an error")
            assert [error for error in errors if "favicon" not in error] == []
        browser.close()
