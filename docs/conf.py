"""Settings of the site that `make docs` builds: every Markdown page and notebook that docs/index.md leads to.

The sources are those of the whole repository, so that a link from docs/ to benchmarks/ or examples/ is the same on the
site as it is in a clone.
"""

import os
import re
import sys
import tempfile
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from typer.main import get_command
from typer.testing import CliRunner

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "src"))
# Kernels of notebooks are other processes, and plot without a screen.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))

import paceline  # noqa: E402 (it is found by the path above)
from paceline.cli.main import app  # noqa: E402

project, author, copyright = "Paceline", "Paceline's authors", "Paceline's authors, Apache-2.0"
version = release = paceline.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.intersphinx", "sphinx.ext.viewcode"]

root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "examples/*.md", "benchmarks/**.md"]
exclude_patterns = [".*", "build", "dist", "runs", "src", "tests", "**/__pycache__"]

html_theme = "furo"
html_title = "Paceline"
html_static_path = ["site/static"]
html_extra_path = ["site/root"]  # index.html of the whole site, which leads to docs/index.html
html_css_files = ["paceline.css"]
html_show_sphinx = False

myst_heading_anchors = 4  # as GitHub has them
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["misc.highlighting_failure"]  # text between backticks may be only a part of a program

# Outputs are not stored: the notebooks are executed when the site is built, and an error in a cell ends that.
nb_execution_mode = "force"
nb_execution_timeout = 180
nb_execution_raise_on_error = True
nb_merge_streams = True

# What modules of the reference import at their top, extra by extra. Where a package is absent, its whole
# extra is mocked: transformers can't define its classes on a mocked accelerate.
EXTRAS = (("lightning",), ("accelerate", "transformers"))
autodoc_mock_imports = [name for extra in EXTRAS if not all(map(find_spec, extra)) for name in extra]

autodoc_default_options = {"members": True, "member-order": "bysource", "exclude-members": "__init__, __new__"}
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False

# Nothing is downloaded: this table is the inventory of the names of torch's reference that signatures and pages have.
# The second name is the one that annotations print.
TORCH_PAGES = {
    "torch.Tensor": ("torch.Tensor", "tensors.html"),
    "torch.device": ("torch.device", "tensor_attributes.html"),
    "torch.nn.Module": ("torch.nn.modules.module.Module", "generated/torch.nn.Module.html"),
    "torch.optim.LBFGS": ("torch.optim.lbfgs.LBFGS", "generated/torch.optim.LBFGS.html"),
    "torch.optim.Optimizer": ("torch.optim.optimizer.Optimizer", "optim.html"),
    "torch.optim.lr_scheduler.LRScheduler": (
        "torch.optim.lr_scheduler.LRScheduler",
        "generated/torch.optim.lr_scheduler.LRScheduler.html",
    ),
    "torch.utils.data.DataLoader": ("torch.utils.data.dataloader.DataLoader", "data.html"),
    "torch.utils.data.Dataset": ("torch.utils.data.dataset.Dataset", "data.html"),
}
TORCH = "https://docs.pytorch.org/docs/stable/"


def torch_inventory(folder: Path) -> str:
    """Write the inventory of :data:`TORCH_PAGES` and return its path."""
    lines = [
        f"{name} py:class 1 {page}#{public} -"
        for public, (printed, page) in TORCH_PAGES.items()
        for name in sorted({public, printed})
    ]
    path = folder / "torch.inv"
    head = "# Sphinx inventory version 2\n# Project: torch\n# Version:\n# The rest is zlib.\n"
    path.write_bytes(head.encode() + zlib.compress("".join(f"{line}\n" for line in lines).encode()))
    return str(path)


intersphinx_mapping = {"torch": (TORCH, torch_inventory(Path(tempfile.mkdtemp())))}


def commands() -> Iterator[tuple[str, ...]]:
    """Yield the words of every command, ``paceline`` itself first."""
    yield ()
    for name, command in get_command(app).commands.items():
        yield (name,)
        yield from ((name, inner) for inner in getattr(command, "commands", ()))


def help_of(words: tuple[str, ...]) -> str:
    """Return what ``paceline WORDS --help`` prints, 88 columns wide."""
    environment = {"COLUMNS": "88", "TERMINAL_WIDTH": "88", "NO_COLOR": "1", "TERM": "dumb"}
    result = CliRunner().invoke(app, [*words, "--help"], prog_name="paceline", env=environment)
    assert result.exit_code == 0, result.output
    return "\n".join(line.rstrip() for line in result.output.strip("\n").splitlines())


class CommandLineHelp(SphinxDirective):
    """One section for every command, with its ``--help``."""

    def run(self) -> list[nodes.Node]:
        sections: list[nodes.Node] = []
        for words in commands():
            name = " ".join(("paceline", *words))
            section = nodes.section(ids=[nodes.make_id(name)])
            section += nodes.title(text=name)
            section += nodes.literal_block(text=help_of(words), language="text", classes=["command-help"])
            self.state.document.note_explicit_target(section)
            sections.append(section)
        return sections


def readable_defaults(*given: Any) -> tuple[str | None, str | None]:
    """Return the signature with defaults that Sphinx can read: a function's name, and ``...`` for one that is made."""
    *_, signature, returns = given
    shown = signature and re.sub(r"<factory>", "...", re.sub(r"<function (\w+)[^>]*>", r"\1", signature))
    return shown, returns


def setup(sphinx: Sphinx) -> None:
    """Add what the pages use besides the extensions."""
    sphinx.add_directive("command-line-help", CommandLineHelp)
    sphinx.connect("autodoc-process-signature", readable_defaults)
