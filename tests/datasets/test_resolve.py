import pickle
import subprocess
import sys
import textwrap

import cloudpickle
import pytest

from paceline.core.errors import InputError
from paceline.datasets import PROGRAMS, load_program
from paceline.program import Program

SOURCE = """
import functools
import torch
from paceline.program import Program

LIMIT = 3

def net():
    return torch.nn.Linear(LIMIT, 2)

def make():
    return program

def needs(argument):
    return argument

def fails():
    raise KeyError("no such column")

def number():
    return 5

program = Program(
    model=net,
    loss=torch.nn.functional.cross_entropy,
    optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    train=(torch.ones(4, 3), torch.zeros(4, dtype=torch.long)),
    global_batch_size=4,
    seed=7,
)
"""


@pytest.fixture(autouse=True)
def _own_imports(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("paceline_program_", "mine")):
            del sys.modules[name]
    for name in cloudpickle.list_registry_pickle_by_value():
        cloudpickle.cloudpickle._PICKLE_BY_VALUE_MODULES.discard(name)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "train me.py"
    path.write_text(SOURCE)
    return path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


@pytest.mark.parametrize("name", ["program", "make"])
def test_a_program_or_a_function_of_a_file(source, name):
    program = load_program(f"{source}:{name}")
    assert isinstance(program, Program)
    assert (program.seed, program.global_batch_size) == (7, 4)


def test_seed_and_batch_size_replace_the_programs_own(source):
    program = load_program(f"{source}:program", seed=0, batch_size=2)
    assert (program.seed, program.batch_size, program.global_batch_size) == (0, 2, None)


def test_its_functions_travel_to_a_process_that_knows_nothing_of_the_file(source, tmp_path):
    shipped = tmp_path / "model.pickle"
    shipped.write_bytes(cloudpickle.dumps(load_program(f"{source}:program").model))
    source.unlink()
    code = f"import pickle; print(pickle.load(open({str(shipped)!r}, 'rb'))())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Linear(in_features=3, out_features=2" in done.stdout


def test_a_file_may_import_its_neighbours(tmp_path):
    write(tmp_path / "mine_helper.py", SOURCE)
    path = write(tmp_path / "train.py", "from mine_helper import program")
    assert load_program(f"{path}:program").seed == 7


def test_files_of_one_name_do_not_meet(tmp_path):
    paths = [write(tmp_path / str(seed) / "train.py", SOURCE.replace("seed=7", f"seed={seed}")) for seed in (1, 2)]
    models = [load_program(f"{path}:program").model for path in paths]
    assert models[0].__module__ != models[1].__module__


def test_a_file_that_was_changed_is_read_again(source):
    load_program(f"{source}:program")
    source.write_text(SOURCE.replace("seed=7", "seed=123"))
    assert load_program(f"{source}:program").seed == 123


def test_a_module_is_found_from_the_working_directory(tmp_path, monkeypatch):
    write(tmp_path / "mine_package/__init__.py", "")
    write(tmp_path / "mine_package/jobs.py", SOURCE)
    monkeypatch.chdir(tmp_path)
    assert load_program("mine_package.jobs:make").seed == 7


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        (
            "progam",
            r"unknown name in .*train me.py: 'progam'; did you mean 'program'\? Known: fails, make, .*program\.",
        ),
        ("LIMIT", r"LIMIT is of type int; it must be a Program or a function .* write program = Program\(...\)"),
        ("number", "number is of type int"),
        ("needs", r"calling .*needs\(\) failed: TypeError: .*missing 1 required positional argument"),
        ("fails", r"calling .*fails\(\) failed: KeyError: 'no such column'"),
        ("", "lacks a part of file.py:name"),
    ],
)
def test_what_is_no_program(source, attribute, message):
    with pytest.raises(InputError, match=message):
        load_program(f"{source}:{attribute}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mnits", r"unknown program 'mnits'; did you mean 'mnist'\? Known: cifar10, digits, fashion-mnist"),
        ("train.py", "names a file but not what to take from it; write train.py:NAME"),
        (":program", "lacks a part"),
        ("absent.py:program", "there is no file .*absent.py"),
        ("mine_absent.jobs:program", "there is no module 'mine_absent' on sys.path"),
        ("paceline.absent:program", "there is no module 'paceline.absent'"),
        ("paceline.core.types:program", "unknown name in paceline.core.types: 'program'"),
    ],
)
def test_what_is_not_there(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        load_program(name)


@pytest.mark.parametrize(
    ("text", "ending", "cause"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero", ZeroDivisionError),
        ("import mine_absent", "ModuleNotFoundError: No module named 'mine_absent'", ModuleNotFoundError),
        ("def (", "SyntaxError: invalid syntax", SyntaxError),
        ("raise SystemExit(2)", "SystemExit: 2", SystemExit),
    ],
)
def test_code_that_fails_on_import_is_chained_and_forgotten(tmp_path, monkeypatch, text, ending, cause):
    write(tmp_path / "mine.py", text)
    monkeypatch.chdir(tmp_path)
    for name in ("mine.py:program", "mine:program"):
        with pytest.raises(InputError, match=f"importing .*mine.* failed: {ending}") as caught:
            load_program(name)
        assert isinstance(caught.value.__cause__, cause)
    assert not [name for name in sys.modules if name.startswith("paceline_program_mine")]


def test_data_can_not_reach_a_program_of_ones_own(source, tmp_path):
    with pytest.raises(InputError, match=r"called with no arguments, so data=.*leave it out"):
        load_program(f"{source}:make", data=tmp_path)


def test_names_are_listed_without_torch_and_scikit_learn():
    code = (
        "import sys, paceline.datasets as d; print(sorted(d.PROGRAMS)); "
        "print({'torch', 'sklearn', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(sorted(PROGRAMS)), "set()"]


def test_a_builtin_program_pickles_plainly():
    program = load_program("digits", seed=3)
    again = pickle.loads(pickle.dumps(program))
    assert (again.name, again.seed) == ("digits", 3)
