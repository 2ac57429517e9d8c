"""Branches of a graph that do not depend on each other, each placed on one shard.

::

            +- conv -----------------+
    trunk --+- conv - relu - conv ---+-- cat (the join)
            +- pool - conv ----------+

The nodes from which the join's inputs are computed, without those before all of them, are the *region* before it; its
connected components are the branches. Branches are placed on shards by the time they take, the longest first and each
on the shard with the least load (Graham 1969), so that there may be more of them than shards.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from paceline.replica.tensor.base import OpCall, OpStrategy, aten
from paceline.replica.tensor.branch_on_rank import branch_strategy, is_movable, join_strategies
from paceline.replica.tensor.graph_ops import OperatorGraph
from paceline.replica.tensor.op_times import OpTimes, multiplication_counts
from paceline.replica.tensor.placements import OnRank

# Load of the busiest shard, relative to an even share, up to which branches are offered to the plan. Above, operators
# are sharded instead, which sends more and leaves no shard idle; shard_rules may request branches however uneven.
UNEVEN = 1.25


@dataclass(frozen=True)
class BranchRegion:
    """All nodes between the trunk and a join."""

    join: Node
    branches: tuple[frozenset[Node], ...]


@dataclass(frozen=True)
class PlacedRegion:
    """A region whose branches have been placed on shards."""

    region: BranchRegion
    owners: tuple[OnRank, ...]
    """Owner of each branch."""
    share: float
    """Share of the region's work that the busiest shard does."""
    branch_of: Mapping[Node, int] = field(repr=False)
    """Index of the branch of each node."""

    def strategy(self, call: OpCall) -> OpStrategy:
        """Return the strategy of an operator of a branch on its owner."""
        index = self.branch_of[call.node]
        return branch_strategy(call, self.region.branches[index], self.owners[index], self.share)

    def join_strategies(self, call: OpCall) -> Iterator[OpStrategy]:
        """Return the strategies of the join."""
        indices = [self.branch_of.get(value.node) for value in call.inputs]
        return join_strategies(call, [None if index is None else self.owners[index] for index in indices])


def place_branches(
    graph: OperatorGraph,
    shards: int,
    times: OpTimes = multiplication_counts,
    requested: Callable[[OpCall], bool] = lambda _: False,
) -> list[PlacedRegion]:
    """Return the regions whose branches are worth a shard each, none of them within another.

    Args:
        graph: operators of the captured graph.
        shards: k.
        times: times of operators; called only if there are branches.
        requested: returns True for an operator that is to be in a branch, however uneven they are.
    """
    regions = branch_regions(graph)
    if shards < 2 or not regions:
        return []
    inside = {node for region in regions for branch in region.branches for node in branch}
    seconds = times([call for node, call in graph.calls.items() if node in inside])
    placed = sorted((_place(region, shards, seconds) for region in regions), key=lambda pair: -pair[1])
    chosen: list[PlacedRegion] = []
    taken: set[Node] = set()
    for region, _ in placed:  # the longest first
        nodes = {node for branch in region.region.branches for node in branch}
        worth = region.share * shards <= UNEVEN or any(requested(graph.calls[node]) for node in nodes)
        if worth and not nodes & taken:
            chosen.append(region)
            taken |= nodes
    return chosen


def _place(region: BranchRegion, shards: int, seconds: Mapping[Node, float]) -> tuple[PlacedRegion, float]:
    """Place a region's branches on shards; return the time of the whole region, too."""
    lengths = [sum(seconds[node] for node in branch) for branch in region.branches]
    loads, owners = [0.0] * shards, [0] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        owners[index] = min(range(shards), key=lambda shard: loads[shard])
        loads[owners[index]] += lengths[index]
    # Number shards by the order in which their branches are joined, so that a concatenation may stay sharded.
    branch = {node: index for index, nodes in enumerate(region.branches) for node in nodes}
    joined = (branch[node] for node in region.join.all_input_nodes if node in branch)
    ranks = list(dict.fromkeys(owners[index] for index in (*joined, *range(len(owners)))))
    placements = tuple(OnRank(ranks.index(owner)) for owner in owners)
    total = sum(loads)
    return PlacedRegion(region, placements, max(loads) / total if total else 1.0, branch), total


def branch_regions(graph: OperatorGraph) -> list[BranchRegion]:
    """Return the regions with two branches or more that have weights; one may lie in a branch of another."""
    search = _RegionSearch(graph)
    regions = (search.region(call) for call in graph.calls.values() if len(call.inputs) > 1)
    return [region for region in regions if region is not None]


class _RegionSearch:
    """Sets of operators as the bits of integers: unions and differences of ancestors are fast."""

    def __init__(self, graph: OperatorGraph) -> None:
        self._calls, self._nodes = graph.calls, list(graph.calls)
        self._bit = {node: 1 << i for i, node in enumerate(self._nodes)}
        self._ancestors: dict[Node, int] = {}
        """Each node with all from which it is computed."""
        self._users: dict[Node, int] = {}
        """Users of each node; the output, which is in no set, has the bit after all others."""
        self._weights = 0
        """The nodes that have weights."""
        output = 1 << len(self._nodes)
        for node, call in graph.calls.items():
            ancestors = self._bit[node]
            for source in node.all_input_nodes:
                ancestors |= self._ancestors.get(source, 0)
            self._ancestors[node], self._users[node] = ancestors, 0
            for user in node.users:
                self._users[node] |= output if user.op == "output" else self._bit.get(user, 0)
            if any(value.parameter is not None and value.differentiable and value.dims > 1 for value in call.inputs):
                self._weights |= self._bit[node]

    def region(self, join: OpCall) -> BranchRegion | None:
        """Return the region before a join, if it has branches that can be moved."""
        ends, joins = self.ends(join)
        sets = [self._ancestors[node] for node in ends if self._ancestors[node] & self._weights]
        if len(sets) < 2:
            return None
        # What is before all ends is the trunk.
        union, common = 0, sets[0]
        for each in sets:
            union, common = union | each, common & each
        components = self.components(self.without_outside_users(union & ~common, joins))
        if sum(bool(mask & self._weights) for mask in components) < 2:
            return None
        branches = tuple(frozenset(self.nodes_of(mask)) for mask in components)
        if not all(is_movable(self._calls[node], branch) for branch in branches for node in branch):
            return None
        return BranchRegion(join.node, branches)

    def ends(self, join: OpCall) -> tuple[list[Node], int]:
        """Return the nodes that are joined, where sums of sums count as one sum, and the set of those that join."""
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

    def without_outside_users(self, region: int, joins: int) -> int:
        """Drop the nodes that have users outside, with their ancestors; users of sizes alone do not count."""
        before = 0
        while before != region:
            before = region
            for node in self.nodes_of(before):
                if self._users[node] & ~(region | joins):
                    region &= ~self._ancestors[node]
        return region & ~joins

    def components(self, region: int) -> Sequence[int]:
        """Return the connected components, in order."""
        # Nodes come in topological order, so that one pass merges each with the components of its inputs.
        components: list[int] = []
        for node in self.nodes_of(region):
            merged = self._bit[node]
            for source in node.all_input_nodes:
                merged |= self._bit.get(source, 0) & region
            touched = [each for each in components if each & merged]
            components = [each for each in components if not each & merged]
            for each in touched:
                merged |= each
            components.append(merged)
        return sorted(components, key=lambda each: each & -each)

    def nodes_of(self, mask: int) -> Iterator[Node]:
        while mask:
            lowest = mask & -mask
            yield self._nodes[lowest.bit_length() - 1]
            mask ^= lowest
