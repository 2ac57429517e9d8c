"""Losses that models make of whole batches, dicts above all: the run is that of the same loss outside of the model."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import InputError, Program, Run, train
from paceline.engine.local.engine import LocalEngine
from paceline.program import model_loss
from paceline.replica.base import as_batch
from tests import oracle
from tests.combinations import OPTIONS
from tests.engine import programs

STEPS = 6

ROUNDING = 1e-12
"""Both sides add the same float64 products near 1; in processes, and in parts, in another order."""


class Classifier(nn.Module):
    """Makes its loss where it is given labels.

    Args:
        form: of its output.
    """

    def __init__(self, form: str = "dict") -> None:
        super().__init__()
        self.first, self.second, self.form = nn.Linear(6, 8), nn.Linear(8, 3), form
        self.double()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.second(torch.tanh(self.first(x)))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        if self.form == "dict":
            return {"loss": loss, "logits": logits}
        if self.form == "tuple":
            return loss, logits
        return Output(loss, logits) if self.form == "dataclass" else loss


@dataclasses.dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


class Unlike(Classifier):
    """Its loss is a mean over samples that count."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.second(torch.tanh(self.first(x)))
        return {"loss": F.cross_entropy(logits, labels, ignore_index=0), "logits": logits}


class Short(nn.Module):
    """Embeds words of sentences of any length, padded by zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, 8), nn.Linear(8, 3)
        self.double()

    def forward(self, words: Tensor, mask: Tensor, labels: Tensor) -> Any:
        embedded = self.words(words) * mask.unsqueeze(-1)
        logits = self.head(embedded.sum(1) / mask.sum(1, keepdim=True))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


INPUTS, TARGETS = programs.data()
DICTS = [{"x": x, "labels": y} for x, y in zip(INPUTS, TARGETS, strict=True)]


def program(form: str = "dict", **fields: Any) -> Program:
    return programs.program(**{"model": lambda: Classifier(form), "loss": "model", "train": DICTS} | fields)


def explicit(**fields: Any) -> Program:
    """The same with the loss outside."""

    def loss(output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output["logits"], target)

    return program(**{"loss": loss, "train": ({"x": INPUTS}, TARGETS)} | fields)


def run(program: Program, strategy: str = "replicas=1", **settings: Any) -> Run:
    return train(program, strategy, **{"engine": "virtual", "progress": False, "steps": STEPS} | settings)


def same(found: Run, expected: Run, rounding: float = ROUNDING) -> None:
    oracle.assert_same(found.model, expected.model.state_dict(), rounding)


@pytest.mark.parametrize("form", ["dict", "tuple", "dataclass", "loss"])
def test_outputs_of_any_form(form: str) -> None:
    same(run(program(form)), run(explicit()), 0.0)


@pytest.mark.parametrize(
    "train",
    [DICTS, (INPUTS, TARGETS), torch.utils.data.TensorDataset(INPUTS, TARGETS)],
    ids=["dicts", "pair", "tensors"],
)
def test_whole_batches_are_the_models_inputs(train: Any) -> None:
    same(run(program(train=train)), run(explicit()), 0.0)


POLICIES = ["synchronous", "asynchronous", *(name + options for name, options in OPTIONS.items())]


@pytest.mark.parametrize("aggregation", POLICIES)
def test_under_every_policy(aggregation: str) -> None:
    strategy = f"replicas=2 aggregation={aggregation}"
    same(run(program(), strategy), run(explicit(), strategy))


@pytest.mark.parametrize("aggregation", POLICIES)
def test_sentences_of_any_length(engine: LocalEngine, aggregation: str) -> None:
    """Padded by the program's collate_fn, in virtual time and in processes."""
    draw = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 9, (24,), generator=draw).tolist()
    samples = [{"words": torch.randint(1, 11, (n,), generator=draw), "labels": n % 3} for n in lengths]
    made = program(model=Short, train=samples, loader={"collate_fn": padded}, test=samples[:9])
    strategy = f"replicas=2 aggregation={aggregation}"
    found = run(made, strategy)
    assert found.history[-1].test_loss < found.history[0].test_loss
    assert found.history[-1].test_accuracy is not None
    if aggregation.startswith(("synchronous", "local-steps", "sandblaster")):
        same(run(made, strategy, engine=engine), found)
    else:
        assert run(made, strategy, engine=engine).history[-1].updates


def padded(samples: list[Any]) -> Any:
    words = nn.utils.rnn.pad_sequence([each["words"] for each in samples], batch_first=True)
    return {"words": words, "mask": (words > 0).double(), "labels": torch.tensor([each["labels"] for each in samples])}


@pytest.mark.parametrize("split", ["stages=2 micro_batches=2", "shards=2", "stages=2 shards=2 micro_batches=2"])
@pytest.mark.parametrize("form", ["dict", "loss"])
def test_in_parts(engine: LocalEngine, split: str, form: str) -> None:
    same(run(program(form), split, engine=engine), run(explicit()))


def test_sentences_of_any_length_in_parts(engine: LocalEngine) -> None:
    lengths = [3, 4, 7, 5, 6, 2, 8, 4] * 3
    draw = torch.Generator().manual_seed(6)
    samples = [{"words": torch.randint(1, 11, (n,), generator=draw), "labels": n % 3} for n in lengths]
    made = program(model=Short, train=samples, loader={"collate_fn": padded})
    same(run(made, "stages=2 micro_batches=2", engine=engine), run(made))


