"""The tables and figures of the Smooth Switch paper (arXiv 2407.00101), measured: CSV, figures and a page.

A run is made once and kept in the cache; Ctrl-C ends cleanly, and the same command goes on where it stopped.
"""

import argparse
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path

import engines
import figures
import map_page
import measured
import page
import ray_servers
import sensitivity
import server_time
import sheets
from assumptions import Assumptions
from cells import Cell, Store
from protocol import ROUNDS, TABLES
from study import Study

from paceline import PacelineError
from paceline.core.errors import InputError

FIGURES = (*figures.CURVES, *figures.BARS)

VIRTUAL, RAY = "virtual", "ray"

SETS = ("mnist", "cifar10")

STOPPED = 130
"""What a shell gets from a program that Ctrl-C has ended."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = made.add_argument_group("what to make (the page is written with any of these)")
    what.add_argument("--table", action="append", default=[], choices=_choices(TABLES), help="may be repeated")
    what.add_argument("--figure", action="append", default=[], choices=_choices(FIGURES), help="may be repeated")
    what.add_argument("--sensitivity", action="store_true", help="each assumption against the defaults, tables 3 to 5")
    what.add_argument("--regimes", action="store_true", help="the map of regimes and the adaptive threshold's regret")
    what.add_argument("--measure", action="store_true", help="time gradients on this machine, into measured.json")
    what.add_argument("--fit-server", action="store_true", help="time the servers of the engines, into measured.json")
    what.add_argument("--engines", action="store_true", help="real workers against virtual time, told what they take")
    what.add_argument("--page", action="store_true", help="write the page from the runs that are there")
    how = made.add_argument_group("how")
    how.add_argument("--engine", choices=(VIRTUAL, "local", RAY), default=VIRTUAL)
    how.add_argument(
        "--servers",
        action="append",
        default=[],
        type=_positive,
        metavar="N",
        help="of A, with --engine ray; repeatable",
    )
    how.add_argument(
        "--other-cores",
        type=float,
        default=math.inf,
        metavar="C",
        help="with --servers: make runs again, once, in which other programs had more than C cores",
    )
    how.add_argument("--assume", default="defaults", metavar="TEXT", help='such as "combine=mean hold=false"')
    how.add_argument("--rounds", type=_positive, default=ROUNDS)
    how.add_argument("--image-rounds", type=_positive, metavar="N", help="of tables 1 and 2; as --rounds if not given")
    how.add_argument("--sensitivity-rounds", type=_positive, metavar="N", help="as --rounds where it is not given")
    how.add_argument("--workers", type=_positive, help="as assumed (25) where it is not given")
    how.add_argument("--seconds", type=float, default=100.0, help="of a run")
    how.add_argument("--points", type=_positive, metavar="N", help="evaluations of a run on local or ray")
    how.add_argument("--engines-rounds", type=_positive, default=engines.ROUNDS, metavar="N")
    how.add_argument("--engines-seconds", type=float, default=engines.SECONDS, metavar="S", help="of a run on engines")
    how.add_argument("--processes", type=_positive, default=len(os.sched_getaffinity(0)), help="one where time is real")
    where = made.add_argument_group("where")
    where.add_argument("--data", type=Path, help="a folder with mnist/ and cifar10/ in it")
    for name in SETS:
        where.add_argument(f"--{name}", type=Path, help=f"the folder of {name} alone")
    where.add_argument("--cache", type=Path, default=Path("runs/smooth_switch"))
    where.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    return made


def _choices(numbers: Iterable[int]) -> list[str]:
    return [*map(str, numbers), "all"]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1; write 1 or more")
    return value


def chosen(said: Sequence[str], known: Iterable[int]) -> list[int]:
    """The numbers that were asked for, each once, in order.

    >>> chosen(["4", "3", "4"], (1, 2, 3, 4)), chosen(["all"], (1, 2))
    ([3, 4], [1, 2])
    """
    return [number for number in known if "all" in said or str(number) in said]


def folders(said: argparse.Namespace) -> dict[str, Path]:
    """Where the image sets lie, of those whose folder is known."""
    found: dict[str, Path] = {}
    for name in SETS:
        own: Path | None = getattr(said, name)
        if own is not None and not own.is_dir():
            raise InputError(f"--{name} {own}: there is no such folder; write the one with the files of {name}.")
        path = own or (said.data / name if said.data else None)
        if path is not None and path.is_dir():
            found[name] = path
    return found


def assumed(said: argparse.Namespace) -> Assumptions:
    """What ``--assume`` and ``--workers`` say."""
    names = sorted(field.name for field in fields(Assumptions))
    for word in said.assume.split():
        if said.assume != "defaults" and not any(word.startswith(f"{name}=") for name in names):
            raise InputError(f"--assume: {word!r} is no assumption; write name=value with one of: {', '.join(names)}.")
    made = Assumptions.parse(said.assume)
    workers = said.workers or made.workers
    return replace(made, workers=workers, cap=min(made.cap, workers))


def make(store: Store, cells: Sequence[Cell], data: dict[str, Path], processes: int) -> None:
    """Make what is missing, one by one where time is real; refuse first where the data for it are."""
    needed = {cell.dataset for cell in cells if not store.known(cell)}.intersection(SETS)
    for name in sorted(needed - set(data)):
        raise InputError(
            f"runs on {name} are to be made, but its files are not there; write --data DIR, with DIR/{name} in it, "
            f"or --{name} DIR."
        )
    store.make([cell for cell in cells if cell.engine == VIRTUAL], processes)
    for engine in dict.fromkeys(cell.engine for cell in cells if cell.engine != VIRTUAL):
        store.make_in_turn([cell for cell in cells if cell.engine == engine], engine)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make what was asked for; returns the exit status."""
    said = parser().parse_args(arguments)
    try:
        work(said)
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped. What is complete is kept: the same command goes on from there.", file=sys.stderr)
        return STOPPED
    return 0


