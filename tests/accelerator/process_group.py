"""Process groups of ranks of one host for tensors on the device ``sim``: the ``shm`` backend, on the device's memory.

``simshm`` carries what is on the device, as ``nccl`` does, and ``simshm_cpu`` what is on the CPU as well, as
``cpu:gloo,cuda:nccl`` does; torch takes no such words for groups that are written in Python. What they read and write
on the device is ``copies.collective_bytes``, since between real devices it would not cross the host. Importing this
module registers both, and installs the device in Python unless there is one.
"""

import functools
import importlib
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.shm import process_group as shm
from paceline.comm.shm.process_group import PythonProcessGroup, ShmProcessGroup
from tests.accelerator.device_module import NAME as DEVICE
from tests.accelerator.device_module import as_host, copies, hardware

NAME, WITH_CPU = "simshm", "simshm_cpu"


def _by_shm(name: str) -> Callable[..., dist.Work]:
    """Return a method that makes a call of the group of the host, on the memory of the device."""

    def call(group: "SimProcessGroup", *arguments: Any, **options: Any) -> dist.Work:
        on_device = dict[int, tuple[Tensor, Tensor]]()
        arguments = [group.on_host(name, each, on_device) for each in arguments]
        options = {key: group.on_host(name, each, on_device) for key, each in options.items()}
        if name not in ("send", "recv") and on_device:
            group.asked[f"{group.group_name}:collectives"].append(
                f"{name} {[x.numel() for x, _ in on_device.values()]}"
            )
        work = getattr(group.host, name)(*arguments, **options)
        if on_device and name != "send":
            # Not a method of it: a cycle would keep the tensors of the collective.
            work.is_completed = functools.partial(_polled, weakref.ref(work))
        # DDP and functional collectives read them.
        work._outputs = [on_device[id(x)][1] if id(x) in on_device else x for x in work._outputs]
        return work

    return call


def _polled(work: "weakref.ref[dist.Work]") -> bool:
    copies.polls += 1
    found = work()
    assert found is not None, "who asks has it"
    return type(found).is_completed(found)


class SimProcessGroup(PythonProcessGroup):
    """Ranks of one host, each with tensors on its device.

    Args:
        host: the group that carries them.
        with_cpu: whether it carries tensors on the CPU, too.
    """

    asked: ClassVar[dict[str, list[str]]] = defaultdict[str, list[str]](list)
    """What this process has asked its groups for, in order: "group:messages 0, 1" (ranks) -> who sends each to whom;
    "group:collectives" -> each one, with the sizes of its tensors on the device."""

    supports_splitting = False  # torch asks where init_process_group is given device_id=

    def __init__(self, host: ShmProcessGroup, *, with_cpu: bool) -> None:
        super().__init__(host.rank(), host.size())
        self.host, self._with_cpu = host, with_cpu
        # torch sets it on a group of its own, which this one replaces; without it, a barrier warns.
        self.bound_device_id = torch.device(DEVICE, 0)
        # What torch makes to send objects in.
        self._device_types = (torch.device("cpu" if with_cpu else DEVICE),)

    def on_host(self, name: str, value: Any, on_device: dict[int, tuple[Tensor, Tensor]]) -> Any:
        """Return an argument with CPU tensors of the same memory in place of tensors on the device.

        Args:
            name: of the call.
            value: a tensor, or sequences of tensors; what else it is stays.
            on_device: grows by each of these, and the tensor on the device, by its id.

        Raises:
            RuntimeError: it is on the CPU, and the group carries none of these.
        """
        if isinstance(value, (list, tuple)):
            return [self.on_host(name, each, on_device) for each in value]
        if not isinstance(value, Tensor):
            return value
        if value.device.type == DEVICE:
            copies.collective_bytes += value.nbytes
            hardware.launch()
            x = as_host(value.detach())
            on_device[id(x)] = x, value
            return x
        if not self._with_cpu:
            raise RuntimeError(f"{name}: No backend type associated with device type {value.device.type}")
        return value

    def barrier(self, opts: Any = None) -> dist.Work:
        return self.host.barrier(opts)

    broadcast = _by_shm("broadcast")
    allreduce = _by_shm("allreduce")
    reduce = _by_shm("reduce")
    allgather = _by_shm("allgather")
    all_gather_single = _allgather_base = _by_shm("all_gather_single")
    gather = _by_shm("gather")
    scatter = _by_shm("scatter")
    reduce_scatter = _by_shm("reduce_scatter")
    reduce_scatter_single = _reduce_scatter_base = _by_shm("reduce_scatter_single")
    alltoall = _by_shm("alltoall")
    all_to_all_single = alltoall_base = _by_shm("all_to_all_single")
    allreduce_coalesced = _by_shm("allreduce_coalesced")
    allgather_coalesced = _by_shm("allgather_coalesced")
    all_gather_single_coalesced = allgather_into_tensor_coalesced = _by_shm("all_gather_single_coalesced")
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = _by_shm("reduce_scatter_single_coalesced")

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        self._note(self.rank(), peer)
        return self._send(tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        self._note(peer, self.rank())
        return self._recv(tensors, peer, tag)

    def _note(self, source: int, destination: int) -> None:
        """Note a message: NCCL has those of two ranks of a group in one order, and waits for ever if they have two."""
        pair = sorted((source, destination))
        self.asked[f"{self.group_name}:messages {pair[0]}, {pair[1]}"].append(f"{source} -> {destination}")

    _send = _by_shm("send")
    _recv = _by_shm("recv")
    recv_anysource = _by_shm("recv_anysource")

    def _start_coalescing(self, device: Any = None) -> None:
        self.host._start_coalescing(device)

    def _end_coalescing(self, device: Any = None) -> dist.Work:
        return self.host._end_coalescing(device)

    def shutdown(self) -> None:
        self.host.shutdown()

    abort = shutdown

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return WITH_CPU if self._with_cpu else NAME

    name = getBackendName


def _create(options: Any, backend_options: Any, *, with_cpu: bool) -> SimProcessGroup:
    return SimProcessGroup(shm.create(options, backend_options), with_cpu=with_cpu)


def register() -> None:
    """Register both backends with torch.distributed, and the device in Python unless there is one; idempotent."""
    if not hasattr(torch, DEVICE):
        importlib.import_module("tests.accelerator.python_device")
    # torch takes the last one as the device's own.
    for name, with_cpu, devices in ((WITH_CPU, True, ["cpu", DEVICE]), (NAME, False, [DEVICE])):
        if not hasattr(dist.Backend, name.upper()):
            create = functools.partial(_create, with_cpu=with_cpu)
            dist.Backend.register_backend(name, create, extended_api=True, devices=devices)


register()
