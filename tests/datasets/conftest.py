"""Tiny standard files."""

import gzip
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

WriteIdx = Callable[..., Path]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads for products this small mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def write_idx() -> WriteIdx:
    """(path, array) -> path: an IDX file of unsigned bytes; packed where the name ends in .gz."""

    def write(path: Path, array: np.ndarray) -> Path:
        content = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        return path

    return write


@pytest.fixture
def mnist_files(write_idx: WriteIdx) -> Callable[..., Path]:
    """(folder, suffix, fill): the four files, 6 training and 4 test images; the first pixel of each is ``fill``."""

    def make(folder: Path, suffix: str = "", fill: int = 255) -> Path:
        for prefix, n in (("train", 6), ("t10k", 4)):
            images = np.zeros((n, 28, 28), np.uint8)
            images[:, 0, 0] = fill
            write_idx(folder / f"{prefix}-images-idx3-ubyte{suffix}", images)
            write_idx(folder / f"{prefix}-labels-idx1-ubyte{suffix}", np.arange(n, dtype=np.uint8))
        return folder

    return make


@pytest.fixture
def cifar_files(tmp_path: Path) -> Path:
    """A folder with ``cifar-10-batches-py``: 2 images a batch; every byte of batch i is i (of the test batch 0)."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for i, name in enumerate(["test_batch", *(f"data_batch_{i}" for i in range(1, 6))]):
        batch = {b"data": np.full((2, 3072), i, np.uint8), b"labels": [i, 9], b"filenames": [b"a.png", b"b.png"]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return tmp_path
