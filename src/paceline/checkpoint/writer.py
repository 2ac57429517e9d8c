"""Hand chunks to the process that writes them, so that training goes on meanwhile.

::

    training    begin() ----- steps ----- wait_copied() -- steps, poll() -- poll(): SaveResult
                   |                      | before chunks change               |
    thread         +- copy to staging ----+ memory, shared                     |
    writer                                +- hash, write, flush, parts, rename +

Training stands still only where chunks would change before they are copied.
"""

import json
import mmap
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.checkpoint.base import TensorChunk, dtype_name
from paceline.checkpoint.manifest import FORMAT
from paceline.comm import linux, liveness
from paceline.comm.shared_memory import SharedMemory
from paceline.core.errors import PacelineError
from paceline.core.types import Seconds, Version

# madvise(2), Linux 5.14: map all pages now. One by one, as they are first written, costs five times as long.
_MADV_POPULATE_WRITE = 23


class SaveResult(NamedTuple):
    """How one save ended.

    Args:
        version: of the checkpoint.
        seconds: from the end of the copy on.
        size_bytes: bytes that were written; by part 0 those of all parts.
        error: what failed, with its path; None if the checkpoint is there.
    """

    version: Version
    seconds: Seconds
    size_bytes: int
    error: str | None


class CheckpointWriter:
    """Writes one process's part of each checkpoint, in another process, while training goes on.

    Args:
        folder: of all checkpoints; made at the first save.
        part: number of this part, 0 .. parts-1; part 0 commits.
        parts: how many processes write a part each.
        run: a token of hexadecimal digits that all parts of one run share, and no other run.
        keep: how many sound checkpoints stay; older ones are removed.
        timeout_s: how long part 0 waits for the other parts.
    """

    def __init__(self, folder: Path, *, part: int = 0, parts: int = 1, run: str, keep: int, timeout_s: Seconds) -> None:
        self._folder, self._part, self._run = folder.absolute(), part, run
        self._settings = json.dumps(
            {
                "folder": str(self._folder),
                "part": part,
                "parts": parts,
                "run": run,
                "keep": keep,
                "timeout_s": timeout_s,
            }
        )
        self._staging = _Staging()
        self._version: Version | None = None
        self._failed: SaveResult | None = None
        self._copying: threading.Thread | None = None
        self._start()

    @property
    def busy(self) -> bool:
        """Whether a save has begun whose result was not returned yet."""
        return self._version is not None

    def begin(self, version: Version, chunks: Iterable[TensorChunk], head: Mapping[str, Any] | None) -> None:
        """Have chunks copied, and written as this process's part of a checkpoint; not while busy.

        They must not change until :meth:`wait_copied` returns. Errors of the disk or for want of memory are in the
        result of ``poll``.

        Args:
            version: of A; names the checkpoint, ``step-<version>``.
            chunks: what this process writes, each name and offset once.
            head: JSON by key, part 0's alone; "format", "paceline", "torch", "created" and "version" are added.

        Raises:
            InputError: a chunk has a dtype that safetensors has not.
        """
        assert self._version is None, "a save is under way"
        chunks = sorted(chunks, key=lambda chunk: -chunk.tensor.itemsize)  # so that each lies at a multiple of its own
        request = {"version": version, "head": new_head(version, head), "chunks": [_row(chunk) for chunk in chunks]}
        self._version = version
        tensors = [chunk.tensor for chunk in chunks]
        self._copying = threading.Thread(target=self._hand_over, args=(request, tensors), name="paceline-checkpoint")
        self._copying.start()

    def wait_copied(self) -> None:
        """Return once the chunks of the save under way, if there is one, may change."""
        if self._copying is not None:
            self._copying.join()
            self._copying = None

    def _hand_over(self, request: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        """Copy tensors and send the request to the writer process."""
        try:
            self._staging.copy(tensors)
            if self._process.poll() is not None:
                self._link.close()
                self._start()
                self._staging.sent = False
            with os.fdopen(linux.memfd_create("paceline:request"), "wb") as file:
                file.write(json.dumps(request).encode())
                file.seek(0)
                staging = [] if self._staging.sent else [self._staging.fd]
                socket.send_fds(self._link, [b"+"], [file.fileno(), *staging])
            self._staging.sent = True
        except (OSError, PacelineError) as error:
            self._failed = SaveResult(request["version"], 0.0, 0, str(error))
        except Exception as error:  # nobody would hear of it, and the save never end
            self._failed = SaveResult(request["version"], 0.0, 0, f"{type(error).__name__}: {error}")

    def poll(self) -> SaveResult | None:
        """Return how the save under way ended; None while it is being written, or if none is under way."""
        return self.wait(0.0)

    def wait(self, timeout_s: Seconds) -> SaveResult | None:
        """Wait for the end of the save under way; None if the time is up first, or if none is under way."""
        if self._version is None:
            return None
        if self._copying is not None:
            self._copying.join(timeout_s)
            if self._copying.is_alive():
                return None
            self._copying = None
        result, self._failed = self._failed, None
        if result is None:
            self._link.settimeout(timeout_s)
            try:
                message = self._link.recv(1 << 16)
            except (BlockingIOError, TimeoutError):
                return None
            except ConnectionError:
                message = b""
            result = SaveResult(*json.loads(message)) if message else self._ended(self._version)
        self._version = None
        return result

    def close(self) -> None:
        """End the writer process; a save under way is given up."""
        self.wait_copied()
        self._process.kill()
        self._process.wait()
        self._link.close()
        if self._version is not None:
            self._remove_partial(self._version)
        self._version = None
        self._staging.close()

    def _start(self) -> None:
        self._link, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = liveness.open_pid(os.getpid())
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with remote:
            try:
                # Its own session: no Ctrl-C of a terminal.
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-P",
                        "-m",
                        "paceline.checkpoint.writer_process",
                        str(remote.fileno()),
                        str(parent),
                        self._settings,
                    ],
                    stdin=subprocess.DEVNULL,
                    env=os.environ | {"PYTHONPATH": path},
                    pass_fds=(remote.fileno(), parent),
                    start_new_session=True,
                )
            finally:
                os.close(parent)

    def _ended(self, version: Version) -> SaveResult:
        reason = liveness.describe_exit(self._process.wait())
        self._remove_partial(version)
        return SaveResult(version, 0.0, 0, f"the process that wrote it ended ({reason}): {self._folder}")

    def _remove_partial(self, version: Version) -> None:
        partial = self._folder / f".step-{version}.{self._run}.partial"
        if self._part == 0:
            shutil.rmtree(partial, ignore_errors=True)
        else:  # part 0 removes the folder
            with suppress(OSError):
                (partial / f"part-{self._part}.safetensors").unlink()


