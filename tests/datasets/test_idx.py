import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import InputError
from paceline.datasets.files import read_idx

HEADER = struct.pack(">IIII", 0x803, 2, 28, 28)


@pytest.mark.parametrize("name", ["images", "images.gz"])
def test_it_reads_back_what_was_written(tmp_path, write_idx, name):
    images = np.random.default_rng(0).integers(0, 256, (5, 28, 28), np.uint8)
    np.testing.assert_array_equal(read_idx(write_idx(tmp_path / name, images), (28, 28)), images)


def test_gzip_is_told_by_content_not_by_name(tmp_path, write_idx):
    labels = np.array([3, 1, 4], np.uint8)
    packed = write_idx(tmp_path / "labels.gz", labels).rename(tmp_path / "labels")
    np.testing.assert_array_equal(read_idx(packed, ()), labels)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated: 0 bytes"),
        (HEADER[:9], "truncated: 9 bytes, fewer than an IDX header of 16"),
        (
            HEADER + bytes(2 * 784 - 1),
            r"truncated: its header says \(2, 28, 28\), so 16 \+ 1568 bytes, but it has 1583",
        ),
        (HEADER + bytes(2 * 784 + 1), "too long"),
        (struct.pack(">IIII", 0x801, 2, 28, 28) + bytes(1568), "begins with 0x00000801, .* begins with 0x00000803"),
        (struct.pack(">IIII", 0xD03, 2, 28, 28) + bytes(1568), "begins with 0x00000d03"),
        (struct.pack(">IIII", 0x803, 2, 28, 27) + bytes(1512), r"samples of shape \(28, 27\), not \(28, 28\)"),
        (struct.pack(">IIII", 0x803, 0, 28, 28), "holds no samples"),
        (b"<html>not found</html>", "begins with 0x3c68746d"),
    ],
)
def test_a_file_that_is_no_such_idx_file_is_refused(tmp_path, content, message):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"{path} .*{message}"):
        read_idx(path, (28, 28))


@pytest.mark.parametrize("damage", [lambda c: c[:-9], lambda c: c[:20] + b"\xff" * 8 + c[28:], lambda c: c[:3]])
def test_damaged_gzip_names_the_file(tmp_path, damage):
    path = tmp_path / "images.gz"
    path.write_bytes(damage(gzip.compress(HEADER + np.random.default_rng(0).bytes(1568))))
    with pytest.raises(InputError, match=f"{path} can't be read"):
        read_idx(path, (28, 28))


@given(cut=st.integers(0, 8 + 20 - 1))
def test_every_shortened_file_is_refused(tmp_path_factory, cut):
    path: Path = tmp_path_factory.mktemp("cut") / "labels"
    path.write_bytes((struct.pack(">II", 0x801, 20) + bytes(20))[:cut])
    with pytest.raises(InputError, match="truncated"):
        read_idx(path, ())
