"""An optimizer's state divided among replicas of stages and shards: what one process computes, and what each holds."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import pytest
import torch

from paceline import InputError, Run
from paceline.api.train import check
from paceline.core.mesh import Mesh
from paceline.engine.distributed.zero_partition import ZeroPartition
from paceline.engine.local.engine import LocalEngine
from paceline.engine.spmd.communicator import Communicator
from paceline.engine.spmd.rank_context import holders
from paceline.replica.flat_state import FlatLayout
from tests.engine import hybrid_cases
from tests.engine.divided_cases import CASES, held, whole_tensors
from tests.engine.pipeline_cases import ADAM
from tests.engine.test_hybrid_parity import ROUNDING, SCALED, assert_moved, compare


@pytest.fixture(scope="module")
def trained(engine: LocalEngine) -> Callable[[str], Run]:
    """Each case is trained once."""
    return functools.cache(lambda name: CASES[name].run(engine))


@pytest.mark.parametrize("name", CASES)
def test_it_equals_one_process(trained: Callable[[str], Run], name: str) -> None:
    case, run = CASES[name], trained(name)
    expected = case.one_process()
    assert run.model is not None
    assert expected.model is not None
    bound = SCALED if case.fields["optimizer"] is ADAM else ROUNDING
    compare(run.model.state_dict(), expected.model.state_dict(), bound)
    assert_moved(run.model.state_dict(), case.program().build().state_dict())
    assert run.summary["notes"]["shard_optimizer"] is ("shard_optimizer" in case.strategy)


@pytest.mark.parametrize("name", CASES)
def test_each_worker_holds_what_the_formulas_say(trained: Callable[[str], Run], name: str) -> None:
    """To the byte, what is saved for backward too: these layers save nothing that sizes don't tell."""
    formulas = CASES[name].expected()
    assert held(trained(name)) == {
        "parameter_bytes": [each.parameters for each in formulas],
        "optimizer_bytes": [each.optimizer for each in formulas],
        "peak_saved_bytes": [each.activations for each in formulas],
    }


def test_weights_that_stages_share_stay_one(engine: LocalEngine) -> None:
    case = hybrid_cases.CASES["tied"]
    run, expected = case.run("replicas=2 stages=2 shard_optimizer=true", engine), case.one_process()
    assert run.model is not None
    assert expected.model is not None
    compare(run.model.state_dict(), expected.model.state_dict(), ROUNDING)
    assert sum(run.summary["optimizer_bytes"]) == sum(run.summary["parameter_bytes"]) / 2


def test_whole_tensors_and_running_statistics_and_discarded_deltas(engine: LocalEngine) -> None:
    """Of two Δs there is one sum, so not a bit is different from undivided training."""
    plain, divided = (whole_tensors(words, engine) for words in ("", "shard_optimizer=true"))
    assert plain.model is not None
    assert divided.model is not None
    compare(divided.model.state_dict(), plain.model.state_dict(), 0.0)
    assert divided.summary["nonfinite"] == plain.summary["nonfinite"] > 0
    assert divided.summary["applied"] == plain.summary["applied"] > 0
    first, second, third, fourth = divided.summary["optimizer_bytes"]
    assert min(first, second, third, fourth) > 0
    assert [first + third, second + fourth] == plain.summary["optimizer_bytes"][:2]


class Listed:
    """Stands in for the communicator of a run."""

    subgroups: Sequence[Sequence[int]] = ()

    def split(self, groups: Sequence[Sequence[int]]) -> None:
        self.subgroups = groups


def test_who_has_the_same_part() -> None:
    """Two columns of two shards take turns at the first stage, in two replicas; ranks 4 and 9 have the second."""
    mesh, communicator = Mesh(2, (4, 1), (2, 1)), Listed()
    numbers = [holders(mesh, rank, cast(Communicator, communicator), None).rank for rank in range(mesh.workers)]
    assert communicator.subgroups == [[0, 2, 5, 7], [1, 3, 6, 8], [4, 9]]
    assert all([numbers[rank] for rank in circle] == list(range(len(circle))) for circle in communicator.subgroups)


def test_a_piece_knows_what_is_whose() -> None:
    block = FlatLayout.of(torch.nn.Linear(3, 2)).parameters[0]
    delta = torch.arange(8.0)
    pieces = [ZeroPartition.even(block, torch.zeros(8), delta, rank, 3) for rank in range(3)]
    for rank, piece in enumerate(pieces):
        piece.own.delta.copy_(delta[2 * rank : 2 * rank + 2])
    assert pieces[0].common is not None
    each = [list(piece.of(block, {"bias"})) for piece in (*(p.own for p in pieces), pieces[0].common)]
    assert [[tensor.tolist() for tensor in of] for of in each] == [[], [], [], [[6.0, 7.0]]]
    assert [t.tolist() for t in pieces[2].own.of(block, {"weight", "bias"})] == [[4.0, 5.0]]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("replicas=2", "shard_optimizer=True is supported by engine=.distributed. alone, not by engine=local"),
        ("stages=2", "the workers that have the same part of A, but of replicas=1 stages=2 .* write replicas=2"),
        ("shards=2", "the workers that have the same part of A, but of replicas=1 stages=1 shards=2 .* leave"),
        (
            "replicas=2 stages=2 aggregation=asynchronous",
            "under aggregation=asynchronous the optimizer's state is kept once",
        ),
        ("stages=2 schedule=pipedream", "under schedule=pipedream each stage moves .* write replicas=2 schedule=1f1b"),
        (
            "replicas=2 stages=2 compression=bf16",
            "compression=bf16 is supported by engine='ray' or 'distributed' alone",
        ),
    ],
)
def test_what_does_not_go_with_it(words: str, match: str) -> None:
    with pytest.raises(InputError, match=match):
        check(
            replace(CASES["stages"].program(), clip_norm=None), f"{words} shard_optimizer=true", engine="local", steps=1
        )
