"""Save a run in each split, and go on from it in each other one.

    python benchmarks/resharding/measure.py                    # all, half an hour; what is kept is not done again
    python benchmarks/resharding/measure.py --sizes 1 2        # only splits of these numbers of workers
    python benchmarks/resharding/measure.py --page             # write README.md from what is kept

The runs that are cut are saved anew each time, in a temporary folder.
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from forms import ALONE, BATCH, OPTIMIZERS, SAMPLES, SAVED_AT, SIZES, SPLITS, STEPS, TOLERANCE, Split
from kit.crew import crew
from kit.machine import machine
from kit.sheet import Sheet
from page import HERE, UNCUT, write_page
from ranks import Task, Trained, far_apart, uncut, work

# Forms go on as other forms from 8 workers on 3, and as themselves from any number on any.
ACROSS = (8, 3)


class Matrix:
    """Saves, reads and resumes under one optimizer; rows are kept as they come.

    Args:
        folder: of the checkpoints.
        out: folder of the sheets.
        splits: to save in, and to read into.
        optimizer: its name.
        dtype: of all parameters.
    """

    def __init__(self, folder: Path, out: Path, splits: Sequence[Split], optimizer: str, dtype: str) -> None:
        self._folder, self._splits, self._optimizer, self._dtype = folder, splits, optimizer, dtype
        self.read = Sheet(out / "read.csv", ("saved", "read", "optimizer"))
        self.resumed = Sheet(out / "resumed.csv", ("saved", "resumed", "optimizer", "dtype"))
        self._saved: dict[Split, Trained] = {}
        self.failures: list[str] = []

    def save(self) -> None:
        """Train all splits to the cut; A and the optimizer's state must be those of one process, but for rounding."""
        for split, _, result in _done([(split, self._task(split, split)) for split in self._splits]):
            self._saved[split] = result
            self._require(not result.differing, f"{split.strategy} saved {result.differing}")
        alone = Path(self._path(ALONE)) / f"step-{SAVED_AT}"
        for split in self._splits:
            far = far_apart(Path(self._path(split)) / f"step-{SAVED_AT}", alone)
            self._require(not far, f"{split.strategy} is not one process at the cut: {far}")

    def read_all(self) -> None:
        """Read each checkpoint into each split."""
        tasks = []
        for split in self._splits:
            missing = [s for s in self._splits if self.read.find(s.strategy, split.strategy, self._optimizer) is None]
            paths = tuple(f"{self._path(saved)}/step-{SAVED_AT}" for saved in missing)
            if missing:
                tasks.append((split, Task(split.strategy, self._optimizer, self._dtype, "", paths)))
        strategies = {self._path(split): split.strategy for split in self._splits}
        for split, _, results in _done(tasks):
            for each in results:
                saved = strategies[str(Path(each.folder).parent)]
                row = {"saved": saved, "read": split.strategy, "optimizer": self._optimizer}
                row |= {"tensors": each.tensors, "chunks": each.chunks, "differing": " ".join(each.differing)}
                self.read.put(row)
                self._require(not each.differing, str(row))

    def resume_all(self, pairs: Iterable[tuple[Split, Split]]) -> None:
        """Go on for 50 updates; losses must be those of one process that was not cut."""
        whole, kind = uncut(self._optimizer, self._dtype), (self._optimizer, self._dtype)
        missing = [(a, b) for a, b in pairs if self.resumed.find(a.strategy, b.strategy, *kind) is None]
        of_folder = {self._path(saved): saved for saved in self._splits}
        for split, task, result in _done([(split, self._task(saved, split)) for saved, split in missing]):
            saved = of_folder[task.folder]
            apart = [largest_apart(result.losses, whole, which) for which in (0, 1)]
            once = each_once([*self._saved[saved].taken, *result.taken])
            row = {"saved": saved.strategy, "resumed": split.strategy, "optimizer": kind[0], "dtype": kind[1]}
            row |= {"updates": len(result.losses), "of_train": f"{apart[0]:.3g}", "of_test": f"{apart[1]:.3g}"}
            self.resumed.put(row | {"each_sample_once": once} | machine())
            holds = max(apart) <= TOLERANCE[self._dtype] and once and len(result.losses) == STEPS
            self._require(holds, str(row))

    def train_uncut(self) -> None:
        """Train all splits without a cut, to see how far from one process that is."""
        whole, kind = uncut(self._optimizer, self._dtype), (self._optimizer, self._dtype)
        missing = [split for split in self._splits if self.resumed.find(UNCUT, split.strategy, *kind) is None]
        for split, _, result in _done([(split, Task(split.strategy, *kind, "")) for split in missing]):
            apart = [largest_apart(result.losses, whole, which) for which in (0, 1)]
            row = {"saved": UNCUT, "resumed": split.strategy, "optimizer": kind[0], "dtype": kind[1]}
            row |= {"updates": len(result.losses), "of_train": f"{apart[0]:.3g}", "of_test": f"{apart[1]:.3g}"}
            self.resumed.put(row | {"each_sample_once": each_once(result.taken)} | machine())

    def _task(self, saved: Split, split: Split) -> Task:
        return Task(split.strategy, self._optimizer, self._dtype, self._path(saved))

    def _path(self, split: Split) -> str:
        return str(self._folder / f"{split.strategy} {self._optimizer} {self._dtype}")

    def _require(self, holds: bool, sentence: str) -> None:
        if not holds:
            self.failures.append(sentence)
            print(f"DOES NOT HOLD: {sentence}", flush=True)


