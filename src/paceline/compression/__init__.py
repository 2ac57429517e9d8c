"""Compression of gradients on their way through an all-reduce. Importing it imports no torch.

Every file of this folder is imported, so a compression is added by adding its file.
"""

import importlib
import pkgutil

from paceline.compression.base import Compression, Stateless, canonical, gather_bytes, parse, ring_bytes

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")

__all__ = ["Compression", "Stateless", "canonical", "gather_bytes", "parse", "ring_bytes"]
