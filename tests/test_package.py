"""What is shipped, and what it needs: the source distribution, the dependencies, links of the page on PyPI."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Distributions that are imported by another name.
IMPORTED_AS = {"scikit-learn": "sklearn"}
# Modules that need an extra as soon as they are imported; all others ask for it where they use it.
NEED_EXTRAS = {
    "plots/curves.py": ("matplotlib",),
    "report/figures.py": ("matplotlib",),
    "engine/ray/": ("ray",),
    "integrations/transformers.py": ("transformers", "accelerate"),
    "integrations/lightning.py": ("lightning",),
}


def import_names(requirements: list[str]) -> set[str]:
    """Return the names by which requirements are imported."""
    names = {re.split(r"[\[<>=~!]", each, maxsplit=1)[0] for each in requirements} - {"paceline"}
    return {IMPORTED_AS.get(name, name) for name in names}


CORE = import_names(PROJECT["dependencies"])
OPTIONAL = import_names([each for name, extra in EXTRAS.items() if name != "dev" for each in extra])


def imports(tree: ast.AST, at_once: bool = True) -> Iterator[tuple[str, bool]]:
    """Yield the packages that a module imports, and whether as soon as it is imported itself."""
    for node in ast.iter_child_nodes(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        yield from ((name.partition(".")[0], at_once) for name in names)
        later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        later |= isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        yield from imports(node, at_once and not later)


def tracked() -> set[str]:
    """Return the files of the checkout; skip where it is none."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("needs a checkout by git")
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return {name for name in done.stdout.splitlines() if (ROOT / name).exists()}


# ----------------------------------------------------------------------------------------------------- what is shipped


def test_the_source_distribution_is_all_that_is_tracked(tmp_path: Path) -> None:
    files = tracked()
    for name in files:
        target = tmp_path / "checkout" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=tmp_path / "checkout", capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        shipped = {each.name.partition("/")[2] for each in tar.getmembers() if each.isfile()}
    assert files - shipped == set()
    made = {"PKG-INFO", "setup.cfg"} | {name for name in shipped if name.startswith("src/paceline.egg-info/")}
    assert shipped - files - made == set()


def test_relative_links_of_the_page_on_pypi_are_shipped_and_said_to_be_relative() -> None:
    readme = (ROOT / PROJECT["readme"]).read_text(encoding="utf-8")
    relative = {target.partition("#")[0] for target in re.findall(r"\]\((?!https?:|#)([^)]+)\)", readme)}
    assert relative <= tracked()
    assert not relative or "links of this page are files of the source distribution" in " ".join(readme.split())


def test_the_versions_of_python_that_it_names_are_those_that_it_takes() -> None:
    named = re.findall(r":: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.M)
    assert PROJECT["requires-python"] == f">={named[0]}"
    assert "{}.{}".format(*sys.version_info) in named


# -------------------------------------------------------------------------------------------------------- what it needs


def test_every_import_is_of_a_dependency_and_optional_ones_wait_until_they_are_used() -> None:
    source = ROOT / "src" / "paceline"
    known = CORE | OPTIONAL | {"paceline", *sys.stdlib_module_names}
    for path in sorted(source.rglob("*.py")):
        for name, at_once in imports(ast.parse(path.read_text(encoding="utf-8"))):
            where = str(path.relative_to(source))
            assert name in known, f"{where} imports {name}, which pyproject.toml does not have"
            if at_once and name in OPTIONAL:
                needed = [extra for start, extras in NEED_EXTRAS.items() if where.startswith(start) for extra in extras]
                assert name in needed, f"{where} imports {name} at once"


def test_all_extras_are_in_the_one_that_has_all() -> None:
    [everything] = EXTRAS["all"]
    assert sorted(re.findall(r"[\w-]+", everything.partition("[")[2])) == sorted(set(EXTRAS) - {"all", "dev", "docs"})


TRAINS = """
import torch, paceline

x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
program = paceline.Program(
    model=lambda: torch.nn.Linear(3, 1), loss=torch.nn.functional.mse_loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), train=(x, x.sum(1, keepdim=True)))
for engine in ("local", "virtual"):
    run = paceline.train(program, "replicas=2", engine=engine, steps=3)
    print(run, run._repr_html_()[:7])
try:
    from paceline.datasets import load_program
    load_program("digits")
except paceline.InputError as error:
    print(error)
"""


def test_training_needs_no_extra(tmp_path: Path) -> None:
    """No process of the run finds a package of an extra."""
    (tmp_path / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "def find_spec(name, path=None, target=None):\n"
        f"    return None if name.partition('.')[0] in {sorted(OPTIONAL)!r} else find(name, path, target)\n"
        "PathFinder.find_spec = find_spec\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", TRAINS],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")])},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    local, virtual, digits = done.stdout.splitlines()
    assert "engine=local: 3 updates" in local
    assert "engine=virtual: 3 updates" in virtual
    assert digits == "digits needs sklearn, which is not installed; run: pip install 'paceline[datasets]'"
