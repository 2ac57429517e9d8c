"""Rules, a family of operators a file. Every file of this folder is imported, so a rule is added by its file alone."""

import importlib
import pkgutil

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