def _done(tasks: Sequence[tuple[Split, Task]]) -> Iterator[tuple[Split, Task, Any]]:
    """Do tasks, those of one number of workers on the same processes, and yield them with their results."""
    for workers in sorted({split.workers for split, _ in tasks}):
        numbered = [(i, task) for i, (split, task) in enumerate(tasks) if split.workers == workers]
        for number, result in crew(work, workers, numbered):
            yield *tasks[number], result
            print(f"{workers} workers: {tasks[number][1].strategy} {tasks[number][1].optimizer}", flush=True)


def largest_apart(losses: Sequence[tuple[float, float]], whole: Sequence[tuple[float, float]], which: int) -> float:
    """Return the largest relative deviation of a loss."""
    return max(abs(a[which] - b[which]) / abs(b[which]) for a, b in zip(losses, whole, strict=True))


def each_once(updates: Sequence[Sequence[int]]) -> bool:
    """Return whether each epoch's updates have each sample once; of the last epoch as far as it has come."""
    per_epoch = -(-SAMPLES // BATCH)
    for start in range(0, len(updates), per_epoch):
        numbers = sorted(number for update in updates[start : start + per_epoch] for number in update)
        whole = start + per_epoch <= len(updates)
        if len(set(numbers)) < len(numbers) or (whole and numbers != list(range(SAMPLES))):
            return False
    return True


def pairs_within(splits: Sequence[Split]) -> list[tuple[Split, Split]]:
    """Return the pairs of splits of one form, among which one process belongs to each.

    Of hybrids of the same size, which are several, one stands for its size where both are hybrids.
    """
    one_of = {(split.form, split.workers): split for split in splits}.values()
    every = itertools.product(splits, splits)
    return [
        (a, b) for a, b in every if ALONE in (a, b) or (a.form == b.form and (a == b or (a in one_of and b in one_of)))
    ]


def pairs_across(splits: Sequence[Split]) -> list[tuple[Split, Split]]:
    """Return a pair of each form with each other, the last split that is listed of each at two sizes."""
    before, after = ({s.form: s for s in splits if s.workers == size} for size in ACROSS)
    return [(a, b) for a, b in itertools.product(before.values(), after.values()) if a.form != b.form]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if options.page:
        write_page()
        return
    splits = [split for split in SPLITS if split.workers in options.sizes or split is ALONE]
    across, failures = pairs_across(splits), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for optimizer in OPTIMIZERS:
            matrix = Matrix(Path(folder), HERE / "results", splits, optimizer, "float64")
            matrix.save()
            matrix.read_all()
            matrix.resume_all(across + pairs_within(splits))
            failures += matrix.failures
        used = list(dict.fromkeys([ALONE, *itertools.chain(*across)]))
        matrix = Matrix(Path(folder), HERE / "results", used, "adamw", "float32")
        matrix.save()
        matrix.resume_all(across)
        matrix.train_uncut()
    write_page()
    sys.exit(1 if failures or matrix.failures else 0)


if __name__ == "__main__":
    main()
