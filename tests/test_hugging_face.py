"""Data sets, collators and models of Hugging Face go in as they are; nothing is downloaded."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline import InputError, Program, Run, train
from paceline.engine.local.engine import LocalEngine
from tests import oracle

transformers = pytest.importorskip("transformers", reason="models of transformers are looked at where it is installed")

STEPS = 4
WORDS = 29

SINGLE = 1e-6
"""Models of transformers take their loss of logits in float32, whose gradients are then rounded to 2^-24 of themselves;
in parts, sums in another order move some of them by such a unit."""


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, n_positions=32, vocab_size=WORDS, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model: nn.Module = transformers.GPT2LMHeadModel(config).double()
    return model


def bert() -> nn.Module:
    config = transformers.BertConfig(
        num_hidden_layers=2, num_attention_heads=2, hidden_size=16, intermediate_size=32, max_position_embeddings=32,
        vocab_size=WORDS, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model: nn.Module = transformers.BertForSequenceClassification(config).double()
    return model


def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers", reason="comes with transformers")
    vocabulary = {"[PAD]": 0, "[UNK]": 1, **{f"w{i}": i for i in range(2, WORDS)}}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


def hub(columns: dict[str, Any]) -> Any:
    datasets = pytest.importorskip("datasets", reason="needs Hugging Face's data sets: pip install datasets")
    return datasets.Dataset.from_dict(columns)


TEXTS = torch.randint(2, WORDS, (24, 9), generator=torch.Generator().manual_seed(1)).tolist()
SENTENCES = [text[: 3 + i % 6] for i, text in enumerate(TEXTS)]
"""Of 3 to 8 words."""
CLASSES = [sum(text) % 3 for text in SENTENCES]
LISTS = [{"input_ids": text, "labels": text} for text in TEXTS]


def program(**fields: Any) -> Program:
    given = {"model": gpt2, "loss": "model", "optimizer": functools.partial(torch.optim.SGD, lr=0.1), "train": LISTS}
    return Program(**{"batch_size": 4, "seed": 2} | given | fields)


def sentences(**fields: Any) -> Program:
    """Of any length; a tokenizer's collator pads them, and calls the column "label" labels."""
    rows = [{"input_ids": text, "label": kind} for text, kind in zip(SENTENCES, CLASSES, strict=True)]
    collate = transformers.DataCollatorWithPadding(tokenizer())
    return program(**{"model": bert, "train": rows, "loader": {"collate_fn": collate}} | fields)


def run(program: Program, strategy: str = "replicas=1", **settings: Any) -> Run:
    return train(program, strategy, **{"engine": "virtual", "progress": False, "steps": STEPS} | settings)


def same(found: Run, expected: Run, rounding: float = 0.0) -> None:
    tensors = dict(expected.model.named_parameters()) | dict(expected.model.named_buffers())
    oracle.assert_same(found.model, tensors, rounding)


def next_word(output: Any, target: Tensor) -> Tensor:
    """As transformers takes it."""
    return nn.functional.cross_entropy(output.logits.float()[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def test_the_models_loss_is_the_explicit_one() -> None:
    ids = torch.tensor(TEXTS)
    same(run(program()), run(program(loss=next_word, train=({"input_ids": ids}, ids))), SINGLE)
    same(run(program(loss=next_word)), run(program(loss=next_word, train=({"input_ids": ids}, ids))))


COLUMNS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda data: data,
    "as tensors": lambda data: data.with_format("torch"),
    "by a loader": lambda data: DataLoader(data.with_format("torch"), batch_size=4, shuffle=True),
    "selected": lambda data: data.select(range(24)),
}


@pytest.mark.parametrize("form", COLUMNS)
def test_a_data_set_of_the_hub_is_the_list_of_its_rows(form: str) -> None:
    data = COLUMNS[form](hub({"input_ids": TEXTS, "labels": TEXTS}))
    same(run(program(train=data, test=data), "replicas=2"), run(program(), "replicas=2"))


def test_it_comes_to_processes(engine: LocalEngine) -> None:
    data = hub({"input_ids": TEXTS, "labels": TEXTS})
    same(run(program(train=data), "replicas=2", engine=engine), run(program(), "replicas=2"), SINGLE)


def test_it_streams(engine: LocalEngine) -> None:
    """In the order that it shuffles by itself, the same in all replicas."""
    stream = hub({"input_ids": TEXTS, "labels": TEXTS}).to_iterable_dataset().shuffle(seed=3, buffer_size=8)
    whole = run(program(train=stream, batch_size=8))
    same(run(program(train=stream), "replicas=2", engine=engine), whole, SINGLE)


@pytest.mark.parametrize("aggregation", ["synchronous", "local-steps:period=2", "asynchronous"])
def test_a_collator_that_pads(engine: LocalEngine, aggregation: str) -> None:
    strategy = f"replicas=2 aggregation={aggregation}"
    found = run(sentences(test=sentences().train), strategy)
    assert found.history[-1].test_accuracy is not None
    if aggregation != "asynchronous":
        same(run(sentences(), strategy, engine=engine), found, SINGLE)


def test_a_loader_with_a_collator_that_pads() -> None:
    rows, collate = sentences().train, transformers.DataCollatorWithPadding(tokenizer())
    loader = DataLoader(rows, batch_size=4, shuffle=True, collate_fn=collate)
    test = DataLoader(rows, batch_size=2, collate_fn=collate)
    found = run(sentences(train=loader, test=test, batch_size=None, loader={}))
    same(found, run(sentences()))
    assert found.history[-1].test_accuracy is not None


def test_a_collator_of_language_models() -> None:
    """It makes the labels, -100 where it pads, so batches may have unlike numbers of words that count."""
    rows = [{"input_ids": text} for text in SENTENCES]
    collate = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    made = program(train=rows, loader={"collate_fn": collate}, shuffle=False)
    plain = oracle.Plain(made)
    for step in range(STEPS):
        plain.optimizer.zero_grad()
        plain.module(**collate(rows[4 * step : 4 * step + 4])).loss.backward()
        plain.optimizer.step()
    oracle.assert_same(run(made).model, plain.values(), SINGLE)


@pytest.mark.parametrize("split", ["stages=2 micro_batches=2", "shards=2", "stages=2 shards=2 micro_batches=2"])
@pytest.mark.parametrize("make", [program, sentences], ids=["gpt2", "bert"])
def test_in_parts(engine: LocalEngine, make: Callable[[], Program], split: str) -> None:
    same(run(make(), split, engine=engine, timeout_s=200.0), run(make()), SINGLE)


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([{"input_ids": text} for text in TEXTS], "loss='model', but the model returned .* without a loss"),
        ([{**each, "text": "w3 w4"} for each in LISTS], r"samples hold text, \['text'\]; write a data set whose"),
        (
            [{"input_ids": text, "labels": text} for text in SENTENCES],
            "'input_ids' is of shapes .*DataCollatorWithPadding",
        ),
    ],
)
def test_what_is_refused(rows: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        run(program(train=rows))


def test_the_splits_of_a_data_set_are_no_data_set() -> None:
    datasets = pytest.importorskip("datasets", reason="needs Hugging Face's data sets: pip install datasets")
    splits = datasets.DatasetDict({"train": hub({"input_ids": TEXTS, "labels": TEXTS})})
    with pytest.raises(
        InputError, match=r"train is a DatasetDict of train, no data set; write train=splits\['train'\]"
    ):
        program(train=splits)
