"""Write README.md from results/."""

import json
from pathlib import Path
from typing import Any

from kit.machine import described
from kit.words import grid

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"

HEAD = """# Reliability

Real processes are killed, stopped, or have their disk filled and their files damaged, by an injector outside of them;
what comes of it is compared with a run that nothing happened to, by the SHA-256 of all parameters.

    python benchmarks/reliability/measure.py --keep             # all rows, about an hour
    python benchmarks/reliability/measure.py kill --share 0.1   # a tenth of one row's trials; writes nothing

The trainee is an MLP 784-256-10 with dropout under Adam, batch 32 per replica, one thread for each process. A trial
fails where any of the numbers to pass is missed; nothing is tried again. With k failures in n trials the upper bound of
the rate is that of Clopper and Pearson at 95 %, one-sided. "Back" is the time from the signal to the first step of the
worker that has taken the place of the one that was hit.

"""


def bound(failures: int, trials: int) -> float:
    """Return the one-sided upper bound of a failure rate at 95 %, by bisection on the binomial distribution.

    >>> round(bound(0, 100), 4), round(bound(1, 100), 4)
    (0.0295, 0.0466)
    """
    from math import comb

    low, high = failures / trials if trials else 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        below = sum(comb(trials, i) * middle**i * (1 - middle) ** (trials - i) for i in range(failures + 1))
        low, high = (middle, high) if below > 0.05 else (low, middle)
    return high


def write_page() -> None:
    """Write the page."""
    found: list[dict[str, Any]] = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json")]
    found.sort(key=lambda each: (int(each["row"][1:]), each["title"]))
    rows = []
    for each in found:
        figures = ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in each["figures"].items())
        k, n = len(each["failures"]), each["trials"]
        many = f"≤ {bound(k, n):.1%}" if n > 1 else "—"
        rows.append((each["row"], each["title"], each["passes"], n, k, many, figures))
    table = grid(("row", "what is done", "numbers to pass", "n", "failed", "rate at 95 %", "measured"), rows)
    loads = ", ".join(sorted({f"{each['load']:g}" for each in found}))
    machines = described([each["machine"] for each in found])
    text = f"{HEAD}{table}\n\nMachine: {machines}. Load average before each row: {loads}.\n"
    (HERE / "README.md").write_text(text, encoding="utf-8")
