"""How an update combines Δs where that is no weighted sum. Importing it imports no torch.

Every file of this folder is imported, so a reducer is added by adding its file.
"""

import importlib
import pkgutil

from paceline.reduction.base import Reducer, Reduction

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")

__all__ = ["Reducer", "Reduction"]
