"""``python -m paceline.plan.predict FILE.csv --calibrate FILE.csv``: see :mod:`paceline.planner.row_prediction`."""

import sys

from paceline.planner.row_prediction import main

if __name__ == "__main__":
    sys.exit(main())
