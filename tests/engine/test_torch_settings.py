"""What a script sets in torch for its process reaches the processes of its runs, and a later run's others."""

import pytest
import torch

import paceline
from paceline.engine.local.engine import LocalEngine
from tests.engine import torch_settings_cases as cases


@pytest.mark.parametrize("strategy", ["replicas=2", "replicas=2 stages=2"])
def test_processes_of_the_local_engine(strategy: str) -> None:
    with LocalEngine() as engine:
        cases.check(engine, strategy)
        run = paceline.train(float_program(), "replicas=2", engine=engine, steps=1, progress=False)
    assert {tensor.dtype for tensor in run.state.values()} == {torch.float32}


def float_program() -> paceline.Program:
    program = cases.program()
    inputs, targets = program.train
    return paceline.Program(
        model=cases.model, loss=program.loss, optimizer=program.optimizer, train=(inputs.float(), targets)
    )


def test_processes_of_a_predictor() -> None:
    with cases.changed():
        program = cases.program()
        inputs = program.train[0][:8]
        with paceline.predictor(program, "stages=2") as ask:
            output = ask(inputs)
        assert output.dtype == torch.float64
        torch.testing.assert_close(output, program.build()(inputs), rtol=0, atol=cases.ROUNDING)
