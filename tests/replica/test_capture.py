"""Every model of the zoo, captured: outputs, gradients and buffers are the model's own, name by name."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from paceline.program import call, leaves, map_tree
from paceline.replica.capture.capture import Captured, capture
from tests.zoo import SAMPLES, ZOO, Job, gpt2, installed, masked, tied


def made(job: Job, seed: int = 3) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return job.model()


@pytest.fixture(scope="module")
def captures() -> dict[str, tuple[Job, nn.Module, Captured]]:
    return {}


@pytest.fixture(params=sorted(ZOO))
def taken(request: pytest.FixtureRequest, captures: dict[str, Any]) -> tuple[Job, nn.Module, Captured]:
    """A job, its model, and the capture of that, made once for all tests."""
    if request.param not in captures:
        job = ZOO[request.param]()
        module = made(job)
        captures[request.param] = job, module, capture(module, job.inputs)
    return captures[request.param]


def of_graph(captured: Captured, inputs: Any) -> Any:
    return captured.rebuild(captured.module(*captured.flatten(inputs)))


def passed(job: Job, module: nn.Module, captured: Captured | None, inputs: Any, targets: Any) -> dict[str, Tensor]:
    """The loss, the leaves of the output, the gradients and the buffers of one step under one seed; the module's own
    buffers are as before afterwards."""
    before = copy.deepcopy(dict(module.named_buffers()))
    module.zero_grad()
    module.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        output = call(module, inputs) if captured is None else of_graph(captured, inputs)
        loss = job.loss(output, targets)
        loss.backward()
    seen = {"loss": loss.detach()} | {f"output {i}": t.detach() for i, t in enumerate(leaves(output))}
    seen |= {f"gradient of {n}": p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    seen |= {n: b.clone() for n, b in module.named_buffers()}
    for name, buffer in module.named_buffers():
        buffer.copy_(before[name])
    return seen


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """To the bit: a graph has the model's own operators in the model's own order."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def first(inputs: Any, targets: Any, samples: int) -> tuple[Any, Any]:
    return map_tree(lambda t: t[:samples], inputs), targets[:samples]


@pytest.mark.parametrize("samples", [SAMPLES, 5, 2])
def test_a_graph_is_the_model_for_batches_of_any_size(taken: tuple[Job, nn.Module, Captured], samples: int) -> None:
    job, module, captured = taken
    batch = first(job.inputs, job.targets, samples)
    assert_same(passed(job, module, captured, *batch), passed(job, module, None, *batch))


def test_a_graph_holds_the_models_own_tensors_by_their_names(taken: tuple[Job, nn.Module, Captured]) -> None:
    _, module, captured = taken
    own = dict(module.named_parameters()) | dict(module.named_buffers())
    held = dict(captured.module.named_parameters()) | dict(captured.module.named_buffers())
    assert {n for n, _ in captured.module.named_parameters()} == {n for n, _ in module.named_parameters()}
    assert all(own[name] is tensor for name, tensor in held.items() if not name.startswith("_constant_"))


def test_each_node_belongs_to_a_module_of_the_model(taken: tuple[Job, nn.Module, Captured]) -> None:
    _, module, captured = taken
    nodes = {node.name for node in captured.module.graph.nodes if node.op != "output"}
    assert captured.owners.keys() == nodes
    assert set(captured.owners.values()) <= {name for name, _ in module.named_modules()}
    leaf_modules = {n.rpartition(".")[0] for n, _ in module.named_parameters()}
    assert leaf_modules <= set(captured.owners.values()) | {"head"}  # the tied model's head lies in its embedding


def test_outputs_are_rebuilt_as_the_model_gives_them(taken: tuple[Job, nn.Module, Captured]) -> None:
    job, module, captured = taken
    output = of_graph(captured, job.inputs)
    expected = call(copy.deepcopy(module), job.inputs)
    assert type(output) is type(expected)
    assert len(leaves(output)) == len(captured.module(*captured.flatten(job.inputs))) >= 1


@pytest.mark.parametrize("name", ["gpt2", "bert", "encoder", "tied", "masked"])
@pytest.mark.parametrize("length", [5, SAMPLES, 12])
def test_sequences_may_be_of_another_length(name: str, length: int, captures: dict[str, Any]) -> None:
    """Of the batch's size, too: sizes that happened to be equal are not taken for one."""
    job = ZOO[name]()
    module = made(job)
    job, module, captured = captures.setdefault(name, (job, module, capture(module, job.inputs)))
    inputs = map_tree(lambda t: torch.cat([t, t], 1)[:, :length], job.inputs)
    targets = job.targets
    if targets.dim() > 1:
        targets = torch.cat([targets, targets], 1)[:, :length]
    assert_same(passed(job, module, captured, inputs, targets), passed(job, module, None, inputs, targets))


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "resnet", "unet", "encoder", "masked", "tied"])
def test_a_graph_captured_under_autocast_is_the_model_under_autocast(name: str) -> None:
    job = ZOO[name]()
    module = made(job).float()
    inputs = map_tree(lambda t: t.float() if t.is_floating_point() else t, job.inputs)
    targets = job.targets.float() if job.targets.is_floating_point() else job.targets
    with torch.autocast("cpu", torch.bfloat16):
        captured = capture(module, inputs)
        found = passed(job, module, captured, inputs, targets)
    with torch.autocast("cpu", torch.bfloat16):
        expected = passed(job, module, None, inputs, targets)
    assert any(value.dtype == torch.bfloat16 for value in expected.values())
    assert_same(found, expected)


