"""The tests that `make test` leaves to `make test-all`, and why.

An entry is a file, or a test of it without its parameters. Where it says ``but_first``, the first of its tests stays in
`make test`.
"""

from typing import NamedTuple


class Thorough(NamedTuple):
    """Tests that take long."""

    name: str
    why: str
    but_first: bool = False


PROGRAMS = "runs whole programs; `make test` runs the README's and one example"
PARITY = "the same parity over many meshes and models; `make test` keeps one of each kind"
STATISTICS = "10^5 updates, to hold means against closed forms"
KILLS = "kills and hangs at many moments; `make test` keeps the first of each kind"
BENCHMARKS = "a benchmark in small, in processes of its own"
PLANNER = "profiles programs, or tries small planning problems in full"

TABLE: tuple[Thorough, ...] = (
    Thorough("tests/test_examples.py", PROGRAMS),
    Thorough("tests/test_combinations.py", "160 runs: every policy over every form of replica on three engines"),
    Thorough("tests/test_readme.py::test_programs_in_the_text_run_as_they_stand", PROGRAMS, but_first=True),
    Thorough("tests/test_readme.py::test_examples_run_from_anywhere", PROGRAMS, but_first=True),
    Thorough("tests/test_planning_page.py", PROGRAMS),
    Thorough("tests/engine/test_closed_forms.py", STATISTICS),
)


def is_thorough(name: str, seen: set[str]) -> bool:
    """Return whether a test is left to `make test-all`.

    Args:
        name: its node id.
        seen: entries of which the first test has come along already; grows.
    """
    path, function = name.partition("::")[0], name.partition("[")[0]
    for entry in TABLE:
        if entry.name in (path, function):
            if entry.but_first and entry.name not in seen:
                seen.add(entry.name)
                return False
            return True
    return False
