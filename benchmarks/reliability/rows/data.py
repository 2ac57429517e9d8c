"""R18: which samples committed steps have used, after kills."""

import random
import signal
import time
from collections import Counter
from typing import Any

from injector import Trainee, inject, shared_settings, trainee, undisturbed

from rows.contract import Outcome, row
from rows.workers import ending

EPOCHS, KILLS = 3, 20


@row("samples", trials=5)
def each_sample_once(trials: int) -> Outcome:
    """R18: kills over three epochs, on_death=replace; each trial is a seed."""
    title = f"{KILLS} SIGKILLs over {EPOCHS} epochs, 4 workers, on_death=replace"
    passes = f"{USED}; all bits and the accuracy as without kills"
    return _kills(Outcome("R18", title, passes), trials, "replace")


@row("samples-continue", trials=5)
def each_sample_once_with_fewer(trials: int) -> Outcome:
    """R18: replicas that die and are not replaced: what they had not used is handed on.

    Updates of fewer replicas are means of fewer samples, and there are more of them: other training, whose accuracy is
    shown, and judged by nothing.
    """
    return _kills(
        Outcome("R18", f"3 of 4 workers killed over {EPOCHS} epochs, on_death=continue", USED), trials, "continue"
    )


USED = "each sample in as many committed steps as epochs"


def _kills(outcome: Outcome, trials: int, on_death: str) -> Outcome:
    given: dict[str, Any] = {"strategy": "replicas=4", "epochs": EPOCHS, "on_death": on_death, "indices": True}
    given |= {"pause_s": 0.02, "steps": None}
    whole, accuracies = undisturbed(**given), list[float]()
    kills = KILLS if on_death == "replace" else 3
    for seed in range(trials):
        draw, hit = random.Random(seed), dict[int, int]()
        with trainee(**given) as run:
            began = run.wait_for_step() or 0.0
            for i in range(kills):
                # All over the run; what is left of it grows as it waits for replacements.
                time.sleep(max(0.0, began + (i + draw.random()) * whole["seconds"] / kills - time.monotonic()))
                rows = [each for each in run.workers() if each["pid"] not in hit]
                if run.process.poll() is not None or not rows:
                    break
                target = draw.choice(rows)
                try:
                    inject(signal.SIGKILL, target["pid"])
                    hit[target["pid"]] = target["replica"]
                except ProcessLookupError:
                    continue
            result = run.result()
            wrong = _wrongly_used(run, whole["samples"])
        failure = None if result is not None else "the run did not end well"
        if result is not None and on_death == "replace":
            failure = ending(result, whole, run)
        if result is not None:
            accuracies.append(result["accuracy"])
            judged = on_death == "replace" and shared_settings["data"]
            if judged and abs(result["accuracy"] - whole["accuracy"]) > 0.002:
                failure = failure or f"accuracy {result['accuracy']:.4f} instead of {whole['accuracy']:.4f}"
        failure = f"{wrong} after {len(hit)} kills" if wrong else failure
        left = [] if result is None else result["left"]
        outcome.trial(failure, named=sum("SIGKILL" in text for text in left) >= len(hit), said=str(left))
    outcome.figures |= {"accuracy_without": whole["accuracy"], "accuracy_least": min(accuracies, default=0.0)}
    return outcome


def _wrongly_used(run: Trainee, samples: int) -> str | None:
    """Return how many samples committed steps did not use once an epoch; None: all were.

    Lines are ``begun`` or ``done``, process, step, indices. A step whose end was not noted by the one that was
    killed in it was committed, or was not: its samples may count or not.
    """
    begun, done = dict[tuple[str, str], tuple[int, ...]](), dict[tuple[str, str], tuple[int, ...]]()
    for line in (run.folder / "indices").read_text().splitlines():
        kind, pid, step, *indices = line.split()
        (begun if kind == "begun" else done)[pid, step] = tuple(map(int, indices))
    committed = Counter(i for own in done.values() for i in own)
    unsure = Counter(i for key, own in begun.items() if key not in done for i in own)
    wrong = [i for i in range(samples) if not committed[i] <= EPOCHS <= committed[i] + unsure[i]]
    often = Counter(committed[i] for i in wrong)
    return f"{len(wrong)} of {samples} samples: {dict(often)} times" if wrong else None
