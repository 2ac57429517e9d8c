"""Where A lives: engines that run any replica under any policy, one folder each.

Importing this package imports no engine: :data:`ENGINES` finds their folders, and imports one when it is opened.
"""

from paceline.core.registry import Family, modules_in_folders

# Every engine by name: each folder that has an engine.py.
ENGINES = Family("engine", values=False, modules=modules_in_folders(__name__, "engine"))
