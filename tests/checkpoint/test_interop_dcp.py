"""torch.distributed.checkpoint reads what is exported into a plain model and optimizer, and what it saved is read."""

import os
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

from paceline.checkpoint.base import TensorChunk
from paceline.checkpoint.interop import read_state
from paceline.checkpoint.interop_dcp import export_dcp, import_dcp
from paceline.checkpoint.reader import Checkpoint, statuses
from paceline.checkpoint.writer import CheckpointWriter
from paceline.core.errors import InputError
from paceline.replica.flat_optimizer import FlatOptimizer
from paceline.replica.flat_state import FlatLayout, read

Make = Callable[[Any], Optimizer]


def grouped(parameters: Any) -> Optimizer:
    weights, others = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() < 2]
    return torch.optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.2}], lr=0.01)


OPTIMIZERS: dict[str, Make] = {
    "adamw": partial(torch.optim.AdamW, lr=0.01, betas=(0.8, 0.99)),
    "groups": grouped,
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "adafactor": partial(torch.optim.Adafactor, lr=0.1),
}


class Model(nn.Module):
    """Parameters of two dtypes and one without dims, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 3, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(1.0))


def step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    torch.manual_seed(number)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def save_run(folder: Path, make: Make) -> None:
    """Save a checkpoint as a run does, after steps of the optimizer that runs have."""
    torch.manual_seed(0)
    model = Model()
    layout = FlatLayout.of(model, [name for name, _ in model.named_buffers()])
    state, gradient = read(model, layout.new()), layout.new()
    optimizer = FlatOptimizer(make, None, state, gradient)
    for number in range(3):
        torch.manual_seed(number)
        drawn = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
        for name, view in zip(layout.parameter_names, gradient.views.parameters, strict=True):
            view.copy_(drawn[name])
        optimizer.step(gradient.parameters)
    writer = CheckpointWriter(folder, run="ab12", keep=1, timeout_s=30.0)
    chunks = [TensorChunk.whole(name, tensor) for name, tensor in state.named()]
    writer.begin(7, [*chunks, *optimizer.chunks()], {"optimizer": optimizer.state_json()})
    result = writer.wait(30.0)
    writer.close()
    assert result is not None
    assert result.error is None


def load_plain(folder: Path, make: Make, flatten: bool = False) -> tuple[Model, Optimizer]:
    """Load DCP's format into a model and an optimizer as torch's tutorial does."""
    torch.manual_seed(99)
    model = Model()
    optimizer = make(list(model.parameters()))
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    weights, state = get_state_dict(model, optimizer, options=options)
    loaded: dict[str, Any] = {"model": weights, "optimizer": state}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"], options=options
    )
    return model, optimizer


def assert_has(ours: tuple[nn.Module, Optimizer], folder: Path, make: Make) -> None:
    """Require every bit of a checkpoint after three steps, and the options of a new optimizer."""
    checkpoint, plain = Checkpoint.open(folder), Model()
    model, optimizer = ours
    assert all(torch.equal(value, checkpoint.read(name)) for name, value in model.state_dict().items())
    found = {
        f"optimizer/{slot}/{name}": value
        for name, parameter in model.named_parameters()
        for slot, value in optimizer.state[parameter].items()
    }
    stored = set(checkpoint.names("optimizer/"))
    assert stored <= found.keys()
    for name, value in found.items():
        assert torch.equal(value, checkpoint.read(name)) if name in stored else value.shape == (), name
        assert "/step/" not in name or value == 3.0
    groups = make(list(plain.parameters())).state_dict()["param_groups"]
    assert optimizer.state_dict()["param_groups"] == groups
    step(model, optimizer, 3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plain_model_and_optimizer_have_every_bit(tmp_path: Path, name: str) -> None:
    save_run(tmp_path / "ckpt", OPTIMIZERS[name])
    done = export_dcp(tmp_path / "ckpt", tmp_path / "dcp")
    assert done.notes == ()
    assert sorted(os.listdir(tmp_path)) == ["ckpt", "dcp"]
    for flatten in (False, True):
        loaded = load_plain(tmp_path / "dcp", OPTIMIZERS[name], flatten)
        assert_has(loaded, tmp_path / "ckpt" / "step-7", OPTIMIZERS[name])


@pytest.mark.parametrize("name", ["groups", "sgd"])
def test_it_comes_back_and_goes_out_again(tmp_path: Path, name: str) -> None:
    save_run(tmp_path / "ckpt", OPTIMIZERS[name])
    export_dcp(tmp_path / "ckpt", tmp_path / "dcp")
    done = import_dcp(tmp_path / "dcp", tmp_path / "new", trust=True)
    assert done.notes == ()
    assert [status.error for status in statuses(tmp_path / "new")] == [None]
    before, after = Checkpoint.open(tmp_path / "ckpt" / "step-7"), Checkpoint.open(tmp_path / "new" / "step-0")
    assert set(before.names()) == set(after.names())
    assert all(torch.equal(before.read(name), after.read(name)) for name in before.names())
    for key in ("steps", "scalars", "groups"):
        assert after.manifest.head["optimizer"][key] == before.manifest.head["optimizer"][key] or name == "sgd", key
    export_dcp(tmp_path / "new", tmp_path / "again")
    assert_has(load_plain(tmp_path / "again", OPTIMIZERS[name]), before.folder, OPTIMIZERS[name])


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("top", [("model", "optimizer"), ("app.model", "app.optim")])
def test_what_torch_saved_is_imported(tmp_path: Path, top: tuple[str, str], flatten: bool) -> None:
    model = Model()
    optimizer = grouped(list(model.parameters()))
    step(model, optimizer, 0)
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flatten))
    state_dict = {top[0]: weights, top[1]: state, "epoch": 3}
    if "." in top[0]:
        state_dict = {"app": {key.removeprefix("app."): value for key, value in state_dict.items()}}
    save_dcp(state_dict, tmp_path / "dcp")
    import_dcp(tmp_path / "dcp", tmp_path / "ckpt", trust=True)
    imported = Model()
    imported.load_state_dict(read_state(tmp_path / "ckpt"))
    assert all(map(torch.equal, imported.state_dict().values(), model.state_dict().values()))
    export_dcp(tmp_path / "ckpt", tmp_path / "again")
    _, restored = load_plain(tmp_path / "again", grouped)
    ours, theirs = restored.state_dict(), optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert all(
        torch.equal(value, ours["state"][i][slot])
        for i, slots in theirs["state"].items()
        for slot, value in slots.items()
    )


def save_dcp(state_dict: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(state_dict, checkpoint_id=folder)


def test_what_fits_no_parameter_is_left_out_and_said(tmp_path: Path) -> None:
    model = Model()
    optimizer = grouped(list(model.parameters()))
    step(model, optimizer, 0)
    save_dcp({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "dcp")  # by number
    done = import_dcp(tmp_path / "dcp", tmp_path / "ckpt", trust=True)
    assert done.notes[0].startswith("left out: optimizer.state.0.")
    assert Checkpoint.open(tmp_path / "ckpt" / "step-0").names("optimizer/") == []
    assert read_state(tmp_path / "ckpt").keys() == model.state_dict().keys()


def test_groups_whose_parameters_are_unknown_are_left_out_and_said(tmp_path: Path) -> None:
    save_run(tmp_path / "ckpt", OPTIMIZERS["groups"])
    head = Checkpoint.open(tmp_path / "ckpt" / "step-7").manifest.head
    del head["optimizer"]["parameters"]
    writer = CheckpointWriter(tmp_path / "other", run="ab12", keep=1, timeout_s=30.0)
    writer.begin(7, [TensorChunk.whole("w", torch.ones(2)), TensorChunk.whole("optimizer/a/w", torch.ones(2))], head)
    writer.wait(30.0)
    writer.close()
    done = export_dcp(tmp_path / "other", tmp_path / "dcp")
    assert done.notes == ("left out: options of the optimizer's groups, since it is not known which are in each",)


class Pickled:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_nothing_is_unpickled_without_trust(tmp_path: Path) -> None:
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Pickled(tmp_path / "made")))
    with pytest.raises(
        InputError, match=r"is a pickle, and reading it can run any code; .* write trust=True, or --trust"
    ):
        import_dcp(tmp_path / "dcp", tmp_path / "ckpt")
    assert os.listdir(tmp_path) == ["dcp"]


def test_what_is_no_such_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    with pytest.raises(InputError, match=r"dcp has no .metadata; write a folder that"):
        import_dcp(folder, tmp_path / "ckpt", trust=True)
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"nonsense")
    with pytest.raises(InputError, match=r"can't be read or written by torch.distributed.checkpoint"):
        import_dcp(folder, tmp_path / "ckpt", trust=True)
    (folder / ".metadata").unlink()
    os.mkfifo(folder / ".metadata")
    with pytest.raises(InputError, match=r".metadata can't be read: it is no regular file"):
        import_dcp(folder, tmp_path / "ckpt", trust=True)
    save_dcp({"net": {"w": torch.ones(2)}, "epoch": 1}, tmp_path / "net")
    with pytest.raises(InputError, match=r'has epoch, net, and no model; save {"model": model.state_dict\(\)}'):
        import_dcp(tmp_path / "net", tmp_path / "ckpt", trust=True)
    save_dcp({"model": {"w": torch.ones(2)}}, tmp_path / "cut")
    (tmp_path / "cut" / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(InputError, match="cut can't be read or written"):
        import_dcp(tmp_path / "cut", tmp_path / "ckpt", trust=True)
    save_dcp({"model": {"w": torch.ones(2, dtype=torch.complex128)}}, tmp_path / "dtype")
    with pytest.raises(InputError, match=r"w has dtype torch.complex128, which safetensors has not"):
        import_dcp(tmp_path / "dtype", tmp_path / "ckpt", trust=True)
    assert not (tmp_path / "ckpt").exists()
