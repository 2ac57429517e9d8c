"""What torch.distributed asks of a group that is written in Python.

The ``shm`` process group, as torch.distributed calls it: its arguments in, vectors out to the collectives.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from paceline.comm.shm import collectives, progress
from paceline.comm.shm.p2p import Receive, RecvMatching, SendQueue
from paceline.comm.shm.progress import Operation, Work, Works
from paceline.comm.shm.region import Region
from paceline.comm.shm.staging import CollectiveKind, ReduceRule, StagedRounds, Steps
from paceline.comm.shm.tensor_ops import check, cut, one, raw, returned, rule_of, same_dtype, vector
from paceline.core.errors import InputError
from paceline.core.types import Seconds

# mypy: disable-error-code="override, assignment"
# torch's stubs give each method several signatures and each name one of its own; torch calls the first, by all names.


class PythonProcessGroup(dist.ProcessGroup):
    """A group of CPU ranks that keeps its own names, since it registers no backend that would.

    Args:
        rank: mine.
        size: how many ranks there are.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # its stub lacks the one for subclasses
        self._name = self._description = ""

    @property
    def _device_types(self) -> list[torch.device]:
        """DCP and object collectives ask it where to put what they send."""
        return [torch.device("cpu")]

    def _get_backend(self, _device: Any) -> Any:
        return self

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description


# mypy: disable-error-code="override, assignment"
# torch's stubs give each method several signatures and each name one of its own; torch calls the first, by all names.


NAME = "shm"