def test_compiled(engine: LocalEngine) -> None:
    same(run(program(), "compile=true", engine=engine), run(explicit()))


def test_a_loss_that_is_no_mean_over_samples_can_not_be_cut_into_micro_batches(engine: LocalEngine) -> None:
    labels = torch.tensor([0, 1, 2, 1]).repeat(6)  # one of the first two counts, both of the others
    data = [{"x": x, "labels": y} for x, y in zip(INPUTS, labels, strict=False)]
    made = program(model=Unlike, train=data, shuffle=False)
    with pytest.raises(InputError, match=r"its 2 micro-batches .* it is no mean over samples .* or micro_batches=1"):
        run(made, "stages=2 micro_batches=2", engine=engine)
    same(run(made, "stages=2 micro_batches=1", engine=engine), run(made))


def test_evaluation_is_that_of_the_explicit_loss() -> None:
    """Accuracy too; metrics of one's own are given the output and the labels."""
    found, expected = run(program(test=DICTS)), run(explicit(test=({"x": INPUTS}, TARGETS)))
    assert found.history[-1].test_loss == pytest.approx(expected.history[-1].test_loss, rel=ROUNDING)
    accuracy = (expected.model(INPUTS)["logits"].argmax(1) == TARGETS).double().mean()
    assert found.history[-1].test_accuracy == pytest.approx(float(accuracy), rel=ROUNDING)
    metrics = {"first": lambda output, labels: (output["logits"].argmax(1)[labels == 0] == 0).double().sum()}
    assert "first" in run(program(test=DICTS, metrics=metrics)).history[-1].test_metrics


def test_words_have_no_accuracy() -> None:
    """Models shift or leave out labels of words within, so scores and labels as they are say nothing."""

    class Words(Classifier):
        def forward(self, x: Tensor, labels: Tensor) -> Any:
            logits = self.second(torch.tanh(self.first(x)))
            return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    data = [{"x": x.expand(4, 6), "labels": y.expand(4)} for x, y in zip(INPUTS, TARGETS, strict=True)]
    assert run(program(model=Words, train=data, test=data)).history[-1].test_accuracy is None


def test_labels_are_the_target_of_a_loss_outside() -> None:
    same(run(explicit(train=DICTS)), run(explicit()), 0.0)
    batch = as_batch({"x": INPUTS, "labels": TARGETS})
    assert (list(batch.input), batch.target is TARGETS, batch.samples) == (["x"], True, 50)
    whole = as_batch({"x": INPUTS, "labels": TARGETS}, whole=True)
    assert (list(whole.input), whole.target, whole.samples) == (["x", "labels"], (), 50)


LISTS = [{"x": x.tolist(), "labels": int(y)} for x, y in zip(INPUTS, TARGETS, strict=True)]


def test_lists_of_numbers_are_tensors() -> None:
    """As a tokenizer makes them; of floats in torch's default type."""

    class Single(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.float()

    singles = [{"x": x.float(), "labels": y} for x, y in zip(INPUTS, TARGETS, strict=True)]
    same(run(program(model=Single, train=LISTS)), run(program(model=Single, train=singles)), 0.0)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"model": programs.mlp, "train": (INPUTS,) * 2}, "takes 2 positional arguments but 3 were given"),
        ({"loss": "mean"}, r"Program\(loss='mean'\) can't be called; write loss=.* or loss='model'"),
        ({"train": [{"x": x} for x in INPUTS]}, "the model returned dict without a loss: .* target in each batch"),
        (
            {"train": [{"x": x} for x in INPUTS], "loss": F.cross_entropy},
            r"a batch is a dict of 'x'; which of them is the target\? Name it 'labels' .*; or write loss='model'",
        ),
        (
            {"train": [{"x": x, "y": y} for x, y in zip(INPUTS, TARGETS, strict=True)], "loss": F.cross_entropy},
            "a batch is a dict of 'x', 'y'; which of them is the target",
        ),
        (
            {"train": [{"text": "a", **each} for each in DICTS]},
            r"samples hold text, \['text'\]; write a data set whose samples leave them out, or collate_fn=",
        ),
        (
            {"train": [{"x": each["x"][: 3 + i % 4], "labels": 0} for i, each in enumerate(LISTS)]},
            r"'x' is of shapes \(4,\), .* pad them: write loader=\{'collate_fn': transformers.DataCollatorWithPadding",
        ),
        ({"metrics": {"m": lambda o, t: o}}, "metric 'm' must give one number"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        run(program(**fields))


def test_the_loss_of_an_output() -> None:
    loss = torch.tensor(0.5)
    assert all(model_loss(each) is loss for each in (loss, (loss, 1), {"loss": loss}, Output(loss, loss)))
    for output in ((), {}, Output(None, loss), 0.5, (None, loss)):
        with pytest.raises(InputError, match="loss='model', but the model returned"):
            model_loss(output)


def test_the_program_is_the_same_when_a_field_is_replaced() -> None:
    made = program()
    assert made.model_makes_loss
    assert made.seeded(5).model_makes_loss
    assert functools.partial(dataclasses.replace, made, batch_size=8)().loss is made.loss
