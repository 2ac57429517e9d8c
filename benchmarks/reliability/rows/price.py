"""R20: what fault tolerance costs where nothing fails."""

import tempfile
from statistics import median
from typing import Any

from injector import undisturbed

from rows.contract import Outcome, row


@row("price", trials=9)
def price(pairs: int) -> Outcome:
    """R20: steps with checkpoints every second and on_death=replace beside steps without; alternating."""
    outcome = Outcome(
        "R20", "all of it on, nothing failing, beside all of it off; alternating", "median step at most 3 % longer"
    )
    ratios: list[float] = []
    given: dict[str, Any] = {"strategy": "replicas=2", "steps": 1500, "pause_s": 0.0}
    for _ in range(pairs):
        with tempfile.TemporaryDirectory(prefix="paceline-reliability-") as name:
            on = {"checkpoint": f"{name}/ckpt", "checkpoint_every": "1 s", "on_death": "replace"}
            ratios.append(undisturbed(**given, **on)["seconds"] / undisturbed(**given)["seconds"])
    outcome.trial(None if median(ratios) <= 1.03 else f"median ratio {median(ratios):.3f}")
    outcome.figures |= {"median_ratio": median(ratios), "least": min(ratios), "most": max(ratios), "pairs": pairs}
    return outcome
