"""Replicas of several ranks that step by themselves: what virtual time says, parameter by parameter."""

from pathlib import Path

import pytest
import torch

from tests.engine.distributed_cases import kept
from tests.engine.local_steps_cases import CASES, RANKS
from tests.ranks import Play, cases_of

ROUNDING = 1e-12
"""Both sides add the same products in another order."""

NORMALISED = 1e-9
"""AdamW divides a gradient by its own size, which makes its relative error that of A, also where it is nearly zero."""


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, play: Play) -> Path:
    """Where four ranks left what they came to."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("distributed_local_steps_script.py")
    play(script, cases_of(request), size=RANKS, folder=folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_ranks_do_what_virtual_time_says(folder: Path, name: str) -> None:
    virtual = CASES[name].run("virtual")
    bound = NORMALISED if CASES[name].program.clip_norm is not None else ROUNDING
    for state, updates, loss in kept(folder, name, RANKS):
        assert updates == virtual.summary["updates"]
        assert loss == pytest.approx(virtual.summary["train_loss"], abs=bound)
        for tensor, value in virtual.state.items():
            torch.testing.assert_close(
                state[tensor], value, rtol=0, atol=bound, msg=lambda said, n=tensor: f"{n}: {said}"
            )
