"""What a script sets in torch for its process reaches Ray's actors, which the next run sets anew."""

import pytest
import torch

from paceline.engine.ray.engine import RayEngine
from paceline.engine.torch_settings import TorchSettings
from tests.engine import own_loops
from tests.engine import torch_settings_cases as cases

pytest.importorskip("ray", reason="needs Ray: pip install 'paceline[ray]'")


def test_actors(engine: RayEngine) -> None:
    cases.check(engine)
    assert TorchSettings().default_dtype == torch.float32
    kept = own_loops.LogKeeper()
    program = own_loops.program()
    cases.launch(cases.loop, program, "replicas=2", engine=engine, steps=2, callbacks=[kept], progress=False)
    assert {values["bits"] for _, _, values in kept.logged} == {32.0}
