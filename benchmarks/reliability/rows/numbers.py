"""R9: numbers that are not finite, and a rank whose parameters are silently others."""

import random
import re
from typing import Any

from injector import inject, torchrun, trainee, undisturbed

from rows.contract import Outcome, row

STEPS, INTERVAL = 260, 100
RANKS: dict[str, Any] = {"launcher": torchrun(4), "engine": "distributed:gloo", "strategy": "replicas=4"}
LOCAL: dict[str, Any] = {"strategy": "replicas=4"}


@row("nan", trials=100)
def not_finite(trials: int) -> Outcome:
    """R9: NaN in one replica's batch, and so in its gradient; in turn local and torchrun, stop and skip."""
    outcome = Outcome(
        "R9",
        "NaN in the batch of 1 of 4 replicas; local, torchrun; on_nonfinite=stop, skip",
        "no update with it on any rank; stop: one error with replica and step; skip: discarded on all",
    )
    draw = random.Random(9)
    for i in range(trials):
        replica, step, skip = draw.randrange(4), draw.randrange(3, 20), i // 2 % 2 == 1
        given = dict(RANKS if i % 2 else LOCAL, steps=25, on_nonfinite="skip" if skip else "stop")
        with trainee(**given, hold={"point": "nan", "replica": replica, "step": step}) as run:
            inject(f"NaN at step {step} of", replica)
            ended = run.ends()
            results, said = run.all_printed(), run.stderr()
        named = re.search(rf"the Δ of replica {replica} at its step {step} is not finite", said) is not None
        if ended is None:
            outcome.trial("it hangs", named=named, said=said)
        elif skip:
            same = len({each["parameters"] for each in results}) == 1
            good = same and all(each["finite"] and each["nonfinite"] == 1 for each in results)
            outcome.trial(None if good else f"{i}: not skipped alike on all ranks: {results}")
        else:
            failed = run.process.returncode != 0 and not results
            outcome.trial(None if failed and named else f"{i}: it was not refused", named=named, said=said)
    return outcome


@row("flip", trials=100)
def flipped_weight(trials: int) -> Outcome:
    """R9: one bit of one weight on one rank; found at the next comparison of digests."""
    outcome = Outcome(
        "R9",
        "1 bit of a weight flipped on 1 of 4 ranks under torchrun",
        f"found within {INTERVAL} updates, the rank named, unless rounding has undone it: then all bits as without",
    )
    draw, after, undone = random.Random(10), list[int](), 0
    whole = undisturbed(**RANKS, steps=STEPS, pause_s=0.0)["parameters"]
    for i in range(trials):
        replica, step = draw.randrange(4), draw.randrange(5, STEPS - INTERVAL - 5)
        hold = {"point": "flip", "replica": replica, "step": step}
        with trainee(**RANKS, steps=STEPS, pause_s=0.0, hold=hold) as run:
            inject(f"bit flipped at step {step} of", replica)
            ended = run.ends()
            ends, said = [each["parameters"] for each in run.all_printed()], run.stderr()
        if ends == [whole] * 4:
            undone += 1
            outcome.trial(None)
            continue
        found = re.search(r"after update (\d+), ranks? ([\d, ]+) has other parameters", said)
        named = found is not None and found[2] == str(replica)
        update = int(found[1]) if found else None
        good = ended is not None and run.process.returncode != 0 and update is not None and update - step <= INTERVAL
        outcome.trial(None if good and named else f"{i}: flipped at {step}: {said[-200:]}", named=named, said=said)
        if update is not None:
            after.append(update - step)
    outcome.figures |= {"updates_until_found_most": max(after, default=0), "undone_by_rounding": undone}
    return outcome
