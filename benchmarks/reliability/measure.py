"""Run rows of the scorecard, one after the other; keep what came of each in results/ and write the page anew."""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.machine import machine
from page import RESULTS, write_page
from rows import ROWS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", default=list(ROWS), help=f"of {', '.join(ROWS)}; all if none is given")
    parser.add_argument("--share", type=float, default=1.0, help="of the trials, 0.1 for a tenth")
    parser.add_argument("--keep", action="store_true", help="write results/ and the page")
    options = parser.parse_args()
    failed = False
    for name in options.rows:
        row, trials = ROWS[name]
        load = os.getloadavg()[0]
        outcome = row(max(1, round(trials * options.share)))
        failed |= bool(outcome.failures)
        told = f"{outcome.trials} trials, {len(outcome.failures)} failed {outcome.failures[:3]} {outcome.figures}"
        print(f"{outcome.row} {outcome.title}: {told}", flush=True)
        if options.keep:
            RESULTS.mkdir(exist_ok=True)
            kept = asdict(outcome) | {"load": round(load, 2), "machine": machine()}
            (RESULTS / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            write_page()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
