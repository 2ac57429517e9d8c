"""On one GPU or more: Paceline beside plain PyTorch, DDP, FSDP2, DTensor and torch.distributed.pipelining.

    python benchmarks/gpu/measure.py
    python benchmarks/gpu/measure.py --rows gpt2 shards
    python benchmarks/gpu/measure.py --page

Each row lies in results/ as a JSON file as it comes; those that are there are not measured again.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.crew import RankError
from kit.work import Begun, guarded
from page import page, shown
from rounds import Pace
from rows import ROWS, Setting, words_of

from paceline.core.errors import InputError
from paceline.device import AUTO, refuse_absent, resolved

HERE = Path(__file__).parent

ROUNDS, TURN_S, SECONDS = 9, 0.5, 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is not there yet, or write the page; returns the exit code."""
    said = parsed(arguments)
    results = said.out / "results"
    return guarded(lambda: write(said.out) if said.page else fill(said, results), str(results))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--page", action="store_true", help="write README.md from what has been measured")
    made.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW", help="; ".join(ROWS))
    made.add_argument("--device", default=AUTO, help="type of device; the accelerator of this host by default")
    made.add_argument("--small", action="store_true", help="models of a few thousand parameters, to try the benchmark")
    made.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each side; %(default)d by default")
    made.add_argument("--turn", type=float, default=TURN_S, metavar="S", help="seconds of a turn; %(default)g")
    made.add_argument("--seconds", type=float, default=SECONDS, metavar="S", help="of asynchronous ones; %(default)g")
    made.add_argument("--again", action="store_true", help="also what has been measured")
    made.add_argument("--out", type=Path, default=HERE, metavar="DIR", help="of results/ and README.md; this folder")
    return made.parse_args(arguments)


def fill(said: argparse.Namespace, results: Path) -> None:
    """Measure the rows; raises InputError where there is no device for them, and RankError after the last row, if one
    has failed: the others are measured all the same."""
    kind = resolved(said.device)
    refuse_absent(kind)
    if kind == "cpu" and not said.small:
        raise InputError("torch sees no accelerator on this host; write --small to try the benchmark on the CPU")
    setting, failed = Setting(kind, said.small, Pace(said.rounds, said.turn), said.seconds), list[str]()
    for name in said.rows:
        path = results / f"{name}.json"
        if path.exists() and not said.again:
            continue
        try:
            measure(name, setting, path)
        except (RankError, ArithmeticError) as error:
            failed.append(f"{name}: {error}")
    if failed:
        raise RankError("\n".join(failed))


def measure(name: str, setting: Setting, path: Path) -> None:
    """Measure a row, and keep it."""
    for word in words_of(name, setting):
        if isinstance(word, Begun):
            print(f"{name}: {word.cell}", file=sys.stderr, flush=True)
            continue
        for row in word.rows:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_suffix(".new")
            beside.write_text(json.dumps(row, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            beside.replace(path)
            print(shown(row), flush=True)


def write(folder: Path) -> None:
    """The page, of what there is."""
    paths = [folder / "results" / f"{name}.json" for name in ROWS]
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
    path = folder / "README.md"
    path.write_text(page(rows), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    sys.exit(main())
