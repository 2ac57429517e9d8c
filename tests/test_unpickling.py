"""Where the library unpickles or executes what it reads: in the listed places alone, each for a reason."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "paceline"

# Last names of functions and classes that run code in what they are given.
DANGEROUS = {
    "pickle": {"load", "loads", "Unpickler"},
    "cloudpickle": {"load", "loads"},
    "marshal": {"load", "loads"},
    "torch": {"load"},
    "dist": {"all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list", "scatter_object_list"},
    "": {"eval", "exec", "compile", "__import__"},
    "importlib": {"import_module"},
}
RENAMED = {"import_module": "importlib", "FileSystemReader": "dcp"}

WHERE: dict[tuple[str, str], tuple[int, str]] = {
    ("comm/shared_pickle.py", "pickle.loads"): (2, "between processes of one run, over sockets that it alone has"),
    ("comm/shared_pickle.py", "pickle.Unpickler"): (1, "the same"),
    ("engine/spmd/replica_group.py", "pickle.loads"): (1, "the same"),
    ("engine/spmd/launcher.py", "pickle.loads"): (1, "the same"),
    ("engine/spmd/rank_context.py", "pickle.loads"): (1, "between ranks of one job, over its process group"),
    ("engine/spmd/survival.py", "pickle.loads"): (1, "the same"),
    ("engine/spmd/rank_registry.py", "dist.all_gather_object"): (1, "the same"),
    ("datasets/files.py", "pickle.Unpickler"): (1, "finds no class but replacements of its own"),
    ("api/predictor.py", "torch.load"): (1, "with weights_only=True"),
    ("checkpoint/interop_dcp.py", "dcp.FileSystemReader"): (2, "after trust=True alone"),
    ("datasets/resolve.py", "importlib.import_module"): (2, "a module that the user has named"),
    **{
        (path, "importlib.import_module"): (1, "a module of this package")
        for path in (
            "__init__.py",
            "aggregation/__init__.py",
            "compression/__init__.py",
            "core/registry.py",
            "reduction/__init__.py",
            "schedule/__init__.py",
            "replica/tensor/rules/__init__.py",
            "engine/distributed/fsdp.py",
        )
    },
    ("engine/spmd/process_group.py", "importlib.import_module"): (1, "a module of this package"),
    ("replica/capture/handover.py", "pickle.loads"): (1, "between ranks of one job, or from main to its workers"),
    ("integrations/transformers.py", "torch.load"): (2, "with weights_only=True"),
    ("comm/fork_server_main.py", "importlib.import_module"): (3, "modules that main names, over a socket of its own"),
}


def calls_of(path: Path) -> Iterator[str]:
    """Yield what a file uses of the dangerous names."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in DANGEROUS.get(node.value.id, ()):
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.func.id
            if name in RENAMED:
                yield f"{RENAMED[name]}.{name}"
            elif name in DANGEROUS[""]:
                yield name
        elif isinstance(node, ast.ImportFrom) and node.module in DANGEROUS:
            for alias in node.names:
                assert alias.name not in DANGEROUS[node.module] or alias.name in RENAMED, f"{path} hides {alias.name}"


def test_nothing_else_unpickles_or_executes() -> None:
    found = {
        (str(path.relative_to(SOURCE)), name): count
        for path in sorted(SOURCE.rglob("*.py"))
        for name, count in Counter(calls_of(path)).items()
    }
    assert found == {place: count for place, (count, _) in WHERE.items()}


def test_torch_load_is_given_weights_only() -> None:
    tree = ast.parse((SOURCE / "api/predictor.py").read_text(encoding="utf-8"))
    [call] = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "torch.load"]
    assert "weights_only=True" in [ast.unparse(keyword) for keyword in call.keywords]


@pytest.mark.parametrize("folder", ["checkpoint", "core"])
def test_what_reads_checkpoints_has_no_other_way(folder: str) -> None:
    """Of all that reads files of others, DCP's reader alone is in the list."""
    places = {path for path, _ in WHERE if path.startswith(f"{folder}/")}
    assert places <= {"checkpoint/interop_dcp.py", "core/registry.py"}


def test_the_check_finds_what_it_should(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("import pickle, torch\npickle.loads(b'')\ntorch.load('a')\neval('1')\nmodel.eval()\n")
    assert sorted(calls_of(path)) == ["eval", "pickle.loads", "torch.load"]