def test_a_captured_batch_may_be_of_one_sample() -> None:
    job = masked()
    module = made(job)
    captured = capture(module, map_tree(lambda t: t[:1], job.inputs))
    for samples in (1, 4):
        batch = first(job.inputs, job.targets, samples)
        assert_same(passed(job, module, captured, *batch), passed(job, module, None, *batch))


def test_equal_sizes_stay_apart() -> None:
    job = tied()
    module = made(job)
    square = job.inputs[:5]
    captured = capture(module, square)
    assert square.shape[0] == square.shape[1]
    for inputs in (job.inputs, job.inputs[:2, :3]):
        assert torch.equal(captured.module(inputs)[0], module(inputs))


def test_tied_weights_are_held_once_under_their_first_name() -> None:
    job = tied()
    captured = capture(made(job), job.inputs)
    held = [node.target for node in captured.module.graph.nodes if node.op == "get_attr"]
    assert held.count("embedding.weight") == 1
    assert "head.weight" not in held


def test_masks_of_dropout_are_the_models_and_differ_by_seed() -> None:
    job = gpt2()
    module = made(job).train()
    captured = capture(module, job.inputs)
    outputs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        outputs.append(captured.module(*captured.flatten(job.inputs))[0])
        torch.manual_seed(seed)
        assert torch.equal(outputs[-1], module(**job.inputs).logits)
    assert not torch.equal(*outputs)


def test_an_output_of_transformers_has_its_attributes_and_says_what_is_not_in_it() -> None:
    installed()
    job = gpt2()
    captured = capture(made(job), job.inputs)
    output = of_graph(captured, job.inputs)
    assert output.logits is output["logits"]
    assert output.loss is None
    with pytest.raises(ValueError, match="returns a DynamicCache, whose 'layers' is not in its graph"):
        output.past_key_values.layers  # noqa: B018


@pytest.mark.parametrize("name", ["cnn", "resnet", "encoder"])
def test_capturing_leaves_no_trace(name: str) -> None:
    """Neither on the model's tensors, gradients, modes and attributes nor on torch's random numbers."""
    job = ZOO[name]()
    module = made(job)
    next(iter(module.children())).eval()
    before = copy.deepcopy(module.state_dict())
    modes = [part.training for part in module.modules()]
    attributes = [{**vars(part)} for part in module.modules()]
    generator = torch.get_rng_state()
    batch = map_tree(Tensor.clone, job.inputs)
    capture(module, job.inputs)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[n]) for n, value in module.state_dict().items())
    assert [part.training for part in module.modules()] == modes
    assert all(
        vars(p).keys() == a.keys() and all(vars(p)[k] is a[k] for k in a)
        for p, a in zip(module.modules(), attributes, strict=True)
    )
    assert all(p.grad is None for p in module.parameters())
    assert all(torch.equal(a, b) for a, b in zip(leaves(batch), leaves(job.inputs), strict=True))


def test_a_graph_has_no_assertions_and_plain_arguments(taken: tuple[Job, nn.Module, Captured]) -> None:
    job, _, captured = taken
    assert isinstance(captured.module, GraphModule)
    graphs = [part.graph for part in captured.module.modules() if isinstance(part, GraphModule)]
    assert not [node for graph in graphs for node in graph.nodes if "assert" in str(node.target)]
    placeholders = [node for node in captured.module.graph.nodes if node.op == "placeholder"]
    assert len(placeholders) == len(leaves(job.inputs))


@pytest.mark.parametrize("name", ["cnn", "encoder", "gpt2", "resnet"])
def test_evaluation_is_a_graph_of_its_own(name: str) -> None:
    """Without dropout, by running statistics, which stay: to the bit what the model does in that mode."""
    if name in ("gpt2", "resnet"):
        installed()
    job = ZOO[name]()
    module = made(job)
    for operators in (False, True):
        captured = capture(module, job.inputs, operators=operators, training=False)
        assert module.training
        before = copy.deepcopy(dict(module.named_buffers()))
        expected = leaves(call(module.eval(), job.inputs))
        found = leaves(of_graph(captured, job.inputs))
        assert len(found) == len(expected) > 0
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
        assert all(torch.equal(buffer, before[key]) for key, buffer in module.named_buffers())
        trained = leaves(call(module.train(), job.inputs))
        assert not torch.equal(trained[0], expected[0])
