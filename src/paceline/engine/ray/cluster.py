"""The connection to Ray: to one of this engine's own, on this host alone, or to a running one."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.comm.linux import available_bytes
from paceline.core.errors import InputError, PacelineError
from paceline.engine.ray.janitor import FAREWELL

# Share of the available memory that the object store of a Ray of our own may fill.
STORE_SHARE = 0.25

# Ray accepts no smaller object store.
LEAST_STORE_BYTES = 100 << 20

# Characters; the paths of Ray's sockets are 65 longer, and a socket's path has room for 107.
LONGEST_FOLDER = 36

# Without the first, Ray listens on all interfaces of a Linux host whatever its address; the second reports nothing.
_ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}


class Janitor:
    """Removes files that a killed process would leave: a child process that outlives it for a moment."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("janitor.py")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script)], stdin=subprocess.PIPE, start_new_session=True, text=True
        )

    def remove_on_exit(self, path: Path | str) -> None:
        """Remove this path when the parent process ends."""
        assert self._process.stdin is not None
        print(os.path.abspath(path), file=self._process.stdin, flush=True)

    def close(self) -> None:
        """Remove all of these paths now, and wait for that; idempotent."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            print(FAREWELL, file=self._process.stdin)
            self._process.stdin.close()
            self._process.wait()


class Cluster:
    """A connection to Ray; a process has one at a time.

    Args:
        address: ``auto`` or ``HOST:PORT`` of a running Ray; None: start one, for this host alone.

    Raises:
        InputError: there is no Ray at the address; or this process is connected already, and is to start another.
    """

    def __init__(self, address: str | None) -> None:
        import ray

        self.janitor = Janitor()
        """Removes files when the connection is closed, or this process is killed."""
        self._connected = False
        before = {*os.environ}
        self._added: set[str] = set()
        """Environment variables of Ray, which are removed so that another Ray can be started or joined later."""
        try:
            if address is None:
                self._start()
            elif not ray.is_initialized():
                with _kept_sigterm():
                    ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
                self._connected = True
            self._added = os.environ.keys() - before
        except BaseException as error:
            self.close()
            if address is None or not isinstance(error, (ConnectionError, ValueError, RuntimeError)):
                raise
            if "Version mismatch" in str(error):
                differ = " ".join(str(error).replace("Version mismatch: ", "").split())
                raise InputError(f"engine='ray:{address}': {differ}; install the same on all nodes") from error
            raise InputError(
                f"engine='ray:{address}': there is no Ray to join ({str(error).strip().splitlines()[0]}); start "
                "one with ray start --head, or write engine='ray'"
            ) from error

    @property
    def gpus(self) -> int:
        """Number of GPUs of all nodes."""
        import ray

        return int(ray.cluster_resources().get("GPU", 0))

    @property
    def hosts(self) -> int:
        """Number of nodes that are alive."""
        return len(self.cores())

    def cores(self) -> list[int]:
        """Return the number of cores of each node that is alive."""
        import ray

        return [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]

    def close(self) -> None:
        """Disconnect; ends a Ray of our own."""
        import ray

        if self._connected:
            with _kept_sigterm():
                ray.shutdown()
            self._connected = False
            for name in self._added:
                os.environ.pop(name, None)
        self.janitor.close()

    def _start(self) -> None:
        """Start a Ray that is reachable from this host alone."""
        import ray

        if ray.is_initialized():
            raise InputError(
                "this process is connected to a Ray already, and can't start another; write engine='ray:auto' to use "
                "that one, or ray.shutdown() first"
            )
        usual = tempfile.gettempdir()
        folder = tempfile.mkdtemp(prefix="ray-", dir=usual if len(usual) < LONGEST_FOLDER else "/tmp")
        self.janitor.remove_on_exit(folder)
        self._connected = True
        with _local_environment(), _kept_sigterm():
            ray.init(
                num_cpus=len(os.sched_getaffinity(0)),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=max(LEAST_STORE_BYTES, int(STORE_SHARE * available_bytes())),
                _node_ip_address="127.0.0.1",
                _temp_dir=folder,
                _system_config={"worker_niceness": 0},
            )


@contextlib.contextmanager
def _local_environment() -> Iterator[None]:
    """Context manager: a Ray that starts inside listens on this host alone."""
    from ray._private import ray_constants

    constants: Any = ray_constants
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    reachable = constants.ENABLE_RAY_CLUSTER  # read when Ray was imported, maybe before the environment was set
    os.environ.update(_ENVIRONMENT)
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = reachable
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _kept_sigterm() -> Iterator[None]:
    """Context manager: a Ray that starts or ends inside leaves SIGTERM to its present handler.

    Ray 2.60 installs two handlers of its own: one in Python that exits, then one in C++ that aborts, which Python does
    not know of; at the end it puts back the system's default.
    """
    from ray._private import utils

    private: Any = utils
    theirs = private.set_sigterm_handler
    private.set_sigterm_handler = lambda _: None
    try:
        yield
    finally:
        private.set_sigterm_handler = theirs
        handler = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def missing_package(error: BaseException) -> PacelineError | None:
    """Return the error to raise where an actor can't start since its node lacks Paceline; None: another reason."""
    if "No module named 'paceline" not in str(error):
        return None
    return InputError("a node of the Ray cluster has no paceline; write pip install 'paceline[ray]' on every node")
