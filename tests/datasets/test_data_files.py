import pytest

from paceline.core.errors import InputError
from paceline.datasets.files import find_files, no_files, read_bytes

NAMES = ("images", "labels")


def write(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"x")


def test_no_folder_given_says_what_to_write():
    with pytest.raises(InputError, match=r"mnist is read from files; write --data DIR .* images, labels .*MNIST/raw/"):
        find_files("mnist", None, NAMES, ("MNIST/raw", "."))


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(InputError, match=r"nowhere' is no folder; write --data DIR"):
        find_files("mnist", tmp_path / "nowhere", NAMES, (".",))


def test_nothing_there_names_all_files_and_places(tmp_path):
    with pytest.raises(InputError) as caught:
        find_files("mnist", tmp_path, NAMES, ("MNIST/raw", "."))
    for words in ("images, labels", str(tmp_path / "MNIST/raw"), f"or {tmp_path};"):
        assert words in str(caught.value)


def test_a_part_there_names_only_what_is_missing(tmp_path):
    write(tmp_path, "images.gz")
    with pytest.raises(InputError, match=rf"also needs labels \(.gz or not\) in {tmp_path}, next to images.gz"):
        find_files("mnist", tmp_path, NAMES, ("MNIST/raw", "."))


def test_each_file_may_be_packed_or_not(tmp_path):
    write(tmp_path, "images", "images.gz", "labels.gz")
    assert find_files("mnist", tmp_path, NAMES, (".",)) == [tmp_path / "images", tmp_path / "labels.gz"]


def test_files_of_two_folders_are_never_mixed(tmp_path):
    write(tmp_path / "FashionMNIST/raw", "images")
    write(tmp_path, *NAMES)
    with pytest.raises(InputError, match=r"also needs labels .* in .*FashionMNIST/raw"):
        find_files("fashion-mnist", tmp_path, NAMES, ("FashionMNIST/raw", "."))


def test_data_for_a_program_that_reads_none(tmp_path):
    no_files("digits", None)
    with pytest.raises(InputError, match=r"digits reads no files.*leave it out"):
        no_files("digits", tmp_path)


def test_a_folder_in_place_of_a_file(tmp_path):
    with pytest.raises(InputError, match=r"can't be read: .*Is a directory"):
        read_bytes(tmp_path)
