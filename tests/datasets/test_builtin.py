from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.core.errors import InputError
from paceline.datasets import load_program
from paceline.program import Program, accuracy, leaves

DATA = Path(__file__).parents[3] / "shared" / "data"


def train(program: Program, batch: int, updates: int, staleness: int = 0) -> float:
    """Test accuracy after plain gradient steps, each on the parameters of ``staleness`` updates before."""
    model, replica = program.build(), program.build()
    optimizer = program.optimizer(model.parameters())
    inputs, targets = program.train
    generator, read = torch.Generator().manual_seed(program.seed), []
    for _ in range(updates):
        read = [*read, [p.detach().clone() for p in model.parameters()]][-1 - staleness :]
        torch.nn.utils.vector_to_parameters(torch.cat([p.flatten() for p in read[0]]), replica.parameters())
        rows = torch.randint(len(targets), (batch,), generator=generator)
        loss = program.loss(replica(inputs[rows]), targets[rows])
        for p, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(replica.parameters())), strict=True):
            p.grad = gradient
        optimizer.step()
    return scored(program, model)


def scored(program: Program, model: torch.nn.Module) -> float:
    inputs, targets = program.test
    with torch.no_grad():
        return accuracy(model(inputs), targets).item()


def same(a: Program, b: Program) -> bool:
    return all(torch.equal(x, y) for x, y in zip(leaves([a.train, a.test]), leaves([b.train, b.test]), strict=True))


@pytest.fixture
def digits() -> Program:
    return load_program("digits")


@pytest.mark.parametrize(
    ("batch", "updates", "staleness"),
    [(8 * 32, 100, 0), (32, 400, 7), (32, 1000, 20)],
    ids=["8 in lockstep", "8 free-running", "21 free-running"],
)
def test_digits_are_learned_at_any_pace(digits, batch, updates, staleness):
    assert train(digits, batch, updates, staleness) > 0.93


def test_digits_are_split_80_20_whatever_the_seed(digits):
    (inputs, targets), (test_inputs, test_targets) = digits.train, digits.test
    assert (inputs.shape, test_inputs.shape) == ((1437, 64), (360, 64))
    assert same(digits, load_program("digits", seed=5))
    assert set(test_targets.tolist()) == set(targets.tolist()) == set(range(10))
    # Centred on the training set alone, so nothing of the test set is known beforehand.
    torch.testing.assert_close(inputs.mean(0), torch.zeros(64), atol=1e-5, rtol=0)
    seen = {row.numpy().tobytes() for row in inputs}
    assert not [row for row in test_inputs if row.numpy().tobytes() in seen]


def test_synthetic_is_the_papers():
    program = load_program("synthetic")
    assert (program.train[0].shape, program.test[0].shape) == ((8000, 20), (2000, 20))
    assert torch.bincount(program.train[1]).numel() == 10
    assert [tuple(p.shape) for p in program.build().parameters()] == [(64, 20), (64,), (10, 64), (10,)]
    assert program.optimizer([torch.zeros(1, requires_grad=True)]).defaults["lr"] == 0.01


def test_synthetic_samples_come_from_the_seed():
    assert same(load_program("synthetic", seed=4), load_program("synthetic", seed=4))
    assert not same(load_program("synthetic", seed=4), load_program("synthetic", seed=5))


def test_synthetic_is_learned_slowly_enough_to_compare():
    program = load_program("synthetic")
    early, late = train(program, 32, 250), train(program, 32, 2000)
    assert 0.3 < early < late - 0.1
    assert late > 0.8


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range(seed):
    with pytest.raises(InputError, match=f"seed={seed}"):
        load_program("synthetic", seed=seed)


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_embedded_programs_read_no_files(tmp_path, name):
    with pytest.raises(InputError, match=f"{name} reads no files"):
        load_program(name, data=tmp_path)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "shakespeare"])
def test_the_others_say_which(name):
    with pytest.raises(InputError, match=f"{name} is read from files; write --data DIR"):
        load_program(name)


def white(name: str) -> float:
    return {"mnist": (1 - 0.1307) / 0.3081, "fashion-mnist": (1 - 0.2860) / 0.3530}[name]


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_sets_from_the_folder_itself(tmp_path, mnist_files, name, suffix):
    program = load_program(name, data=mnist_files(tmp_path, suffix))
    images, labels = program.train
    assert images.shape == (6, 1, 28, 28)
    assert images.dtype == torch.float32
    assert images[0, 0, 0, 0].item() == pytest.approx(white(name), rel=1e-6)
    assert labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert program.test[1].tolist() == [0, 1, 2, 3]
    assert program.build()(images).shape == (6, 10)


def test_torchvisions_folders_keep_the_two_apart(tmp_path, mnist_files):
    mnist_files(tmp_path / "MNIST/raw", ".gz", fill=255)
    mnist_files(tmp_path / "FashionMNIST/raw", fill=0)
    (images, _), (clothes, _) = (load_program(n, data=tmp_path).train for n in ("mnist", "fashion-mnist"))
    assert images[0, 0, 0, 0] > 0 > clothes[0, 0, 0, 0]


@pytest.mark.parametrize(
    ("labels", "message"),
    [([0, 1, 2, 3, 4], "5 labels for 6 images"), ([0, 1, 2, 3, 4, 10], r"label 10, outside 0 \.\. 9")],
)
def test_labels_that_do_not_fit_the_images(tmp_path, mnist_files, write_idx, labels, message):
    write_idx(mnist_files(tmp_path) / "train-labels-idx1-ubyte", np.array(labels, np.uint8))
    with pytest.raises(InputError, match=f"train-labels-idx1-ubyte holds .*{message}"):
        load_program("mnist", data=tmp_path)


def test_images_and_labels_swapped(tmp_path, mnist_files):
    images, labels = (mnist_files(tmp_path) / f"train-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1"))
    images.write_bytes(labels.read_bytes())
    with pytest.raises(InputError, match="train-images-idx3-ubyte is truncated: 14 bytes"):
        load_program("mnist", data=tmp_path)


def small(program: Program, rows: int) -> Program:
    def part(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return pair[0][:rows], pair[1][:rows]

    return replace(program, train=part(program.train), test=part(program.test))


@pytest.mark.skipif(not (DATA / "mnist").is_dir(), reason=f"no MNIST in {DATA}")
def test_real_mnist():
    program = load_program("mnist", data=DATA / "mnist")
    (images, labels), (test_images, _) = program.train, program.test
    assert (images.shape, test_images.shape) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    assert torch.bincount(labels).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    # The constants are this set's own, to the digits given.
    assert abs(images.mean().item()) < 1e-3
    assert abs(images.std().item() - 1) < 1e-3
    assert train(small(program, 2000), 32, 400) > 0.7
