import math
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from paceline.core.errors import InputError
from paceline.datasets import load_program
from paceline.datasets.shakespeare import LENGTH, Windows, next_character_loss, transformer

DATA = Path(__file__).parents[3] / "shared" / "data" / "tinyshakespeare"
TEXT = "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind — é\n" * 20


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "input.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


def test_the_split_is_90_10_and_loses_no_character(folder):
    program = load_program("shakespeare", data=folder)
    tokens = torch.cat([program.train.tokens, program.test.tokens])
    assert len(program.train.tokens) == len(TEXT) * 9 // 10
    characters = sorted(set(TEXT))
    assert "".join(characters[i] for i in tokens) == TEXT


def test_windows_are_views_and_targets_come_next(folder):
    windows = load_program("shakespeare", data=folder).train
    inputs, targets = windows[3]
    assert inputs.untyped_storage().data_ptr() == windows.tokens.untyped_storage().data_ptr()
    assert inputs.shape == targets.shape == (LENGTH,)
    assert inputs.dtype == torch.int64
    torch.testing.assert_close(targets[:-1], inputs[1:])
    assert targets[-1] == windows[4][0][0]


@pytest.mark.parametrize(("characters", "windows"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_each_window_has_its_whole_target(characters, windows):
    data = Windows(torch.arange(characters), 4)
    assert len(list(data)) == len(data) == windows
    assert all(len(target) == 4 for _, target in data)
    with pytest.raises(IndexError):
        data[windows]


def test_the_model_sees_the_past_only():
    torch.manual_seed(0)
    model, text = transformer(11), torch.randint(11, (2, LENGTH))
    changed = text.clone()
    changed[:, 40:] = (changed[:, 40:] + 1) % 11
    before, after = model(text), model(changed)
    assert before.shape == (2, LENGTH, 11)
    torch.testing.assert_close(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40], after[:, 40])
    # ... and all of it: the first character still bears on the last.
    text[:, 0] = (text[:, 0] + 1) % 11
    assert not torch.allclose(before[:, -1], model(text)[:, -1])


def test_the_loss_of_equal_scores_is_the_logarithm_of_the_vocabulary():
    assert next_character_loss(torch.zeros(2, 5, 7), torch.zeros(2, 5, dtype=torch.long)).item() == pytest.approx(
        math.log(7)
    )


def test_it_learns(folder):
    program = load_program("shakespeare", data=folder)
    model = program.build()
    optimizer = program.optimizer(model.parameters())
    inputs, targets = next(iter(DataLoader(program.train, batch_size=8)))
    losses = []
    for _ in range(30):
        loss = program.loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert program.metrics["accuracy"](model(inputs), targets) > 0.2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", "no UTF-8 text"),
        (b"a" * 649, "649 characters, too few .* at least 650"),
        (b"", "0 characters"),
    ],
)
def test_a_text_that_can_not_be_used(tmp_path, content, message):
    (tmp_path / "input.txt").write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_program("shakespeare", data=tmp_path)


def test_the_shortest_text(tmp_path):
    (tmp_path / "input.txt").write_text("ab" * 325)
    program = load_program("shakespeare", data=tmp_path)
    assert (len(program.train), len(program.test)) == (9, 1)


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no text in {DATA}")
def test_the_real_text():
    program = load_program("shakespeare", data=DATA)
    assert program.build()(program.train[0][0][None]).shape == (1, LENGTH, 65)
    assert (len(program.train), len(program.test)) == (15_685, 1_742)
