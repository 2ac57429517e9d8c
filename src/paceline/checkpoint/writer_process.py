"""The process that writes checkpoints: ``python -m paceline.checkpoint.writer_process``; no torch.

:class:`paceline.checkpoint.writer.CheckpointWriter` starts it, one for each part of a checkpoint. It ends when the
process that it works for does, whatever it is doing then. What it does at which moment decides what a crash leaves::

    .step-1200.<run>.partial/part-<n>.safetensors     written, hashed and flushed by each part
                             part-<n>.json            the same of its manifest; part 0 waits for those of the others
                             manifest.json            by part 0, flushed; the folder is whole now
    step-1200/                                        renamed; an older folder of this name takes the partial one's
    step-900/                                         removed if ``keep`` newer ones are sound

A partial folder is locked while anybody writes it. One without a lock is left over, and the next writer removes it. The
folder of all checkpoints is locked by part 0 from its first save to its end, so that no two runs write there.
"""

import errno
import hashlib
import itertools
import json
import mmap
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from paceline.checkpoint.manifest import (
    DTYPES,
    FORMAT,
    MANIFEST,
    ChunkEntry,
    FileInfo,
    Manifest,
    TensorInfo,
    checkpoint_folders,
    chunk_key,
)
from paceline.checkpoint.options import other_run
from paceline.comm import linux, liveness
from paceline.core.errors import InputError, PacelineError, WaitTimeoutError
from paceline.core.safe_files import (
    LOCK_WAIT_S,
    lock_alone,
    locked,
    naming,
    read_bytes,
    reading,
    remove_leftover,
    sync,
)
from paceline.core.types import Seconds, Version

# Bytes that are hashed and written at a time.
_PIECE_BYTES = 4 << 20
_POLL_S = 0.02
_PARTIAL = re.compile(r"\.step-(\d+)\.([0-9a-f]+)\.partial(?:\.replaced\.partial)?")


@dataclass(frozen=True)
class PartWriter:
    """Writes one part of each checkpoint of a run; part 0 commits.

    Args:
        folder: of all checkpoints.
        part: number of this part, 0 .. parts-1.
        parts: how many there are.
        run: token of the run, the same for all parts.
        keep: how many sound checkpoints stay.
        timeout_s: how long part 0 waits for the others.
    """

    folder: Path
    part: int
    parts: int
    run: str
    keep: int
    timeout_s: Seconds
    _sound: set[str] = field(default_factory=set[str], init=False)
    """Checkpoints that this process has written or verified."""
    _locks: dict[int, int] = field(default_factory=dict[int, int], init=False)
    """Of the folder, by its inode: the file descriptor that holds the lock."""

    def save(self, request: dict[str, Any], staging: memoryview) -> int:
        """Write this part of a checkpoint; as part 0, wait for the others and commit.

        Args:
            request: "version", "head" and "chunks": [name, shape, dtype, offset, extent] in the order in which
                they lie in memory.
            staging: the values of the chunks, without gaps.

        Returns:
            Bytes that were written: by part 0 those of all parts.

        Raises:
            OSError: the disk is full, read-only, too slow; has a path.
            PacelineError: another part failed or is missing.
        """
        version: Version = request["version"]
        partial = self.folder / f".step-{version}.{self.run}.partial"
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True, exist_ok=True)
            sync(self.folder.parent)
        if self.part == 0:
            self._lock_folder()
            self._remove_leftovers(version)
        partial.mkdir(exist_ok=True)
        try:
            with locked(partial):
                if self.part > 0:
                    return self._write_sidecar(partial, request, staging)
                parts = [self._write_part(partial, request["chunks"], staging), *self._wait_for_parts(partial)]
                return self._commit(partial, version, Manifest.merge(request["head"], parts))
        except (OSError, PacelineError):
            if self.part == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def _lock_folder(self) -> None:
        inode = self.folder.stat().st_ino  # it may have been removed, and made anew
        if inode in self._locks:
            return
        try:
            handle = lock_alone(self.folder, LOCK_WAIT_S)
        except BlockingIOError:
            raise PacelineError(other_run(self.folder)) from None
        if handle is not None:
            self._locks[inode] = handle

    def _write_part(self, partial: Path, chunks: Sequence[Sequence[Any]], staging: memoryview) -> Manifest:
        path = partial / f"part-{self.part}.safetensors"
        header, tensors, end = dict[str, Any](), dict[str, TensorInfo](), 0
        for name, shape, dtype, offset, extent in chunks:
            key = chunk_key(name, offset)
            begin, end = end, end + prod(extent) * DTYPES[dtype][1]
            header[key] = {"dtype": DTYPES[dtype][0], "shape": extent, "data_offsets": [begin, end]}
            known = tensors.get(name, TensorInfo(tuple(shape), dtype, ()))
            entry = ChunkEntry(path.name, key, tuple(offset), tuple(extent))
            tensors[name] = known._replace(chunks=(*known.chunks, entry))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)  # so that the values begin at a multiple of 8 bytes
        info = _write_hashed(path, len(text).to_bytes(8, "little") + text, staging[:end])
        return Manifest({"format": FORMAT}, tensors, {path.name: info})

    def _write_sidecar(self, partial: Path, request: dict[str, Any], staging: memoryview) -> int:
        """Write this part, and tell part 0 of it or of the error."""
        sidecar = partial / f"part-{self.part}.json"
        if sidecar.exists() and "error" not in _read_sidecar(sidecar).head:
            # Part 0 failed, and this is its next try at the same version. The file is right, and may be in use.
            return 0
        try:
            manifest = self._write_part(partial, request["chunks"], staging)
        except OSError as error:
            (partial / f"part-{self.part}.safetensors").unlink(missing_ok=True)
            with suppress(OSError):  # the first error counts
                _write_durably(sidecar, Manifest({"format": FORMAT, "error": str(error)}, {}, {}).to_json())
            raise
        _write_durably(sidecar, manifest.to_json())
        return sum(info.size_bytes for info in manifest.files.values())

    def _wait_for_parts(self, partial: Path) -> Iterator[Manifest]:
        deadline = time.monotonic() + self.timeout_s
        waiting = {part: partial / f"part-{part}.json" for part in range(1, self.parts)}
        while waiting:
            for part, sidecar in [(part, path) for part, path in waiting.items() if path.exists()]:
                del waiting[part]
                manifest = _read_sidecar(sidecar)
                if "error" in manifest.head:
                    raise PacelineError(f"part {part} failed: {manifest.head['error']}")
                yield manifest
            if waiting and time.monotonic() > deadline:
                missing = ", ".join(path.name for path in waiting.values())
                raise WaitTimeoutError(
                    f"{missing} did not appear in {partial} within {self.timeout_s:g} s; all processes must see the "
                    "same folder: write checkpoint= as a path on a disk that they share"
                )
            time.sleep(_POLL_S if waiting else 0)  # a folder that other hosts write to can't be waited for

    def _commit(self, partial: Path, version: Version, manifest: Manifest) -> int:
        text = manifest.to_json()
        _write_durably(partial / MANIFEST, text)
        Manifest.read(partial)  # that chunks cover their tensors, above all
        for part in range(1, self.parts):
            (partial / f"part-{part}.json").unlink()
        sync(partial)
        final = self.folder / f"step-{version}"
        if os.path.lexists(final):
            _replace(partial, final)
        else:
            partial.rename(final)
        sync(self.folder)
        self._sound.add(final.name)
        self._remove_old()
        return len(text) + sum(info.size_bytes for info in manifest.files.values())

    def _remove_old(self) -> None:
        """Remove what is older than the newest ``keep`` sound checkpoints."""
        sound = 0
        for folder in checkpoint_folders(self.folder):
            if sound == self.keep:
                # Renamed first, so that no part of it is ever taken for a checkpoint.
                removed = folder.with_name(f".{folder.name}.{self.run}.partial")
                folder.rename(removed)
                shutil.rmtree(removed, ignore_errors=True)
            elif folder.name in self._sound or _is_sound(folder):
                self._sound.add(folder.name)
                sound += 1

    def _remove_leftovers(self, version: Version) -> None:
        """Remove partial folders of runs that have ended, and those that this run has given up."""
        for partial in self.folder.glob(".step-*.partial"):
            found = _PARTIAL.fullmatch(partial.name)
            # Other parts of this run may be ahead of this one.
            if found and (found[2] != self.run or int(found[1]) < version):
                remove_leftover(partial)


