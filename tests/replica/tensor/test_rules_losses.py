"""Losses over sharded classes, without the logits ever being gathered, and over sharded elements."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Program
from paceline.replica.base import Batch
from paceline.replica.module_utils import WithLoss as Joined
from paceline.replica.tensor.placements import Shard
from paceline.replica.tensor.prepare import plan_program
from paceline.replica.tensor.rules.elementwise import broadcast_tensors
from paceline.replica.tensor.rules.losses import ShardedCrossEntropy, cross_entropy, elementwise_loss
from tests.replica.tensor.cases import SHARDS, Case, every_way
from tests.replica.tensor.shard_harness import divided
from tests.replica.tensor.threads import together

CLASSES, SAMPLES = 11, 6
"""No k divides the classes."""


class WithLoss(nn.Module):
    """A column-cut head, and a loss of its logits (samples, classes, *more)."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], *, classes: int = CLASSES) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.head, self._loss = nn.Linear(5, classes), loss
        self.register_buffer("weight", torch.rand(classes) + 0.5)
        self.double()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.head(x) * 3
        return self._loss(logits.movedim(-1, 1) if logits.dim() > 2 else logits, target)


def _random() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def _x(*shape: int) -> Tensor:
    return torch.randn(*shape, 5, generator=_random(), dtype=torch.float64)


def _classes(*shape: int, ignored: int | None = None, classes: int = CLASSES) -> Tensor:
    made = torch.randint(0, classes, shape, generator=_random())
    if ignored is not None:
        made[::2] = ignored
    return made


def _probabilities(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=_random(), dtype=torch.float64)


OPTIONS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"ignore_index": 3},
    {"ignore_index": 255},
    {"label_smoothing": 0.2},
    {"label_smoothing": 0.2, "ignore_index": -100, "reduction": "sum"},
    {"label_smoothing": 0.2, "ignore_index": 3},
]


def _stays_divided(model: WithLoss, x: Tensor, target: Tensor, count: int, operator: str = "cross_entropy") -> None:
    found = divided(model, (x, target), count)
    assert found.strategy(operator) == "classes"
    assert found.redistributions(operator) == []
    assert isinstance(found.plan.parameters["head.weight"], Shard)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_cross_entropy_of_classes(options: dict[str, object], count: int) -> None:
    target = _classes(SAMPLES, ignored=options.get("ignore_index"))  # type: ignore[arg-type]
    _stays_divided(WithLoss(partial(F.cross_entropy, **options)), _x(SAMPLES), target, count)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_cross_entropy_of_classes_weighed_and_in_more_dims(options: dict[str, object], count: int) -> None:
    model = WithLoss(lambda y, t: F.cross_entropy(y, t, model.weight, **options))  # type: ignore[arg-type]
    target = _classes(SAMPLES, 2, 3, ignored=options.get("ignore_index"))  # type: ignore[arg-type]
    _stays_divided(model, _x(SAMPLES, 2, 3), target, count)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("options", [o for o in OPTIONS if "ignore_index" not in o], ids=str)
@pytest.mark.parametrize("more", [(), (3,)])
@pytest.mark.parametrize("weighed", [False, True])
def test_cross_entropy_of_probabilities(
    options: dict[str, object], count: int, more: tuple[int, ...], weighed: bool
) -> None:
    model = WithLoss(
        lambda y, t: F.cross_entropy(y, t, model.weight if weighed else None, **options)  # type: ignore[arg-type]
    )
    _stays_divided(model, _x(SAMPLES, *more), _probabilities(SAMPLES, CLASSES, *more), count)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("options", [o for o in OPTIONS if "label_smoothing" not in o], ids=str)
@pytest.mark.parametrize("weighed", [False, True])
def test_nll_of_log_softmax(options: dict[str, object], count: int, weighed: bool) -> None:
    model = WithLoss(
        lambda y, t: F.nll_loss(
            y.log_softmax(1),
            t,
            model.weight if weighed else None,
            **options,  # type: ignore[arg-type]
        )
    )
    target = _classes(SAMPLES, 4, ignored=options.get("ignore_index"))  # type: ignore[arg-type]
    _stays_divided(model, _x(SAMPLES, 4), target, count, "nll_loss")


def test_a_target_may_have_a_gradient() -> None:
    class Both(WithLoss):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(self.head(x), self.teacher(target).softmax(-1))

    model = Both(F.cross_entropy)
    model.teacher = nn.Linear(5, CLASSES, dtype=torch.float64)
    found = divided(model, (_x(SAMPLES), _x(SAMPLES) + 1), 3)
    assert found.strategy("cross_entropy") == "classes"


def test_few_classes_are_rather_gathered() -> None:
    found = divided(WithLoss(F.cross_entropy, classes=3), (_x(SAMPLES), _classes(SAMPLES, classes=3)), 2)
    assert found.strategy("cross_entropy") == ""


@pytest.mark.parametrize("count", [2, 3])
def test_of_one_sample_that_is_no_batch(count: int) -> None:
    class One(WithLoss):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return torch.stack([F.cross_entropy(self.head(x).sum(0), target.sum() % CLASSES, label_smoothing=0.1)])

    found = divided(One(F.cross_entropy), (_x(SAMPLES), _classes(SAMPLES)), count)
    assert found.strategy("cross_entropy") == "classes"


@pytest.mark.parametrize("wrong", [CLASSES, -1, -100])
def test_a_target_that_is_no_class_raises_as_in_one_process(wrong: int) -> None:
    loss = ShardedCrossEntropy(Shard(-1, (6, 5)), 0, 1, 255, 0.0, torch.float64)
    with pytest.raises((IndexError, RuntimeError), match=r"range|bounds"):
        loss(torch.randn(2, 6, generator=_random()), torch.tensor([0, wrong]))


