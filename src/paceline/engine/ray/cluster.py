"""Ray itself: one of this engine's own, on this host alone, or one that is running already."""

import contextlib
import importlib.util
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

STORE_SHARE = 0.25
"""Of the memory that is free: how much the object store of a Ray of our own may fill."""

LEAST_STORE_BYTES = 100 << 20
"""Ray takes no smaller one."""

LONGEST_FOLDER = 36
"""Characters; Ray's sockets lie 65 deeper, and their paths have room for 107."""

# Without the first, Ray listens on all interfaces of a Linux host whatever its address; the second reports nothing.
_ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}


def require_ray() -> None:
    """Raise InputError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise InputError(
            "engine='ray' needs Ray, which is not installed; write pip install 'paceline[ray]', or engine='local'"
        )


class Janitor:
    """Removes what a killed process would leave: a child that outlives it for a moment."""

    def __init__(self) -> None:
        janitor = Path(__file__).with_name("janitor.py")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(janitor)], stdin=subprocess.PIPE, start_new_session=True, text=True
        )

    def mind(self, path: Path | str) -> None:
        """From now on this goes when this process does."""
        assert self._process.stdin is not None
        print(os.path.abspath(path), file=self._process.stdin, flush=True)

    def close(self) -> None:
        """Let it remove all that it minds, and wait for that."""
        assert self._process.stdin is not None
        print(FAREWELL, file=self._process.stdin)
        self._process.stdin.close()
        self._process.wait()


class Cluster:
    """A connection to Ray; there is one in a process at a time.

    Args:
        address: ``auto`` or ``HOST:PORT`` of a Ray that is running; None: start one, for this host alone.

    Raises:
        InputError: no Ray there; or one is in this process already, and another is asked for.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._janitor: Janitor | None = Janitor()
        self._mine = False
        self._sigterm = signal.getsignal(signal.SIGTERM)  # Ray puts its own there, and leaves it
        self._added: set[str] = set()
        """What it adds to this process's environment, to be told to the Ray that was started or joined."""
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @property
    def own(self) -> bool:
        """Whether it was started here, and ends here."""
        return self._address is None

    @property
    def gpus(self) -> int:
        """How many GPUs its nodes have."""
        import ray

        return int(ray.cluster_resources().get("GPU", 0))

    def mind(self, path: Path | str) -> None:
        """Have it removed when this is closed, or this process is killed."""
        assert self._janitor is not None, "it is closed"
        self._janitor.mind(path)

    def close(self) -> None:
        """Leave it; end it where it is our own."""
        import ray

        if self._mine:
            ray.shutdown()
            self._mine = False
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, self._sigterm)
            for name in self._added:
                os.environ.pop(name, None)
        if self._janitor is not None:
            self._janitor.close()
            self._janitor = None

    def _open(self) -> None:
        import ray

        before = {*os.environ}
        if ray.is_initialized():
            if self.own:
                raise InputError(
                    "this process is connected to a Ray already, and can't start another; write engine='ray:auto' to "
                    "use that one, or ray.shutdown() first"
                )
        elif self.own:
            self._start()
        else:
            self._join()
        self._added = os.environ.keys() - before

    def _start(self) -> None:
        import ray

        folder = _short_folder()
        self.mind(folder)
        self._mine = True
        with _for_this_host():
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

    def _join(self) -> None:
        import ray

        try:
            ray.init(self._address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InputError(
                f"engine='ray:{self._address}': there is no Ray to join ({str(error).strip().splitlines()[0]}); start "
                "one with ray start --head, or write engine='ray'"
            ) from error
        self._mine = True


def _short_folder() -> str:
    """A new folder for Ray's sockets and logs, where their paths are not too long."""
    usual = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="ray-", dir=usual if len(usual) < LONGEST_FOLDER else "/tmp")


@contextlib.contextmanager
def _for_this_host() -> Iterator[None]:
    """What makes Ray keep to itself, for as long as it starts."""
    from ray._private import ray_constants

    constants: Any = ray_constants
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    reachable = constants.ENABLE_RAY_CLUSTER  # read as Ray is imported, which may have been long ago
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


def missing_here(error: BaseException) -> PacelineError | None:
    """What to say where an actor can't start because its node lacks Paceline; None where that is not why."""
    if "No module named 'paceline" not in str(error):
        return None
    return InputError("a node of the Ray cluster has no paceline; write pip install 'paceline[ray]' on every node")
