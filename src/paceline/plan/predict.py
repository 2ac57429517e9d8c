"""``python -m paceline.plan.predict FILE.csv --calibrate FILE.csv``: see :mod:`paceline.planner.predict`."""

import sys

from paceline.planner.predict import main

if __name__ == "__main__":
    sys.exit(main())
