"""Whether one shard can do an operator alone, and what has to be known of it for that."""

import torch
from torch.fx import Node

from paceline.replica.tensor.base import Call, Value
from paceline.replica.tensor.stand_in import Extent


def movable(call: Call, branch: frozenset[Node]) -> bool:
    """Whether it can be done by one shard, with the rest of its branch.

    What writes into a tensor in place can't, since the trunk may be that tensor. What draws random numbers is done by
    all, who then need what it takes; and where it isn't done, it has to be known how large its result is.
    """
    if call.mutates or (draws(call) and any(v.parameter is not None and belongs(v, branch) for v in call.takes)):
        return False
    return not call.gives or extent(call).complete


def belongs(value: Value, branch: frozenset[Node]) -> bool:
    """Whether a tensor is made or held in a branch and nowhere else."""
    if value.parameter is not None:
        return all(user in branch for user in value.node.users)
    return value.node in branch


def result(call: Call) -> torch.Tensor:
    """The tensor that it makes, or the first of them, as it was captured."""
    made = call.node.meta["val"]
    return made if isinstance(made, torch.Tensor) else next(each for each in made if isinstance(each, torch.Tensor))


def extent(call: Call) -> Extent:
    """Its shape, where it is not made."""
    return Extent(result(call), [node.meta["val"] for node in inputs(call.node)])


def inputs(node: Node) -> list[Node]:
    """Of the graph that a node is in, the tensors of the model's; a part of a model may be given sizes, too."""
    places = (each for each in node.graph.nodes if each.op == "placeholder")
    return [place for place in places if isinstance(place.meta["val"], torch.Tensor)]


def draws(call: Call) -> bool:
    """Whether it draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(call.target, "tags", ()):
        return False
    given = {a.name: call.argument(i, a.name, a.default_value) for i, a in enumerate(call.target._schema.arguments)}
    off = any(given.get(name) == 0 for name in ("p", "dropout_p", "dropout"))
    return not off and given.get("train", True) and given.get("training", True)
