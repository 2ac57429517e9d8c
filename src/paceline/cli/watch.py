"""``paceline watch``: a live page of a run under way, served on this host alone."""

import contextlib
import json
import secrets
import threading
import time
import webbrowser
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import parse_qs, urlsplit

from typer import Argument, Option, echo

from paceline.cli.console import session
from paceline.core.errors import InputError

if TYPE_CHECKING:
    from paceline.report.live import WatchedRun

HOST = "127.0.0.1"

# Time between two drawings of the page, as a multiple of what one takes: drawing uses a tenth of a core at most.
REST = 10.0

SCRIPT = """
const shown = document.getElementById("run"), note = document.getElementById("note");
let seen = -1;
async function look() {
  let over = false;
  try {
    const answer = await fetch("data?seen=" + seen, {cache: "no-store"});
    if (!answer.ok) throw new Error(answer.status);
    const data = await answer.json();
    if (data.version !== seen) { shown.innerHTML = data.html; seen = data.version; }
    note.textContent = "";
    over = data.over;
  } catch (error) {
    note.textContent = "paceline watch does not answer any more; this is what it has shown last";
  }
  if (!over) setTimeout(look, 1000);
}
look();
"""


class WatchServer(ThreadingHTTPServer):
    """Serves the page of one run, to those who know its token.

    ::

        GET /TOKEN/               the page, whose script asks for the data once a second
        GET /TOKEN/data?seen=7    {"version": 9, "html": …, "over": false}; without the elements if 9 was seen
        GET anything else         403

    Args:
        run: what is served.
        port: of this host's loopback interface; 0: any that is free.

    Raises:
        InputError: the port is in use.
    """

    daemon_threads = True

    def __init__(self, run: "WatchedRun", port: int = 0) -> None:
        try:
            super().__init__((HOST, port), WatchHandler)
        except (OSError, OverflowError) as error:
            raise InputError(f"--port {port} can't be listened at: {error}; leave --port out") from error
        self.token = secrets.token_urlsafe(24)
        self.nonce = secrets.token_urlsafe(12)
        self._run, self._drawing = run, threading.Lock()
        self._drawn: dict[str, Any] = {"version": -1}
        self._next_s = 0.0

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def page(self) -> str:
        """Return the document, which has no resources elsewhere."""
        from paceline.report.page import document

        script = f'<script nonce="{self.nonce}">{SCRIPT}</script>'
        body = f'<h1>Paceline</h1>\n<p id="note" class="soft"></p>\n<div id="run"></div>\n{script}'
        return document("Live", body)

    def data(self, seen: str) -> dict[str, Any]:
        """Return what the page shows now, without its elements where that version was seen."""
        with self._drawing:
            run = self._run
            run.poll()
            if run.version != self._drawn["version"] and (run.over or time.monotonic() >= self._next_s):
                began = time.monotonic()
                self._drawn = {"version": run.version, "html": run.html(), "over": run.over}
                self._next_s = time.monotonic() + REST * (time.monotonic() - began)
            same = str(self._drawn["version"]) == seen
            return {name: value for name, value in self._drawn.items() if not (same and name == "html")}


class WatchHandler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: WatchServer

    def do_GET(self) -> None:
        """Answer with the page, or its data."""
        server, split = self.server, urlsplit(self.path)
        _, token, *rest = [*split.path.split("/"), ""]
        # A page of another site may have its own name lead to this host, which then stands here.
        known = self.headers.get("Host") in (f"{HOST}:{server.server_port}", f"localhost:{server.server_port}")
        if not known or not secrets.compare_digest(token.encode(), server.token.encode()):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "403: open the address that paceline watch has printed\n")
        elif rest == ["", ""]:
            self._answer(HTTPStatus.OK, "text/html", server.page())
        elif rest == ["data", ""]:
            seen = parse_qs(split.query).get("seen", [""])[0]
            self._answer(HTTPStatus.OK, "application/json", json.dumps(server.data(seen)))
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "404\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: stderr is for errors."""

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        content = text.encode()
        policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{self.server.nonce}'; "
        self.send_response(status)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(content))),
            ("Content-Security-Policy", policy + "connect-src 'self'; base-uri 'none'; form-action 'none'"),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        with contextlib.suppress(ConnectionError):  # the page was closed meanwhile
            self.end_headers()
            self.wfile.write(content)


def watch(
    run: Annotated[Path, Argument(metavar="RUN", help="Folder of a run, as its --out or out= names it.")],
    *,
    port: Annotated[int, Option(help="Port on this host's loopback interface.", show_default="any that is free")] = 0,
    browser: Annotated[bool, Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Serve a live page of the run in RUN, while it lasts and afterwards, until Ctrl-C."""
    with session(json_output=False):
        if not 0 <= port <= 65535:
            raise InputError(f"--port {port} is no port; write one from 1024 to 65535, or leave --port out")
        from paceline.report.live import WatchedRun

        watched = WatchedRun(run)
        with WatchServer(watched, port) as server:
            echo(f"Watching {run} at {server.url} until Ctrl-C.")
            try:
                if browser:
                    webbrowser.open(server.url)
                server.serve_forever()
            except KeyboardInterrupt:
                echo("Ended.")
            finally:
                watched.close()
