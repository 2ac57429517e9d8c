"""A tensor of the right shape in the place of one that another shard has.

Whether one shard can do an operator alone, and what has to be known of it for that.

Branches of a graph that depend on nothing of each other, each worked on by one shard.

::

            +- conv -----------------+
    trunk --+- conv - relu - conv ---+-- cat (the join)
            +- pool - conv ----------+

What the join's tensors are computed from, and is not behind all of them, is the *region* before it; what hangs together
in it is a branch. Branches are given to shards by how long they take, the longest first and each to the shard that has
least (Graham 1969), so that there may be more of them than shards.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.fx import Node

from paceline.replica.tensor.base import GraphTensor, OpCall
from paceline.replica.tensor.graph_ops import OperatorGraph
from paceline.replica.tensor.op_times import op_work
from paceline.replica.tensor.placements import OnRank, memory_order


@final
class Extent:
    """The shape of a tensor that is not there, from those of the model's inputs.

    Args:
        like: the tensor as it was captured.
        inputs: of the model, as they were captured.
    """

    def __init__(self, like: Tensor, inputs: Sequence[Tensor]) -> None:
        self._sizes: list[Any] = [size if isinstance(size, int) else size.node.expr for size in like.shape]
        wanted = {symbol for size in self._sizes if not isinstance(size, int) for symbol in size.free_symbols}
        found: dict[Any, tuple[int, int]] = {}
        for index, given in enumerate(inputs):
            for dim, size in enumerate(given.shape):
                if not isinstance(size, int) and size.node.expr in wanted:
                    found.setdefault(size.node.expr, (index, dim))
        self.inputs = sorted({index for index, _ in found.values()})
        """Which of them it has to see."""
        self._places = [(symbol, self.inputs.index(index), dim) for symbol, (index, dim) in found.items()]
        self.complete = wanted == found.keys()
        """Whether they say all of it."""
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def of(self, inputs: Sequence[Tensor]) -> tuple[int, ...]:
        """The shape, with those inputs."""
        lengths = tuple(inputs[index].shape[dim] for _, index, dim in self._places)
        if lengths not in self._known:
            given = {symbol: length for (symbol, _, _), length in zip(self._places, lengths, strict=True)}
            self._known[lengths] = tuple(s if isinstance(s, int) else int(s.subs(given)) for s in self._sizes)
        return self._known[lengths]


@final
class StandIn(nn.Module):
    """What it holds is anything at all.

    Args:
        extent: its shape.
        like: the tensor as it was captured: its dims lie in memory in the same order.
        differentiable: whether autograd has to go through it, also where nothing before it has a gradient.
    """

    def __init__(self, extent: Extent, like: Tensor, *, differentiable: bool) -> None:
        super().__init__()
        self._extent, self._order, self._dtype = extent, memory_order(like), like.dtype
        self._anchor = torch.zeros((), requires_grad=True) if differentiable else None

    def forward(self, *given: Tensor) -> Tensor:
        """
        Args:
            given: the inputs that its extent has to see, then the tensors of the trunk that the other shard's is
                computed from.
        """
        count = len(self._extent.inputs)
        shape, device = self._extent.of(given[:count]), given[0].device if given else torch.device("cpu")
        made = torch.empty_permuted(shape, self._order, dtype=self._dtype, device=device)
        if self._anchor is None:
            return made
        through: Tensor = _Through.apply(made, self._anchor, *given[count:])  # type: ignore[no-untyped-call]
        return through


class _Through(torch.autograd.Function):
    """Has no gradient, yet leads back to all that it is given."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, *sources: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.sources = len(sources)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        del gradients
        return (None,) * (1 + ctx.sources)


def is_movable(call: OpCall, branch: frozenset[Node]) -> bool:
    """Whether it can be done by one shard, with the rest of its branch.

    What writes into a tensor in place can't, since the trunk may be that tensor. What draws random numbers is done by
    all, who then need what it takes; and where it isn't done, it has to be known how large its result is.
    """
    if call.mutates or (
        draws_random(call) and any(v.parameter is not None and belongs_to(v, branch) for v in call.inputs)
    ):
        return False
    return not call.outputs or result_extent(call).complete


