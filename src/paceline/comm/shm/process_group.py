"""The ``shm`` process group of torch.distributed: checks arguments, and hands vectors to the collectives."""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.shm import collectives
from paceline.comm.shm.collectives import check_rule, cut, rule_of, vector, written_back
from paceline.comm.shm.p2p import Envelope, Messages, Receive
from paceline.comm.shm.progress import Operation, Work, Works, own_progress
from paceline.comm.shm.region import Region, StagedRounds, Steps, fingerprint
from paceline.comm.shm.rendezvous import of_this_start, rendezvous
from paceline.core.errors import InputError
from paceline.core.types import Seconds

# mypy: disable-error-code="override, assignment"
# torch's stubs give each method several signatures and each name one of its own; torch calls the first, by all names.

NAME = "shm"


class PythonProcessGroup(dist.ProcessGroup):
    """A group of CPU ranks written in Python; it keeps its own names, since it registers no backend that would."""

    # In torch's class these are properties without a setter, which attributes of a subclass stand before.
    group_name = group_desc = ""
    _device_types = (torch.device("cpu"),)
    """Devices of the tensors that DCP and object collectives make to send."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # its stub lacks the one for subclasses

    def _get_backend(self, _device: Any) -> Any:
        return self

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def _set_group_desc(self, description: str) -> None:
        self.group_desc = description


class ShmProcessGroup(PythonProcessGroup):
    """CPU ranks of one host.

    Args:
        region: their shared memory.
        timeout_s: longest wait of a call that is given no timeout.
    """

    def __init__(self, region: Region, timeout_s: Seconds) -> None:
        super().__init__(region.rank, region.size)
        self._region, self._timeout_s = region, timeout_s
        self._rounds, self._messages = StagedRounds(region), Messages(region)
        self._calls: deque[Operation] = deque()
        self._sends: list[deque[Operation]] = [deque() for _ in range(region.size)]
        self._progress = own_progress()
        self._coalesced: list[Work] | None = None
        self.barrier().wait()  # a rank that left at once would free its memory before others have mapped it

    # ------------------------------------------------------------------------------------------------- collectives

    def barrier(self, opts: Any = None) -> Work:
        return self._call("barrier", self._rounds.barrier(fingerprint("barrier")), opts)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        x = _single(tensors, "broadcast")
        v = vector(x)
        return self._call("broadcast", collectives.broadcast(self._rounds, v, self._root(opts)), opts, [x], [v])

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        x = _single(tensors, "all_reduce")
        rule = _rule(opts, x)
        if x.layout is torch.sparse_coo:
            if rule != "sum":
                raise InputError(f"backend shm adds sparse tensors, and has no {rule} of them; write x.to_dense()")
            return self._call("all_reduce", collectives.sparse_all_reduce(self._rounds, x), opts, [x])
        v = vector(x)
        return self._call("all_reduce", collectives.all_reduce(self._rounds, v, v, rule), opts, [x], [v])

    def combine(self, x: Tensor, out: Tensor, rule: str) -> Work:
        """All-reduce a dense tensor into another one, without the checks and options of torch.distributed.

        It is the same collective as all_reduce on other ranks.

        Args:
            x: stays as it is, unless ``out`` is the same.
            out: of the same shape.
            rule: ``sum``, ``max``, ...: one of :data:`paceline.comm.shm.collectives.RULES`.
        """
        check_rule(rule, x.dtype)
        v = vector(x)
        result = v if out is x else vector(out)
        steps = collectives.all_reduce(self._rounds, v, result, rule)
        return self._call("all_reduce", steps, None, [out], [result])

    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        x = _single(tensors, "reduce")
        v = vector(x)
        steps = collectives.reduce(self._rounds, v, self._root(opts), _rule(opts, x))
        return self._call("reduce", steps, opts, [x], [v])

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        outs, x = self._per_rank(outputs, "all_gather"), _single(inputs, "all_gather")
        v, *vs = _vectors("all_gather", [x, *outs])
        return self._call("all_gather", collectives.all_gather(self._rounds, vs, v), opts, outs, vs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        name, size = "all_gather_into_tensor", self._region.size
        v, x = _vectors(name, [output, input])
        if v.numel() != x.numel() * size:
            raise InputError(
                f"{name}: the output has {v.numel():,} elements, and {size} ranks give "
                f"{x.numel():,} each; make it of {x.numel() * size:,}"
            )
        steps = collectives.all_gather(self._rounds, cut(v, size, name), x)
        return self._call("all_gather", steps, opts, [output], [v])

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        x, root = _single(inputs, "gather"), self._root(opts)
        outs = self._per_rank(outputs, "gather") if self._region.rank == root else []
        v, *vs = _vectors("gather", [x, *outs])
        if any(out.numel() != x.numel() for out in outs):
            raise InputError(f"gather: every output must have the {x.numel():,} elements of the input")
        return self._call("gather", collectives.gather(self._rounds, vs, v, root), opts, outs, vs)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Work:
        out, root = _single(outputs, "scatter"), self._root(opts)
        parts = self._per_rank(inputs, "scatter") if self._region.rank == root else []
        v, *vs = _vectors("scatter", [out, *parts])
        if any(part.numel() != v.numel() for part in parts):
            raise InputError(f"scatter: every input must have the {v.numel():,} elements of the output")
        return self._call("scatter", collectives.scatter(self._rounds, v, vs, root), opts, [out], [v])

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Work:
        out, parts = _single(outputs, "reduce_scatter"), self._per_rank(inputs, "reduce_scatter")
        return self._reduce_scatter(out, [vector(part) for part in parts], opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self._reduce_scatter(output, cut(vector(input), self._region.size, "reduce_scatter_tensor"), opts)

    def _reduce_scatter(self, out: Tensor, parts: Sequence[Tensor], opts: Any) -> Work:
        _check_dtypes("reduce_scatter", [out, *parts])
        v, expected = vector(out), parts[self._region.rank].numel()
        if expected != v.numel():
            raise InputError(
                f"reduce_scatter: the output has {v.numel():,} elements, and the part for it has "
                f"{expected:,}; make both the same"
            )
        steps = collectives.reduce_scatter(self._rounds, v, parts, _rule(opts, out))
        return self._call("reduce_scatter", steps, opts, [out], [v])

    def reduce_scatter_taken(self, parts: Sequence[Tensor], taken: collectives.Taken) -> Work:
        """Sum all ranks' parts, and have this rank's sum taken piece by piece, while that is in the caches."""
        return self._call("reduce_scatter", collectives.reduce_scatter(self._rounds, taken, parts, "sum"), None)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        outs, parts = self._per_rank([outputs], "all_to_all"), self._per_rank([inputs], "all_to_all")
        vectors = _vectors("all_to_all", [*outs, *parts])
        vs = vectors[: len(outs)]
        steps = collectives.exchange(self._rounds, "all_to_all", vs, vectors[len(outs) :])
        return self._call("all_to_all", steps, opts, outs, vs)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None,
        input_split_sizes: Sequence[int] | None,
        opts: Any = None,
    ) -> Work:
        size, name = self._region.size, "all_to_all_single"
        v, x = _vectors(name, [output, input])
        outs = cut(v, size, name, output_split_sizes, len(output) if output.dim() else 1)
        parts = cut(x, size, name, input_split_sizes, len(input) if input.dim() else 1)
        return self._call(
            "all_to_all", collectives.exchange(self._rounds, "all_to_all", outs, parts), opts, [output], [v]
        )

    # ------------------------------------------------------------------------------------------- several in one call

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return Works([self.allreduce([x], opts) for x in tensors])

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        by_input = zip(*outputs, strict=True)  # each list holds the outputs of one rank
        return Works([self.allgather([outs], [x], opts) for outs, x in zip(by_input, inputs, strict=True)])

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        return Works([self.all_gather_single(out, x, opts) for out, x in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        return Works([self.reduce_scatter_single(out, x, opts) for out, x in zip(outputs, inputs, strict=True)])

    # torch has renamed these: up to 2.12 it calls them by the first names, later by the second, and both are public.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _start_coalescing(self, _device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, _device: Any = None) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return Works(works)

    # --------------------------------------------------------------------------------------------------- two ranks

    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int) -> Work:  # noqa: N803 (torch's name)
        x = _single(tensors, "send")
        self._check_rank("send", dstRank)
        v = vector(x)
        envelope = Envelope.of(v, tag)
        steps = self._messages.send(dstRank, envelope, v.view(torch.uint8))
        return self._begin(
            Operation(self._region, steps, lambda: f"send of {envelope}", lambda: [dstRank], self._sends[dstRank])
        )

    def recv(self, tensors: Sequence[Tensor], srcRank: int | None, tag: int) -> Work:  # noqa: N803 (torch's name)
        x = _single(tensors, "recv")
        if srcRank is not None:
            self._check_rank("recv", srcRank)
        v = vector(x)
        receive = Receive(srcRank, Envelope.of(v, tag), v.view(torch.uint8))
        steps = written_back(self._messages.receive(receive), [x], [v])
        awaited = partial(self._awaited_sources, srcRank)
        operation = Operation(self._region, steps, lambda: f"recv of {receive.envelope}", awaited)
        return self._begin(operation, [x], receive)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Work:
        return self.recv(tensors, None, tag)

    def _awaited_sources(self, source: int | None) -> list[int]:
        """Return the ranks that a receive waits for; any source will do as long as one is left."""
        if source is not None:
            return [source]
        others = [rank for rank in range(self._region.size) if rank != self._region.rank]
        exited = self._region.exited(others)
        return others if len(exited) == len(others) else [rank for rank in others if rank not in exited]

    # -------------------------------------------------------------------------------------------- names and shutdown

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return NAME

    name = getBackendName

    def shutdown(self) -> None:
        """Unmap the memory; calls that have not been waited for are dropped."""
        self._progress.poll()
        self._progress.drop(self._region)
        self._region.close()

    abort = shutdown

    # ------------------------------------------------------------------------------------------------------ inside

    def _call(
        self, name: str, steps: Steps, opts: Any, outputs: Sequence[Tensor] = (), vectors: Sequence[Tensor] = ()
    ) -> Work:
        """Start a collective, after all that were called before it.

        Args:
            name: of the collective.
            steps: of it.
            opts: torch's, or None.
            outputs: its results.
            vectors: of the outputs, if the steps write these.
        """
        if vectors:
            steps = written_back(steps, outputs, vectors)
        work = self._begin(Operation(self._region, steps, lambda: name, self._rounds.missing, self._calls), outputs)
        if opts is not None and not work.is_success() and (timeout_s := opts.timeout.total_seconds()) > 0:
            work.timeout_s = timeout_s
        return work

    def _begin(self, operation: Operation, outputs: Sequence[Tensor] = (), receive: Receive | None = None) -> Work:
        self._progress.start(operation)
        work = Work(operation, self._timeout_s, outputs, receive)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _root(self, opts: Any) -> int:
        root = int(opts.rootRank) if opts else 0
        self._check_rank("root", root)
        return root

    def _check_rank(self, name: str, rank: int) -> None:
        if not 0 <= rank < self._region.size:
            raise InputError(
                f"{name}: rank {rank} is not in a group of {self._region.size}; write 0 to {self._region.size - 1}"
            )

    def _per_rank(self, lists: Sequence[Sequence[Tensor]], name: str) -> Sequence[Tensor]:
        """Return the only list of tensors, one for each rank."""
        if len(lists) != 1 or len(lists[0]) != self._region.size:
            raise InputError(f"{name} takes one list of {self._region.size} tensors, one a rank")
        return lists[0]


def create(options: Any, _backend_options: Any) -> ShmProcessGroup:
    """Create a group, for torch.distributed."""
    timeout_s = options.timeout.total_seconds()
    ranks = list(options.global_ranks_in_group or range(options.group_size))
    region = rendezvous(of_this_start(options.store), options.group_id, options.group_rank, ranks, timeout_s)
    return ShmProcessGroup(region, timeout_s)


def _single(tensors: Sequence[Tensor], name: str) -> Tensor:
    if len(tensors) != 1:
        raise InputError(f"{name} takes one tensor, and was given {len(tensors)}; make one call for each")
    return tensors[0]


def _check_dtypes(name: str, tensors: Sequence[Tensor]) -> None:
    """Raise InputError if a rank's own tensors differ."""
    dtypes = {x.dtype for x in tensors}
    if len(dtypes) > 1:
        raise InputError(f"{name}: tensors of one dtype are needed, not {', '.join(sorted(map(str, dtypes)))}")


def _vectors(name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a rank's own tensors as vectors; raise InputError if their dtypes differ."""
    _check_dtypes(name, tensors)
    return [vector(x) for x in tensors]


def _rule(opts: Any, x: Tensor) -> str:
    rule = rule_of(opts.reduceOp) if opts else "sum"
    check_rule(rule, x.dtype)
    return rule