class _Staging:
    """Memory that chunks are copied into, shared with the writer process, and used again by the next save."""

    def __init__(self) -> None:
        self._memory: SharedMemory | None = None
        self._layout: list[tuple[torch.Size, torch.dtype]] = []
        self._views: list[Tensor] = []
        self.sent = False
        """Whether the writer process has the memory."""

    @property
    def fd(self) -> int:
        assert self._memory is not None
        return self._memory.fd

    def copy(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors one behind the other.

        Raises:
            PacelineError: there is not enough memory.
        """
        layout = [(tensor.shape, tensor.dtype) for tensor in tensors]
        size = sum(tensor.nbytes for tensor in tensors)
        memory = self._memory
        if memory is None or size > memory.size_bytes:
            self.close()
            self._memory = memory = SharedMemory.create("checkpoint", max(size, mmap.PAGESIZE), reserved_bytes=size)
            with suppress(OSError):  # an older kernel
                memory.pages.madvise(_MADV_POPULATE_WRITE)
        if layout != self._layout:
            self._layout, self._views, end = layout, [], 0
            for tensor in tensors:
                self._views.append(memory.tensor(end, tensor.shape, tensor.dtype))
                end += tensor.nbytes
        with torch.no_grad():
            for view, tensor in zip(self._views, tensors, strict=True):
                view.copy_(tensor)

    def close(self) -> None:
        """Free the memory."""
        self._layout, self._views, self.sent = [], [], False
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def new_head(version: Version, head: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the head of a manifest that is written now."""
    created = datetime.now(UTC).isoformat(timespec="milliseconds")
    versions = {"paceline": sys.modules["paceline"].__version__, "torch": torch.__version__}
    return {"format": FORMAT, **versions, "created": created, "version": version, **(head or {})}


def _row(chunk: TensorChunk) -> tuple[Any, ...]:
    dtype = dtype_name(chunk.name, chunk.tensor)
    return chunk.name, chunk.shape, dtype, chunk.offset, tuple(chunk.tensor.shape)