def belongs_to(value: GraphTensor, branch: frozenset[Node]) -> bool:
    """Whether a tensor is made or held in a branch and nowhere else."""
    if value.parameter is not None:
        return all(user in branch for user in value.node.users)
    return value.node in branch


def captured_result(call: OpCall) -> torch.Tensor:
    """The tensor that it makes, or the first of them, as it was captured."""
    made = call.node.meta["val"]
    return made if isinstance(made, torch.Tensor) else next(each for each in made if isinstance(each, torch.Tensor))


def result_extent(call: OpCall) -> Extent:
    """Its shape, where it is not made."""
    return Extent(captured_result(call), [node.meta["val"] for node in model_inputs(call.node)])


def model_inputs(node: Node) -> list[Node]:
    """Of the graph that a node is in, the tensors of the model's; a part of a model may be given sizes, too."""
    places = (each for each in node.graph.nodes if each.op == "placeholder")
    return [place for place in places if isinstance(place.meta["val"], torch.Tensor)]


def draws_random(call: OpCall) -> bool:
    """Whether it draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(call.target, "tags", ()):
        return False
    given = {a.name: call.argument(i, a.name, a.default_value) for i, a in enumerate(call.target._schema.arguments)}
    off = any(given.get(name) == 0 for name in ("p", "dropout_p", "dropout"))
    return not off and given.get("train", True) and given.get("training", True)


aten = torch.ops.aten

BRANCH = "branch"
"""The way's name, of each operator in one."""

UNEVEN = 1.25
"""How much more than an even share the busiest shard may have. Beyond that operators are divided instead, which sends
more and leaves nobody idle; ``shard_rules`` that ask for branches ask for them however uneven."""

OpTimes: TypeAlias = Callable[[Sequence[OpCall]], Mapping[Node, float]]
"""How long each of some operators takes, in any unit."""


def multiplication_counts(calls: Sequence[OpCall]) -> Mapping[Node, float]:
    """By their number of multiplications, where nobody has measured."""
    return {call.node: op_work(call) for call in calls}


@dataclass(frozen=True)
class BranchRegion:
    """All that is between the trunk and a join."""

    join: Node
    branches: tuple[frozenset[Node], ...]


@dataclass(frozen=True)
class PlacedRegion:
    """A region whose branches have been given to shards."""

    region: BranchRegion
    owners: tuple[OnRank, ...]
    """Of each branch."""
    share: float
    """Of the region's work, what the busiest shard does."""
    _branch: Mapping[Node, int] = field(repr=False)

    def branch(self, node: Node) -> int | None:
        """Which one an operator belongs to; None: none."""
        return self._branch.get(node)


def place_branches(
    operators: OperatorGraph,
    shards: int,
    times: OpTimes = multiplication_counts,
    asked: Callable[[OpCall], bool] = lambda _: False,
) -> list[PlacedRegion]:
    """The regions whose branches are worth a shard each, none of them within another.

    Args:
        operators: of the captured graph.
        shards: k.
        times: is asked only where there are branches.
        asked: whether an operator is to be in a branch, however uneven they are.
    """
    found = branch_regions(operators)
    if shards < 2 or not found:
        return []
    inside = {node for region in found for branch in region.branches for node in branch}
    took = times([call for node, call in operators.calls.items() if node in inside])
    each = sorted((_placed(region, shards, took) for region in found), key=lambda pair: -pair[1])
    chosen: list[PlacedRegion] = []
    taken: set[Node] = set()
    for region, _ in each:
        nodes = {node for branch in region.region.branches for node in branch}
        worth = region.share * shards <= UNEVEN or any(asked(operators.calls[node]) for node in nodes)
        if worth and not nodes & taken:
            chosen.append(region)
            taken |= nodes
    return chosen


def _placed(region: BranchRegion, shards: int, took: Mapping[Node, float]) -> tuple[PlacedRegion, float]:
    """With how long all of it takes."""
    lengths = [sum(took[node] for node in branch) for branch in region.branches]
    loads, owners = [0.0] * shards, [0] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        owners[index] = min(range(shards), key=lambda shard: loads[shard])
        loads[owners[index]] += lengths[index]
    branch = {node: index for index, nodes in enumerate(region.branches) for node in nodes}
    total = sum(loads)
    share = max(loads) / total if total else 1.0
    return PlacedRegion(region, tuple(map(OnRank, _in_order(region, owners, branch))), share, branch), total