TARGET = torch.tensor([0, 9, 3, 9, 5])


def _broadcast(x: Tensor, y: Tensor) -> Tensor:
    a, b = torch.broadcast_tensors(x, y)
    return a * b


CASES = (
    Case("classes", cross_entropy, F.cross_entropy, [(5, 10), TARGET], names=("classes",)),
    Case(
        "classes, smoothed",
        cross_entropy,
        lambda x, t: F.cross_entropy(x, t, ignore_index=9, label_smoothing=0.2),
        [(5, 10), TARGET],
        names=("classes",),
    ),
    Case(
        "probabilities",
        cross_entropy,
        lambda x, t: F.cross_entropy(x, t, reduction="none"),
        [(5, 10, 2), (5, 10, 2)],
        names=("classes",),
    ),
    Case(
        "weighed",
        cross_entropy,
        lambda x, t, w: F.nll_loss(x, t, w, reduction="none"),
        [(5, 10), TARGET],
        buffers=[torch.arange(1.0, 11, dtype=torch.float64)],
        names=("classes",),
    ),
    Case(
        "a weight with a gradient", cross_entropy, lambda x, w: F.cross_entropy(x, x, w), [(5, 10)], [(10,)], whole=True
    ),
    Case("mean", elementwise_loss, F.mse_loss, [(5, 8), (5, 8)]),
    Case("sum", elementwise_loss, lambda x, t: F.huber_loss(x, t, reduction="sum"), [(5, 8), (5, 8)]),
    Case("none", elementwise_loss, lambda x, t: F.smooth_l1_loss(x, t, reduction="none"), [(5, 8), (5, 8)]),
    Case("broadcast", broadcast_tensors, _broadcast, [(5, 6, 7), (5, 1, 7)]),
    Case("broadcast, fewer dims", broadcast_tensors, _broadcast, [(5, 6)], [(6,)]),
)


@pytest.mark.parametrize("shards", SHARDS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way(case: Case, shards: tuple[int, ...]) -> None:
    every_way(case, shards)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("classes", [37, 41])
def test_a_classifier_never_gathers_its_logits(classes: int, count: int) -> None:
    x, y = _x(8), _classes(8, classes=classes)
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(5, 13), nn.ReLU(), nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, classes)).double()
    program = Program(lambda: model, F.cross_entropy, partial(torch.optim.SGD, lr=0.1), (x, y))
    _, plan = plan_program(program, model, Batch(x, y, 8), count)
    converted = [value.shape for step in plan.steps for value, _, _ in step.redistributions if value.differentiable]
    assert converted, "other tensors are"
    assert not [shape for shape in converted if classes in shape]
    assert isinstance(plan.parameters["4.weight"], Shard)
    found = divided(Joined(program, model), (x, y), count)
    assert found.strategy("cross_entropy") == "classes"
    assert found.plan.parameters == plan.parameters


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse_loss": F.mse_loss,
    "mse_loss own": lambda y, t: F.mse_loss(y, y.tanh() + t),
    "mse_loss none": lambda y, t: F.mse_loss(y, t, reduction="none"),
    "mse_loss sum": lambda y, t: F.mse_loss(y, t, reduction="sum"),
    "l1_loss": F.l1_loss,
    "smooth_l1_loss": partial(F.smooth_l1_loss, beta=0.7),
    "huber_loss": partial(F.huber_loss, delta=0.7),
    "soft_margin_loss": lambda y, t: F.soft_margin_loss(y, t.detach().sign()),
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    "binary_cross_entropy_with_logits pos": lambda y, t: F.binary_cross_entropy_with_logits(
        y, t, weight=t.detach()[:, :1] + 1, pos_weight=t.detach()[0] + 1
    ),
    "binary_cross_entropy.": lambda y, t: F.binary_cross_entropy(y.sigmoid(), t, reduction="sum"),
    "kl_div": lambda y, t: F.kl_div(F.logsigmoid(y), t, reduction="batchmean"),
    "kl_div log": lambda y, t: F.kl_div(F.logsigmoid(y), t.log(), reduction="sum", log_target=True),
}


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_elements(name: str, count: int) -> None:
    found = divided(WithLoss(LOSSES[name]), (_x(SAMPLES), _probabilities(SAMPLES, CLASSES)), count)
    step = next(s for s in found.plan.steps if name.split()[0] in str(s.call.target) + ".")
    assert all(isinstance(layout, Shard) for layout in step.strategy.inputs[:2])
    assert found.redistributions("linear") == [] == found.redistributions("loss")
    assert found.plan.cost.collectives == 1, "of the loss, or of the losses of all elements"


def test_a_loss_against_something_broadcast() -> None:
    with pytest.warns(UserWarning, match="broadcast"):
        found = divided(WithLoss(F.mse_loss), (_x(SAMPLES), _probabilities(1, CLASSES)), 2)
    assert found.plan.cost.collectives == 1


def test_the_loss_of_nothing_is_nan_as_in_one_process() -> None:
    def work(shards: object) -> float:
        loss = ShardedCrossEntropy(Shard(-1, (2, 1)), shards.rank, 1, -100, 0.0, torch.float64)  # type: ignore[attr-defined]
        return loss(torch.zeros(2, 2 - shards.rank), torch.full((2,), -100)).item()  # type: ignore[attr-defined]

    losses, _ = together(2, work)
    assert all(math.isnan(loss) for loss in losses)
