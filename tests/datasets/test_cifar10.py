import os
import pickle

import numpy as np
import pytest

from paceline.core.errors import InputError
from paceline.datasets import load_program

DATA = np.zeros((2, 3072), np.uint8)


def test_the_batches_in_order(cifar_files):
    program = load_program("cifar10", data=cifar_files)
    images, labels = program.train
    assert images.shape == (10, 3, 32, 32)
    assert labels.tolist() == [1, 9, 2, 9, 3, 9, 4, 9, 5, 9]
    assert program.test[1].tolist() == [0, 9]
    expected = [(4 / 255 - m) / s for m, s in [(0.4914, 0.2470), (0.4822, 0.2435), (0.4465, 0.2616)]]
    assert images[6, :, 31, 31].tolist() == pytest.approx(expected, rel=1e-5)
    assert program.build()(images).shape == (10, 10)


def test_bytes_are_channel_first(cifar_files):
    picture = np.zeros((1, 3, 32, 32), np.uint8)
    picture[0, 1, 2, 3] = 255
    batch = {b"data": picture.reshape(1, -1), b"labels": [0]}
    (cifar_files / "cifar-10-batches-py/test_batch").write_bytes(pickle.dumps(batch, protocol=2))
    images, _ = load_program("cifar10", data=cifar_files).test
    assert np.argwhere(images.numpy() > 0).tolist() == [[0, 1, 2, 3]]


def test_the_folder_of_the_batches_itself(cifar_files):
    assert len(load_program("cifar10", data=cifar_files / "cifar-10-batches-py").train[1]) == 10


def test_missing_batches_are_named(cifar_files):
    for name in ("data_batch_2", "test_batch"):
        (cifar_files / "cifar-10-batches-py" / name).unlink()
    with pytest.raises(InputError, match=r"also needs data_batch_2, test_batch .* in .*cifar-10-batches-py"):
        load_program("cifar10", data=cifar_files)


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Malicious(), r"asks for \w+\.mkdir, .* refused and not run"),
        ({b"data": DATA, b"labels": [0, 1], b"x": Malicious()}, r"asks for \w+\.mkdir"),
        ([1, 2], "no dict with b'data' and b'labels'"),
        ({b"data": DATA}, "no dict with b'data' and b'labels'"),
        ({b"data": DATA[:, :-1].copy(), b"labels": [0, 1]}, r"an array of shape \(2, 3071\)"),
        ({b"data": DATA.reshape(2, 3, 32, 32), b"labels": [0, 1]}, r"an array of shape \(2, 3, 32, 32\)"),
        ({b"data": DATA[:0], b"labels": []}, r"an array of shape \(0, 3072\)"),
        ({b"data": DATA.astype(np.float32), b"labels": [0, 1]}, "not of unsigned bytes"),
        ({b"data": [[0]], b"labels": [0]}, "holds as data list"),
        ({b"data": DATA, b"labels": [0]}, "1 labels for 2 images"),
        ({b"data": DATA, b"labels": [0, 10]}, "label 10, outside"),
        ({b"data": DATA, b"labels": [-1, 0]}, "label -1, outside"),
        ({b"data": DATA, b"labels": [0, True]}, "no list of whole numbers"),
        ({b"data": DATA, b"labels": [0, 2**70]}, "no list of whole numbers"),
        ({b"data": DATA, b"labels": np.array([0, 1], np.uint8)}, "no list of whole numbers"),
    ],
)
def test_a_batch_that_is_none_is_refused_by_name(cifar_files, monkeypatch, batch, message):
    monkeypatch.chdir(cifar_files)
    path = cifar_files / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(InputError, match=f"{path} .*{message}"):
        load_program("cifar10", data=cifar_files)
    assert not (cifar_files / "pwned").exists()
