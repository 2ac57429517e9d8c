"""How gradients are made smaller on their way through an all-reduce.

Every file of this folder is imported, so what it carries out is found by :func:`parse`.
"""

import importlib
import pkgutil

from paceline.comm.compression.base import Compression, parse

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")

__all__ = ["Compression", "parse"]
