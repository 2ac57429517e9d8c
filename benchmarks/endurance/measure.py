"""What must hold for as long as a run lasts: no growth of memory, no lost update (growth); no mixed version (reads)."""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import checker
from memory import Sampler, quarters

from paceline import Run, WorkerError, train
from paceline.core.records import Account
from paceline.datasets import load_program
from paceline.engine.base import Engine, Job, Outcome, Watcher
from paceline.engine.local.engine import LocalEngine

SMALL, LARGE = 4096, 2**20
"""Parameters of the checker model."""

LARGE_SHARE = 50
"""The large model is read so many times less often."""


class Accounting(Engine):
    """A local engine that keeps the account of its last run, which has the steps of each worker."""

    name = "local"
    account: Account

    def __init__(self) -> None:
        self._inner = LocalEngine()

    def refuse(self, job: Job) -> None:
        self._inner.refuse(job)

    def run(self, job: Job, watch: Watcher) -> Outcome:
        outcome = self._inner.run(job, watch)
        self.account = outcome.account
        return outcome

    def close(self) -> None:
        self._inner.close()


def growth(minutes: float, workers: int, every_s: float, steps: int) -> bool:
    """Print how much memory there was and what was counted; returns whether the counts agree."""
    program, strategy = load_program("synthetic"), f"replicas={workers} threads=1 aggregation=asynchronous"
    engine = Accounting()
    with engine, tempfile.TemporaryDirectory() as made:
        out = Path(made) / "run"
        print(f"`synthetic`, {workers} asynchronous workers, {minutes:g} minutes\n")
        with Sampler(out, every_s) as sampler:
            train(program, strategy, engine=engine, seconds=60 * minutes, out=out, progress=False)
        timed = engine.account
        tell_memory(sampler)
        train(program, strategy, engine=engine, steps=steps, progress=False)
        return tell_counts(timed, engine.account, workers, steps)


def tell_memory(sampler: Sampler) -> None:
    """Print the first and the last quarter."""
    if not sampler.samples:
        raise SystemExit("no look at the memory in the whole run; write more --minutes or a smaller --every")
    print(f"| MiB, medians of {len(sampler.samples) // 4} samples | first quarter | last quarter | growth |")
    print("|---|---|---|---|")
    for name, (first, last) in quarters(sampler.samples).items():
        print(
            f"| {name.replace('_', ', ')} | {first:.1f} | {last:.1f} | {last - first:+.1f} ({last / first - 1:+.1%}) |"
        )


def tell_counts(timed: Account, counted: Account, workers: int, steps: int) -> bool:
    """Print the counts of both runs, and what must hold of them."""
    print("\n| budget | updates | applied | discarded | gradients | Σ worker steps |\n|---|---|---|---|---|---|")
    for budget, a in ((f"{timed.seconds:.0f} s", timed), (f"{steps} steps each", counted)):
        numbers = (a.updates, a.applied, a.discarded, a.gradients, worked(a))
        print(f"| {budget} | {' | '.join(f'{n:,}' for n in numbers)} |")
    print()
    # When time is up each worker may be at a step, which it still counts and which is never applied.
    under_way = worked(timed) - timed.gradients
    return all(
        [
            holds("in both, updates = applied", all(a.updates == a.applied for a in (timed, counted))),
            holds(
                "in both, gradients = applied + discarded",
                all(a.gradients == a.applied + a.discarded for a in (timed, counted)),
            ),
            holds(f"timed: {under_way} steps were under way at the end, 0 to {workers}", 0 <= under_way <= workers),
            holds(
                f"counted: {workers} · {steps} = Σ worker steps = gradients = applied",
                workers * steps == worked(counted) == counted.gradients == counted.applied,
            ),
        ]
    )


def worked(account: Account) -> int:
    """Steps that the workers say they have made."""
    return sum(worker.steps for worker in account.workers)


def holds(rule: str, true: bool) -> bool:
    """Print whether a rule holds."""
    print(f"- {rule}: {'holds' if true else 'BROKEN'}", flush=True)
    return true


def reads(least: int, counts: Sequence[int], *, provoke: bool) -> bool:
    """Print how many reads were mixed; returns whether that is as it should be."""
    policy = "hogwild" if provoke else "asynchronous"
    print(
        f"`{policy}`\n\n| workers | parameters | reads | mixed | updates | the last A says |\n|---|---|---|---|---|---|"
    )
    fine = True
    with LocalEngine() as engine:
        for parameters, wanted in ((SMALL, least), (LARGE, least // LARGE_SHARE)):
            for workers in counts:
                fine &= _read(engine, policy, workers, parameters, wanted)
    return fine


def _read(engine: Engine, policy: str, workers: int, parameters: int, wanted: int) -> bool:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        program = checker.make_program(parameters, folder, stop=policy != "hogwild")
        steps = -(-wanted // workers)
        strategy = f"replicas={workers} threads=1 aggregation={policy}"
        failed, said = "", " | "
        try:
            run = train(program, strategy, engine=engine, steps=steps, evaluate_every=steps, progress=False)
            said = f"{run.summary['updates']:,} | {_last(run)}"
        except WorkerError as error:
            failed = str(error).partition("\n")[0]
        seen, mixed = checker.counted(folder)
    print(f"| {workers} | {parameters:,} | {seen:,} | {mixed:,} | {said} |", flush=True)
    if failed:
        print(f"\n{failed}")
    if policy == "hogwild":
        return mixed > 0
    return mixed == 0 and not failed and seen == workers * steps == run.summary["updates"] == -_least(run)


def _least(run: Run) -> float:
    return min(float(tensor.min()) for tensor in run.state.values())


def _last(run: Run) -> str:
    low, high = _least(run), max(float(tensor.max()) for tensor in run.state.values())
    return f"{-high:,.0f}" if low == high else f"{-high:,.0f} to {-low:,.0f}"


def main() -> None:
    """Run what the command line names; fail where something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    lasting = commands.add_parser("growth", help="memory and counts of one long asynchronous run")
    lasting.add_argument("--minutes", type=float, default=10.0)
    lasting.add_argument("--workers", type=int, default=25)
    lasting.add_argument("--every", type=float, default=5.0, help="seconds between two looks at the memory")
    lasting.add_argument("--steps", type=int, default=2000, help="of each worker in the run that is counted exactly")
    mixed = commands.add_parser("reads", help="a model that looks whether the version it reads is whole")
    mixed.add_argument("--reads", type=int, default=1_000_000, help=f"of {SMALL} parameters, at least")
    mixed.add_argument("--workers", type=int, nargs="+", default=[8, 25])
    mixed.add_argument("--provoke", action="store_true", help="under hogwild, where mixed reads must be seen")
    said = parser.parse_args()
    if said.command == "growth":
        fine = growth(said.minutes, said.workers, said.every, said.steps)
    else:
        fine = reads(said.reads, said.workers, provoke=said.provoke)
    if not fine:
        raise SystemExit("what must hold does not: see above")


if __name__ == "__main__":
    main()
