"""Published measurements that the planner is held to: files beside the project, not in it."""

import os
from pathlib import Path

import pytest

BESIDE = Path(__file__).parents[2].parent / "shared" / "data" / "planner"


@pytest.fixture(scope="session")
def planner_data() -> Path:
    """The folder of the published rows; PACELINE_PLANNER_DATA says where, else ``../shared/data/planner``."""
    folder = Path(os.environ.get("PACELINE_PLANNER_DATA", BESIDE))
    if not folder.is_dir():
        pytest.skip(f"no published rows at {folder}; set PACELINE_PLANNER_DATA to the folder that has calibration.csv")
    return folder
