"""Which nodes of a graph share memory that one of them writes, as far as it can be told without running it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from paceline.replica.pipeline.effects import has_parameters, roots, written
from paceline.replica.pipeline.kinds import child

_GIVEN = ("placeholder", "get_attr")


@dataclass(frozen=True)
class Storage:
    """What in-place operators do to a graph."""

    roots: Mapping[Node, frozenset[Node]]
    """Node -> those in whose memory its result may lie: itself, and what it hands on."""
    written: frozenset[Node]
    """In whose memory something is written."""
    together: Sequence[Sequence[Node]]
    """Nodes that have to be in one part: a write, and who made or used that memory before it."""
    written_by_modules: frozenset[Node]
    """What a module with parameters of its own may write: it is not kept with what made it."""

    def lent(self) -> frozenset[Node]:
        """What may lie in the memory of a parameter or a buffer, which the next micro-batch or update may write."""
        return frozenset(n for n, lies_in in self.roots.items() if any(root.op == "get_attr" for root in lies_in))

    def stays(self, node: Node) -> bool:
        """Whether what it gives is never written."""
        return self.written.isdisjoint(self.roots[node])


def storage(graph: GraphModule) -> Storage:
    """Follow each tensor through views and in-place operators."""
    lies_in = roots(graph)
    touching = _touching(graph, lies_in)
    order = {node: index for index, node in enumerate(graph.graph.nodes)}
    everything: set[Node] = set()
    copied: set[Node] = set()
    together = []
    for node in graph.graph.nodes:
        targets = {root for each in written(node, graph) for root in lies_in[each]}
        module = child(node, graph)
        if module is not None and has_parameters(module):
            copied |= targets
            continue
        everything |= targets
        if targets:
            together.append([node, *(n for r in targets for n in touching[r] if order[n] <= order[node])])
            together.append([n for r in targets if r.op in _GIVEN for n in _users(r, touching, lies_in)])
    return Storage(lies_in, frozenset(everything), together, frozenset(copied))


def _users(
    given: Node, touching: Mapping[Node, Sequence[Node]], lies_in: Mapping[Node, frozenset[Node]]
) -> Sequence[Node]:
    """Who reads an input or a buffer itself, before or after it is written: each part has its own, so one part only."""
    return [n for n in touching[given] if any(i.op in _GIVEN and given in lies_in[i] for i in n.all_input_nodes)]


def _touching(graph: GraphModule, lies_in: Mapping[Node, frozenset[Node]]) -> dict[Node, list[Node]]:
    """Node -> the nodes that read, write or hand on its memory."""
    touching: dict[Node, list[Node]] = {node: [] for node in graph.graph.nodes}
    for node in graph.graph.nodes:
        if node.op.startswith("call"):
            for root in lies_in[node].union(*(lies_in[each] for each in node.all_input_nodes)):
                touching[root].append(node)
    return touching
