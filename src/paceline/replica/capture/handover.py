"""A captured model as bytes, for other processes that have the same model: its graph, and what is known of its inputs.

The model's own tensors stay where they are; the graph names them. Both processes are of one run of one user::

    capturing process    capture(model) -> Captured -> packed() -> bytes
    another one                       its own model + bytes -> attached() -> Captured
"""

import contextlib
import pickle
from collections.abc import Callable
from typing import Any, TypeAlias

import cloudpickle
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from paceline.core.errors import PacelineError
from paceline.replica.capture.capture import Captured
from paceline.replica.capture.export import BLOCK, CONSTANT

# Prefixes of what a graph holds besides the model's own tensors.
OF_CAPTURE = (BLOCK, CONSTANT)

# (captures a model, that model) -> the capture of it, maybe another process's.
Obtain: TypeAlias = Callable[[Callable[[], Captured], nn.Module], Captured]


def capture_here(make: Callable[[], Captured], module: nn.Module) -> Captured:
    """Capture the model in this process."""
    del module
    return make()


def packed(captured: Captured, *, values: bool = True) -> bytes | None:
    """Return a captured model without its own tensors; None where it can't be pickled.

    Args:
        captured: of any model.
        values: whether the form of each node's value goes with it, which shards need and which is most of the time.
    """
    graph, bare = captured.module.graph, GraphModule({}, Graph())
    if not captured.traced:
        return None
    for name in {str(node.target) for node in graph.nodes if node.op == "get_attr"}:
        if name.startswith(OF_CAPTURE):
            setattr(bare, name, getattr(captured.module, name))
    bare._graph = graph
    # Not at the top: it imports the compiler. It keeps what sizes and memory values have in common (torch 2.13).
    from torch.fx._graph_pickler import GraphPickler, Options

    with contextlib.suppress(Exception):  # each process then captures for itself
        kept = ("val",) if values else ()
        options = Options(ops_filter=None, node_metadata_key_filter=kept.__contains__)
        data = GraphPickler.dumps(bare, options)
        inputs = captured.input_spec, captured.rebuild
        content: bytes = cloudpickle.dumps((data, str(graph), captured.owners, *inputs, captured.training))
        return content
    return None


def attached(content: bytes, module: nn.Module) -> Captured:
    """Return what :func:`packed` has packed, with the tensors of this process's model.

    Raises:
        PacelineError: the model is another one.
    """
    from torch._subclasses import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    data, text, owners, input_spec, rebuild, training = pickle.loads(content)
    bare: Any = GraphPickler.loads(data, FakeTensorMode(shape_env=ShapeEnv()))
    own: dict[str, Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    names = [str(node.target) for node in bare.graph.nodes if node.op == "get_attr"]
    absent = [name for name in names if not name.startswith(OF_CAPTURE) and name not in own]
    if absent or str(bare.graph) != text:
        raise PacelineError(
            f"the graph of {type(module).__name__}, captured in another process, does not fit the model here"
            f"{f', which has no {absent[0]}' if absent else ''}; model() must make the same one everywhere"
        )
    tensors = {name: getattr(bare, name) if name.startswith(OF_CAPTURE) else own[name] for name in names}
    return Captured(GraphModule(tensors, bare.graph), owners, input_spec, rebuild, training)