def work(said: argparse.Namespace) -> None:
    """Runs first, then what is written from them."""
    runs = (said.table, said.figure, said.sensitivity, said.regimes, said.engines)
    if not any((*runs, said.measure, said.fit_server, said.page)):
        raise InputError(
            "nothing was asked for; write --table all, --figure 8, --sensitivity, --regimes, --measure or --page."
        )
    refuse(said)
    data = folders(said)
    if said.measure:
        measured.write(gradient_s=measured.measure(data))
    if said.fit_server:
        fit_servers(said)
    store = Store(said.cache, data)
    study = Study(
        store,
        assumed(said),
        said.rounds,
        said.engine,
        said.seconds,
        image_rounds=said.image_rounds,
        points=said.points,
    )
    if said.servers:
        compare_servers(said, study, data)
        return
    if said.engines:
        compare_engines(said, study.store)
    defaults = Study(study.store, rounds=said.sensitivity_rounds or said.rounds, seconds=said.seconds)
    make(study.store, wanted(said, study, defaults), data, said.processes)
    write(said, study, defaults)


def refuse(said: argparse.Namespace) -> None:
    """Refuse options that mean nothing beside the others."""
    if said.servers and said.engine != RAY:
        raise InputError(
            f"--servers {said.servers[0]}: the {said.engine} engine has no servers to choose; write --engine {RAY} too."
        )
    if said.servers and not said.table:
        raise InputError(f"--servers {said.servers[0]} is for tables alone; write --table 1 too.")
    if said.other_cores < math.inf and not said.servers:
        raise InputError(f"--other-cores {said.other_cores:g} is for runs with --servers N alone; write that too.")
    if said.points and said.engine == VIRTUAL:
        raise InputError(f"--points {said.points}: virtual time has the tables' own; write --engine {RAY} or leave it.")


def compare_servers(said: argparse.Namespace, study: Study, data: dict[str, Path]) -> None:
    """Tables with each number of servers, in turn, and their sheet."""
    tables = [TABLES[number] for number in chosen(said.table, TABLES)]
    studies = [replace(study, servers=servers) for servers in sorted({*said.servers})]
    cells = list(ray_servers.in_turn(studies, tables))
    make(study.store, cells, data, said.processes)
    study.store.forget(ray_servers.disturbed(studies, tables, said.other_cores))
    make(study.store, cells, data, said.processes)
    path = folder(said, study) / ray_servers.SHEET
    sheets.write(path, list(ray_servers.rows(studies, tables, said.other_cores)))
    print(path)


def fit_servers(said: argparse.Namespace) -> None:
    """Time the servers of the engines: the points into a CSV file, the lines through them into measured.json."""
    points = list(server_time.measure())
    sheets.write(said.out / server_time.SHEET, [point.row() for point in points])
    lines = {name: server_time.told(server_time.medians(points, name)) for name in server_time.ENGINES}
    measured.write(**lines)


def compare_engines(said: argparse.Namespace, store: Store) -> None:
    """Real workers first, then virtual time with what they measured."""
    known = measured.read()
    if missing := [name for name in server_time.ENGINES if name not in known]:
        raise InputError(f"the server's time of {', '.join(missing)} has not been measured; write --fit-server too.")
    servers = {name: server_time.kept(known, name) for name in server_time.ENGINES}
    rounds = list(engines.real_rounds(servers, said.engines_rounds, said.engines_seconds))
    store.make([cell for one in rounds for cell in one.cells.values()], said.processes)
    sheets.write(said.out / engines.SHEET, list(engines.rows(rounds, store)))


def wanted(said: argparse.Namespace, study: Study, defaults: Study) -> list[Cell]:
    """The runs behind what was asked for."""
    cells = [cell for number in chosen(said.table, TABLES) for cell in study.needed(TABLES[number].configurations)]
    for number in chosen(said.figure, FIGURES):
        cells += study.needed(figures.configurations(number))
    if said.sensitivity:
        cells += sensitivity.needed(defaults, sensitivity.variations(measured.read()))
    if said.regimes:
        cells += map_page.needed(map_page.groups(measured.read()["gradient_s"]), said.rounds)
    return cells


def write(said: argparse.Namespace, study: Study, defaults: Study) -> None:
    """CSV files and figures that were asked for, and the page; the page is about virtual time."""
    out = folder(said, study)
    for number in chosen(said.table, TABLES):
        sheets.write_table(study, TABLES[number], out)
    for number in chosen(said.figure, FIGURES):
        figures.draw(study, number, out)
    if study.engine != VIRTUAL:
        print(out)
        return
    known = measured.read()
    rounds = said.rounds if said.regimes else map_page.rounds_kept(out) if said.page else None
    if rounds is not None:
        print(map_page.write(study.store, known["gradient_s"], rounds, out))
    effects = sensitivity.effects(defaults, sensitivity.variations(known))
    if effects:
        sheets.write(out / "sensitivity.csv", [effect.row() for effect in effects])
    print(page.write(page.Sources(study, effects, defaults.rounds, known, out)))


def folder(said: argparse.Namespace, study: Study) -> Path:
    """Where results lie: those of another engine, and of other assumptions than the defaults, beneath."""
    real = study.engine != VIRTUAL
    name = str(Assumptions.parse(said.assume) if real else study.assumptions)
    out: Path = said.out / study.engine if real else said.out
    return out if name == "defaults" else out / name.replace(" ", "_")


if __name__ == "__main__":
    sys.exit(main())