class ShmProcessGroup(PythonProcessGroup):
    """CPU ranks of one host.

    Args:
        room: their shared memory.
        timeout_s: how long a call waits for others, where it is not told.
    """

    def __init__(self, room: Region, timeout_s: Seconds) -> None:
        super().__init__(room.rank, room.size)
        self._room, self._timeout_s = room, timeout_s
        self._rounds, self._inbox, self._outbox = StagedRounds(room), RecvMatching(room), SendQueue(room)
        self._calls: deque[Operation] = deque()
        self._sends: list[deque[Operation]] = [deque() for _ in range(room.size)]
        self._progress = progress.mine()
        self._together: list[Work] | None = None
        self.barrier().wait()  # who went on and left would take its memory along before others have found it

    # ------------------------------------------------------------------------------------------------- collectives

    def barrier(self, opts: Any = None) -> Work:
        return self._call("barrier", collectives.barrier(self._rounds), opts or BarrierOptions())

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        opts = opts or BroadcastOptions()
        x = one(tensors, "broadcast")
        v = vector(x)
        steps = collectives.broadcast(self._rounds, v, self._root(opts))
        return self._call("broadcast", returned(steps, [x], [v]), opts, [x])

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        opts = opts or AllreduceOptions()
        x = one(tensors, "all_reduce")
        if x.layout is torch.sparse_coo:
            collectives.check_sparse(_rule(opts, x))
            return self._call("all_reduce", collectives.sparse_all_reduce(self._rounds, x), opts, [x])
        v = vector(x)
        steps = collectives.all_reduce(self._rounds, v, _rule(opts, x))
        return self._call("all_reduce", returned(steps, [x], [v]), opts, [x])

    def combine(self, x: Tensor, out: Tensor, rule: ReduceRule) -> Work:
        """An all-reduce of dense tensors into another one, for callers who need nothing of torch.distributed's.

        ``x`` stays as it is, unless ``out`` is the same. Ranks that call all_reduce make the same call.
        """
        check(rule, x.dtype)
        v = vector(x)
        made = v if out is x else vector(out)
        steps = collectives.combine(self._rounds, v, made, rule)
        return self._begin(_all_reduce, returned(steps, [out], [made]), self._rounds.late, line=self._calls)

    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        opts = opts or ReduceOptions()
        x = one(tensors, "reduce")
        v = vector(x)
        steps = collectives.reduce_to(self._rounds, v, self._root(opts), _rule(opts, x))
        return self._call("reduce", returned(steps, [x], [v]), opts, [x])

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        outs, x = self._list(outputs, "all_gather"), one(inputs, "all_gather")
        same_dtype("all_gather", [x, *outs])
        vs = [vector(out) for out in outs]
        steps = collectives.all_gather(self._rounds, vs, vector(x))
        return self._call("all_gather", returned(steps, outs, vs), opts or AllgatherOptions(), outs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        same_dtype("all_gather_into_tensor", [input, output])
        v, x = vector(output), vector(input)
        if v.numel() != x.numel() * self._room.size:
            raise InputError(
                f"all_gather_into_tensor: the output has {v.numel():,} elements, and {self._room.size} ranks give "
                f"{x.numel():,} each; make it of {x.numel() * self._room.size:,}"
            )
        steps = collectives.all_gather(self._rounds, cut(v, self._room.size, "all_gather_into_tensor"), x)
        return self._call("all_gather", returned(steps, [output], [v]), opts or AllgatherOptions(), [output])

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        opts = opts or GatherOptions()
        x, root = one(inputs, "gather"), self._root(opts)
        outs = self._list(outputs, "gather") if self._room.rank == root else []
        same_dtype("gather", [x, *outs])
        vs = [vector(out) for out in outs]
        if any(v.numel() != x.numel() for v in vs):
            raise InputError(f"gather: every output must have the {x.numel():,} elements of the input")
        steps = collectives.gather(self._rounds, vs, vector(x), root)
        return self._call("gather", returned(steps, outs, vs), opts, outs)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Work:
        opts = opts or ScatterOptions()
        out, root = one(outputs, "scatter"), self._root(opts)
        parts = self._list(inputs, "scatter") if self._room.rank == root else []
        same_dtype("scatter", [out, *parts])
        v = vector(out)
        if any(part.numel() != v.numel() for part in parts):
            raise InputError(f"scatter: every input must have the {v.numel():,} elements of the output")
        steps = collectives.scatter(self._rounds, v, [vector(part) for part in parts], root)
        return self._call("scatter", returned(steps, [out], [v]), opts, [out])

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Work:
        out, parts = one(outputs, "reduce_scatter"), self._list(inputs, "reduce_scatter")
        return self._reduce_scatter(out, parts, [vector(part) for part in parts], opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        parts = cut(vector(input), self._room.size, "reduce_scatter_tensor")
        return self._reduce_scatter(output, [input], parts, opts)

    def _reduce_scatter(self, out: Tensor, given: Sequence[Tensor], parts: Sequence[Tensor], opts: Any) -> Work:
        opts = opts or ReduceScatterOptions()
        same_dtype("reduce_scatter", [out, *given])
        v = vector(out)
        if parts[self._room.rank].numel() != v.numel():
            raise InputError(
                f"reduce_scatter: the output has {v.numel():,} elements, and the part for it has "
                f"{parts[self._room.rank].numel():,}; make both the same"
            )
        steps = collectives.reduce_scatter(self._rounds, v, parts, _rule(opts, out))
        return self._call("reduce_scatter", returned(steps, [out], [v]), opts, [out])

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        outs, parts = self._list([outputs], "all_to_all"), self._list([inputs], "all_to_all")
        same_dtype("all_to_all", [*outs, *parts])
        vs = [vector(out) for out in outs]
        steps = collectives.exchange(self._rounds, CollectiveKind.all_to_all, vs, [vector(part) for part in parts])
        return self._call("all_to_all", returned(steps, outs, vs), opts or AllToAllOptions(), outs)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None,
        input_split_sizes: Sequence[int] | None,
        opts: Any = None,
    ) -> Work:
        same_dtype("all_to_all_single", [input, output])
        v, size, what = vector(output), self._room.size, "all_to_all_single"
        outs = cut(v, size, what, output_split_sizes, len(output) if output.dim() else 1)
        parts = cut(vector(input), size, what, input_split_sizes, len(input) if input.dim() else 1)
        steps = collectives.exchange(self._rounds, CollectiveKind.all_to_all, outs, parts)
        return self._call("all_to_all", returned(steps, [output], [v]), opts or AllToAllOptions(), [output])

    # ------------------------------------------------------------------------------------------- several in one call

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        alone = AllreduceOptions()
        alone.reduceOp = opts.reduceOp if opts else alone.reduceOp
        return Works([self.allreduce([x], alone) for x in tensors])

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        by_input = zip(*outputs, strict=True)  # each list holds what one rank gave
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
        self._together = []

    def _end_coalescing(self, _device: Any = None) -> dist.Work:
        together, self._together = self._together or [], None
        return Works(together)

    # --------------------------------------------------------------------------------------------------- two ranks

    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int) -> Work:  # noqa: N803 (torch's name)
        x = one(tensors, "send")
        self._refuse_rank("send", dstRank)
        steps = self._outbox.send(dstRank, tag, raw(vector(x)), x.dtype)
        return self._begin(_message("send", x, tag), steps, lambda: [dstRank], line=self._sends[dstRank])

    def recv(self, tensors: Sequence[Tensor], srcRank: int, tag: int) -> Work:  # noqa: N803 (torch's name)
        self._refuse_rank("recv", srcRank)
        return self._receive(tensors, srcRank, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Work:
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Sequence[Tensor], source: int | None, tag: int) -> Work:
        x = one(tensors, "recv")
        v = vector(x)
        receive = Receive(source, tag, raw(v), x.dtype)
        steps = returned(self._inbox.receive(receive), [x], [v])
        awaited = partial(self._sources, source)
        return self._begin(_message("recv", x, tag), steps, awaited, outputs=[x], receive=receive)

    def _sources(self, source: int | None) -> list[int]:
        """Who a receive waits for; any source will do as long as one is left."""
        if source is not None:
            return [source]
        others = [rank for rank in range(self._room.size) if rank != self._room.rank]
        gone = self._room.gone(others)
        return others if len(gone) == len(others) else [rank for rank in others if rank not in gone]

    # ------------------------------------------------------------------------------------------ names, and its end

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return NAME

    def name(self) -> str:
        return NAME

    def shutdown(self) -> None:
        """Let go of the memory; what has not been waited for is dropped."""
        self._progress.poll()
        self._progress.drop(self._room)
        self._room.close()

    abort = shutdown

    # ------------------------------------------------------------------------------------------------------ inside

    def _call(self, what: str, steps: Steps, opts: Any, outputs: Sequence[Tensor] = ()) -> Work:
        """A collective: after all that were called before it."""
        work = self._begin(lambda: what, steps, self._rounds.late, line=self._calls, outputs=outputs)
        if not work.is_success() and (timeout_s := opts.timeout.total_seconds()) > 0:
            work.timeout_s = timeout_s
        return work

    def _begin(
        self,
        what: Callable[[], str],
        steps: Steps,
        awaited: Callable[[], Sequence[int]],
        *,
        line: "deque[Operation] | None" = None,
        outputs: Sequence[Tensor] = (),
        receive: Receive | None = None,
    ) -> Work:
        operation = Operation(self._room, steps, what, awaited, line)
        self._progress.start(operation)
        work = Work(operation, self._timeout_s, outputs, receive)
        if self._together is not None:
            self._together.append(work)
        return work

    def _root(self, opts: Any) -> int:
        self._refuse_rank("root", opts.rootRank)
        return int(opts.rootRank)

    def _refuse_rank(self, what: str, rank: int) -> None:
        if not 0 <= rank < self._room.size:
            raise InputError(
                f"{what}: rank {rank} is not in a group of {self._room.size}; write 0 to {self._room.size - 1}"
            )

    def _list(self, given: Sequence[Sequence[Tensor]], what: str) -> Sequence[Tensor]:
        """The only list of tensors, one a rank."""
        if len(given) != 1 or len(given[0]) != self._room.size:
            raise InputError(f"{what} takes one list of {self._room.size} tensors, one a rank")
        return given[0]


def _all_reduce() -> str:
    return "all_reduce"


def _rule(opts: Any, x: Tensor) -> ReduceRule:
    rule = rule_of(opts.reduceOp)
    check(rule, x.dtype)
    return rule


def _message(what: str, x: Tensor, tag: int) -> Callable[[], str]:
    return lambda: f"{what} of {x.numel():,} {str(x.dtype).removeprefix('torch.')} with tag {tag}"
