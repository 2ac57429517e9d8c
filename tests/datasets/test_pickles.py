import os
import pickle
import pickletools
import struct

import numpy as np
import pytest

from paceline.core.errors import InputError
from paceline.datasets.files import ByteArray, read_pickle

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 6), np.uint8)


class Calls:
    """Pickles as a call of ``function``."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def written(tmp_path, content):
    path = tmp_path / "batch"
    path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content, protocol=2))
    return path


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("array", [PIXELS, np.asfortranarray(PIXELS), PIXELS[0], PIXELS[:0]])
def test_arrays_bytes_lists_and_dicts_come_back(tmp_path, protocol, array):
    content = {b"data": array, b"labels": [1, 2], b"name": b"caf\xe9", b"deep": [{b"a": (1, None, 2.5)}]}
    read = read_pickle(written(tmp_path, pickle.dumps(content, protocol)))
    np.testing.assert_array_equal(read.pop(b"data").value, content.pop(b"data"))
    assert read == content


def test_what_python_2_and_numpy_1_wrote(tmp_path):
    """The bytes of the published batches: strings as str of Python 2, numpy's old module names."""
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    state = b"(K\x01K\x01K\x02\x86" + dtype + b"\x89U\x02\x07\x08tb"
    read = read_pickle(written(tmp_path, b"\x80\x02}U\x04data" + array + state + b"s."))
    np.testing.assert_array_equal(read[b"data"].value, np.array([[7, 8]], np.uint8))


@pytest.mark.parametrize(
    ("function", "name"),
    [(os.system, r"\w+\.system"), (eval, r"\w+\.eval"), (np.load, r"numpy\S*\.load"), (getattr, r"\w+\.getattr")],
)
def test_any_other_name_is_refused_unrun_and_named(tmp_path, function, name):
    witness = tmp_path / "witness"
    with pytest.raises(InputError, match=f"asks for {name}, .* refused and not run"):
        read_pickle(written(tmp_path, {b"data": Calls(function, f"touch {witness}")}))
    assert not witness.exists()


def test_a_dotted_name_below_an_allowed_one_is_refused(tmp_path):
    content = b"\x80\x04\x8c\x05numpy\x8c\x10ndarray.__init__\x93."
    with pytest.raises(InputError, match=r"asks for numpy\.ndarray\.__init__"):
        read_pickle(written(tmp_path, content))


@pytest.mark.parametrize("array", [PIXELS.astype(np.int64), np.array([None, {}], object), PIXELS.astype("V1")])
def test_arrays_of_other_types_are_refused(tmp_path, array):
    with pytest.raises(InputError, match="not of unsigned bytes"):
        read_pickle(written(tmp_path, {b"data": array}))


def test_a_shape_that_does_not_fit_its_bytes_is_refused(tmp_path):
    content = pickle.dumps(PIXELS, protocol=2)
    at = content.index(struct.pack("<BBBBB", ord("K"), 4, ord("K"), 6, 0x86))
    with pytest.raises(InputError, match=r"shape \(255, 6\) without as many bytes"):
        read_pickle(written(tmp_path, content[: at + 1] + b"\xff" + content[at + 2 :]))


def test_a_codec_other_than_latin1_is_refused(tmp_path):
    import _codecs

    with pytest.raises(InputError, match="text encoding 'idna'"):
        read_pickle(written(tmp_path, Calls(_codecs.encode, "a", "idna")))


def test_an_array_without_state_is_empty(tmp_path):
    read = read_pickle(written(tmp_path, b"\x80\x02cnumpy\nndarray\n)\x81."))
    assert isinstance(read, ByteArray)
    assert read.value.size == 0


def test_every_truncation_is_an_input_error(tmp_path):
    content = pickle.dumps({b"data": PIXELS, b"labels": [1]}, protocol=2)
    cuts = [at for _, _, at in pickletools.genops(content) if at]
    for cut in cuts:
        with pytest.raises(InputError, match="no readable pickle"):
            read_pickle(written(tmp_path, content[:cut]))
    assert len(cuts) > 20
