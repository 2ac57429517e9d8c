"""The rows of the scorecard, a file for each subject; every file of this folder is imported."""

import importlib
import pkgutil

from rows.contract import ROWS, Outcome, Row

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["ROWS", "Outcome", "Row"]
