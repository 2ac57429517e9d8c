"""Runs a ported example with another strategy and settings: with_strategy.py example.py strategy settings words…"""

import functools
import json
import runpy
import sys


def main() -> None:
    _, path, strategy, settings, *words = sys.argv
    example, options = runpy.run_path(path), json.loads(settings)
    names = example["main"].__globals__
    if "Trainer" in names:
        names["Trainer"] = functools.partial(names["Trainer"], strategy=strategy, settings=options)
    else:
        names["PacelineStrategy"] = functools.partial(names["PacelineStrategy"], strategy, **options)
    sys.argv = [path, *words]
    names["main"]()


if __name__ == "__main__":
    main()