def _in_order(region: BranchRegion, owners: Sequence[int], branch: Mapping[Node, int]) -> list[int]:
    """The same among other shards: those come first whose branches are joined first.

    So what is concatenated may stay divided among them.
    """
    joined = (branch[node] for node in region.join.all_input_nodes if node in branch)
    ranks = list(dict.fromkeys(owners[index] for index in (*joined, *range(len(owners)))))
    return [ranks.index(owner) for owner in owners]


def branch_regions(operators: OperatorGraph) -> list[BranchRegion]:
    """Those with two branches or more that have weights; one may lie in a branch of another."""
    graph = _Graph(operators)
    found = (graph.region(call) for call in operators.calls.values() if len(call.inputs) > 1)
    return [region for region in found if region is not None]


class _Graph:
    """Sets of operators as the bits of a number."""

    def __init__(self, operators: OperatorGraph) -> None:
        self._calls = operators.calls
        self._nodes = list(operators.calls)
        self._bit = {node: 1 << i for i, node in enumerate(self._nodes)}
        self._behind: dict[Node, int] = {}
        self._weights = 0
        for node, call in operators.calls.items():
            sources = 0
            for source in node.all_input_nodes:
                sources |= self._behind.get(source, 0)
            self._behind[node] = sources | self._bit[node]
            if any(value.parameter is not None and value.differentiable and value.dims > 1 for value in call.inputs):
                self._weights |= self._bit[node]

    def region(self, join: OpCall) -> BranchRegion | None:
        """The one before a join."""
        ends, joins = self._ends(join)
        sets = [self._behind[node] for node in ends if self._behind[node] & self._weights]
        if len(sets) < 2:
            return None
        everything, common = 0, sets[0]
        for each in sets:
            everything, common = everything | each, common & each
        rest = self._closed(everything & ~common, joins)
        branches = list(self._together(rest))
        if not all(is_movable(self._calls[node], branch) for branch in branches for node in branch):
            return None
        if sum(bool(self._mask(branch) & self._weights) for branch in branches) < 2:
            return None
        return BranchRegion(join.node, tuple(branches))

    def _ends(self, join: OpCall) -> tuple[list[Node], int]:
        """The tensors that are joined, where sums of sums count as one sum; and the operators that join them."""
        ends, joins, open_ = list[Node](), self._bit[join.node], [join.node]
        while open_:
            for source in open_.pop().all_input_nodes:
                if source not in self._bit:
                    continue
                if join.target is aten.add.Tensor and source.target is join.target and len(source.users) == 1:
                    joins |= self._bit[source]
                    open_.append(source)
                else:
                    ends.append(source)
        return ends, joins

    def _closed(self, rest: int, joins: int) -> int:
        """Without what somebody else needs too, and what that is computed from."""
        before = 0
        while before != rest:
            before = rest
            for node in self._of(before):
                if any(self._leaves(user, rest | joins) for user in node.users):
                    rest &= ~self._behind[node]
        return rest & ~joins

    def _leaves(self, user: Node, inside: int) -> bool:
        """Whether a tensor goes elsewhere; a size of it may."""
        return user.op == "output" or bool(self._bit.get(user, 0) & ~inside)

    def _together(self, rest: int) -> Iterator[frozenset[Node]]:
        """What hangs together, in order."""
        groups: list[int] = []
        for node in self._of(rest):
            near = self._bit[node]
            for source in node.all_input_nodes:
                near |= self._bit.get(source, 0) & rest
            touched = [group for group in groups if group & near]
            groups = [group for group in groups if not group & near]
            for group in touched:
                near |= group
            groups.append(near)
        for group in sorted(groups, key=lambda each: each & -each):
            yield frozenset(self._of(group))

    def _of(self, mask: int) -> Iterator[Node]:
        while mask:
            lowest = mask & -mask
            yield self._nodes[lowest.bit_length() - 1]
            mask ^= lowest

    def _mask(self, nodes: Iterable[Node]) -> int:
        return sum(self._bit[node] for node in nodes)
