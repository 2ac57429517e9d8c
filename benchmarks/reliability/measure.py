"""Run rows of the scorecard, one after the other; keep what came of each in results/ and write the page anew."""

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import injector
from kit.machine import machine
from page import RESULTS, write_page
from rows import ROWS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(ROWS)}; all if none is given")
    parser.add_argument("--share", type=float, default=1.0, help="of the trials, 0.1 for a tenth")
    parser.add_argument("--keep", action="store_true", help="write results/ and the page")
    parser.add_argument("--data", help="folder that has mnist, cifar10, tinyshakespeare; random data if not given")
    parser.add_argument("--part", choices=("row", "others", "both"), default="both", help="the row, the comparators")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has torchft and Ray Train")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing that was started or mounted stays
    injector.other_python = options.python
    injector.shared_settings["data"] = options.data
    failed = False
    for name in options.rows or list(ROWS):
        path = RESULTS / f"{name}.json"
        kept = json.loads(path.read_text(encoding="utf-8")) if options.keep and path.exists() else {}
        injector.injections.clear()
        if options.part != "others":
            failed |= _row(name, options.share, kept)
        if options.part != "row":
            _others(name, options.share, kept)
        if options.keep:
            RESULTS.mkdir(exist_ok=True)
            path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            log = "".join(f"{line}\n" for line in injector.injections)
            (RESULTS / f"{name}.log").write_text(log, encoding="utf-8")
            write_page()
    sys.exit(1 if failed else 0)


def _row(name: str, share: float, kept: dict[str, object]) -> bool:
    """Run a row; put what came of it into ``kept``; return whether a trial failed."""
    row, load, began = ROWS[name], os.getloadavg()[0], time.monotonic()
    outcome = row.run(max(1, round(row.trials * share)))
    took = time.monotonic() - began
    told = f"{outcome.trials} trials in {took:.0f} s, {len(outcome.failures)} failed {outcome.failures[:3]}"
    unnamed = f", unnamed {outcome.unnamed[:3]}" if outcome.unnamed else ""
    print(f"{outcome.row} {outcome.title}: {told} {outcome.figures}{unnamed}", flush=True)
    kept |= asdict(outcome)
    kept |= {"stated": row.stated, "load": round(load, 2), "seconds": round(took), "machine": machine()}
    return bool(outcome.failures)


def _others(name: str, share: float, kept: dict[str, object]) -> None:
    """Run the comparators of a row; put what they did into ``kept``."""
    observed = {}
    for other, (run, trials) in ROWS[name].others.items():
        seen = run(max(1, round(trials * share)))
        print(f"  {other}: {seen.trials} trials: {seen.told} {seen.figures}", flush=True)
        observed[other] = asdict(seen)
    kept["others"] = observed


if __name__ == "__main__":
    main()