def _read_sidecar(path: Path) -> Manifest:
    with reading(path):
        return Manifest.parse_part(read_bytes(path), path)


def _is_sound(folder: Path) -> bool:
    try:
        Manifest.read(folder).check_files(folder)
    except InputError:
        return False
    return True


def _replace(partial: Path, final: Path) -> None:
    """Replace a folder, and remove the old one."""
    try:
        linux.exchange(partial, final)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
        # This file system (NFS, say) can't. A crash between these two leaves the checkpoints before.
        final.rename(partial.with_name(f"{partial.name}.replaced.partial"))
        partial.rename(final)
        partial = partial.with_name(f"{partial.name}.replaced.partial")
    shutil.rmtree(partial, ignore_errors=True)


def _write_hashed(path: Path, header: bytes, values: memoryview) -> FileInfo:
    digest = hashlib.sha256()
    with naming(path), path.open("wb") as file:
        for piece in itertools.chain([memoryview(header)], _pieces(values)):
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        return FileInfo(file.tell(), digest.hexdigest())


def _pieces(values: memoryview) -> Iterator[memoryview]:
    """Yield staging memory in pieces, each of which is unmapped afterwards, so that few are in this process at once."""
    for start in range(0, len(values), _PIECE_BYTES):
        yield values[start : start + _PIECE_BYTES]
        if isinstance(values.obj, mmap.mmap):
            values.obj.madvise(mmap.MADV_DONTNEED, start, min(_PIECE_BYTES, len(values) - start))


def _write_durably(path: Path, text: str) -> None:
    """Write a file that others see whole or not at all, also after a crash."""
    partial = path.with_name(f"{path.name}.partial")
    with naming(partial), partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def main() -> None:
    """Serve requests on a socket, one after another, until its other end is closed.

    A request is a message with one or two files in memory: the JSON, and the staging memory if it is a new one.
    """
    link, parent, settings = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), json.loads(sys.argv[3])
    liveness.watch_and_exit(parent)
    writer = PartWriter(Path(settings.pop("folder")), **settings)
    with link, suppress(ConnectionError):  # training was killed with an answer unread
        _serve(link, writer)


def _serve(link: socket.socket, writer: PartWriter) -> None:
    """Answer requests until the other end of the socket is closed."""
    staging = memoryview(b"")
    while True:
        message, handles, _, _ = socket.recv_fds(link, 1, 2, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return
        with open(handles[0], "rb") as file:
            request = json.load(file)
        if len(handles) == 2:
            staging = memoryview(mmap.mmap(handles[1], 0, prot=mmap.PROT_READ))
            os.close(handles[1])
        started, size, error = time.monotonic(), 0, None
        try:
            size = writer.save(request, staging)
        except (OSError, PacelineError) as failure:
            error = str(failure)
        link.send(json.dumps([request["version"], time.monotonic() - started, size, error and error[:4000]]).encode())


if __name__ == "__main__":
    main()
