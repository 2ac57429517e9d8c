"""A worker process: one replica, its loop, and its client of the server over the control block.

::

    worker   wait for a grant ... map A read-only, compute, write the Δ buffer, publish a completion ... wait

While a worker waits it computes slices of updates.
"""

import contextlib
import functools
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch

from paceline.comm import liveness
from paceline.comm.linux import keep_freed_memory
from paceline.comm.shared_pickle import SharedObject, unpack
from paceline.comm.wakeup import OWN_CORE, SHARED_CORES, EventFd, Polling, Wakeup
from paceline.core.data_order import BatchRange
from paceline.core.errors import encode_failure
from paceline.core.mesh import Coordinate
from paceline.core.types import Clock, Nanoseconds, ReplicaId, Seconds, Version
from paceline.device import CPU, synchronize, use
from paceline.engine.base import Job, LoopEvent, loop_message
from paceline.engine.client_worker import ClientWorker, ForwardChecks, GrantedClient, InstrumentedReplica
from paceline.engine.local.arena import ArenaLayout, ParameterArena
from paceline.engine.local.control_block import ARRIVED, CANCELLED, Completion, Grant
from paceline.engine.local.own_state import OwnStates
from paceline.engine.local.parallel_update import SliceOptimizer
from paceline.engine.run_context import RunContext, own_cores, set_threads_and_seed
from paceline.engine.worker_metrics import WorkerMetrics, remove_workers_file
from paceline.replica.base import Measured
from paceline.replica.flat_state import FlatLayout, FlatState
from paceline.replica.local_sgd import LocalSGD, WritesInPlace, autograd_of
from paceline.replica.operator_list import WARM_S
from paceline.trace.recorder import NullRecorder, Recorder


def main(args: dict[str, Any], fds: Sequence[int]) -> None:
    """Run a worker process that is a replica of its own.

    Args:
        args: ``place``, coordinates of this worker; ``remembers``, vectors of optimizer state in the arena; ``first``,
            micro-steps of workers before it that have died.
        fds: arena, job, eventfds of this worker and of main, link to main, and a file for spans if there is one.
    """
    arena_fd, job_fd, own_fd, main_fd, link_fd, *trace = fds
    replica = Coordinate(*args["place"]).replica
    with connected(job_fd, link_fd, functools.partial(encode_failure, replica)) as (job, link):
        recorder = Recorder(replica, 0, 0, trace[0]) if trace else NullRecorder()
        set_threads_and_seed(job, replica)
        context, module = RunContext(job), job.program.build()
        device = torch.device(context.device(replica))
        use(device)
        layout = FlatLayout.of(module, job.running_buffers)
        arena = ParameterArena(ArenaLayout.of(context, layout, args["remembers"]), arena_fd)
        polling = OWN_CORE if own_cores(job.strategy) else SHARED_CORES
        client = SharedMemoryClient(arena, replica, own_fd, main_fd, device, polling)
        liveness.last_acts.append(functools.partial(_say_orphaned, client, replica))
        step_bytes = 2 * layout.parameter_bytes if context.delta_slots else 0
        metrics = WorkerMetrics(arena.control.metrics, replica, recorder, step_bytes, context.per_step)
        delta = client.delta_buffer if device == arena.layout.device == CPU else None
        inner = context.replica(replica, module, layout, recorder, graphs_after=WARM_S, delta=delta)
        checks = None if job.strategy.compile else ForwardChecks(module, client)
        measured = InstrumentedReplica(inner, metrics, client, layout.parameter_bytes, checks)
        own, report = autograd_of(inner), functools.partial(report_to_main, link)
        worker = ClientWorker(context, replica, measured, client, metrics, args["first"], report=report, autograd=own)
        states = OwnStates.of(arena)
        if states is not None and isinstance(inner, (LocalSGD, WritesInPlace)):
            states.begin(context, replica, client.attempt, inner)
            client.leave = functools.partial(states.leave, replica, own=inner)
            client.asked = functools.partial(states.asked, replica)
        link.send(json.dumps({"ready": replica, "pid": os.getpid()}).encode())
        worker.run(job.loop)
        if states is not None and isinstance(inner, WritesInPlace):
            states.leave_last(replica, client.attempt, inner)


def report_to_main(link: socket.socket, event: LoopEvent) -> None:
    """Send main what a loop reports."""
    link.send(json.dumps(loop_message(event)).encode())


def _say_orphaned(client: "SharedMemoryClient", replica: ReplicaId) -> None:
    """Say on stderr why this worker ends: main itself, if it was killed, could not."""
    said = f"paceline: replica {replica} ends at its step {client.attempt}, for the main process was killed\n"
    os.write(2, said.encode())


@contextlib.contextmanager
def connected(
    job_fd: int, link_fd: int, message: Callable[[BaseException], bytes | None]
) -> Iterator[tuple[Job, socket.socket]]:
    """Context manager of a worker process: its job and its link to main.

    An error inside is sent over the link and ends the process with exit code 1.

    Args:
        job_fd: of the job.
        link_fd: of the socket to main.
        message: error -> message for main; None: the error is raised as it is.
    """
    keep_freed_memory()
    with socket.socket(fileno=link_fd) as link:
        try:
            job: Job = unpack(SharedObject(job_fd))
            job.torch_settings.apply()
            if job.out is not None:
                liveness.last_acts.append(functools.partial(remove_workers_file, job.out))
            yield job, link
        except BaseException as error:
            text = message(error)
            if text is None:
                raise
            with contextlib.suppress(OSError):  # main has exited, or has closed the link
                link.send(text)
            raise SystemExit(1) from error


@final
class SharedMemoryClient(GrantedClient):
    """The client of one replica.

    Args:
        arena: of the run.
        replica: of this worker.
        own_fd: eventfd that is notified when there is a grant or a slice for this replica.
        main_fd: eventfd to notify when there is a completion or a finished slice for main.
        device: computes Δ, and has written it before an attempt is reported as complete.
        polling: how it waits for a grant.
    """

    def __init__(
        self,
        arena: ParameterArena,
        replica: ReplicaId,
        own_fd: int,
        main_fd: int,
        device: torch.device = CPU,
        polling: Polling = SHARED_CORES,
    ) -> None:
        super().__init__(arena.control.completed[replica])
        self._device = device
        self._arena, self._control, self._replica = arena, arena.control, replica
        self._wakeup = Wakeup(EventFd(own_fd), arena.control.sleep_flag(replica), polling=polling)
        self._main = Wakeup(EventFd(main_fd), arena.control.sleep_flag(None))
        self._in_place = arena.layout.slots == 0
        self._slices = SliceOptimizer(arena)
        self.leave: Callable[[Clock], None] = lambda _: None
        """Leaves a copy of what the replica keeps after an attempt."""
        self.asked: Callable[[], bool] = lambda: False
        """Returns whether main waits for one."""
        self.grant = Grant(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        """The newest grant."""
        self._version = 0
        self._began_ns: Nanoseconds = 0
        self._completed_ns: Nanoseconds = 0

    def wait_for_grant(self) -> bool:
        """Wait for a grant after the last completion and return whether to go on; computes slices meanwhile."""
        control, replica = self._control, self._replica
        while not control.ended(replica):
            if self._under_way:
                return True
            if self.asked():
                self.leave(self.attempt)
            if self.attempt < control.last_allowed(replica):
                self.grant = grant = control.read_grant(replica)
                ahead = (self.attempt + 1 - grant.attempt) * grant.micro_steps  # within the grant's lead
                self._batches = BatchRange(grant.stream, grant.first + ahead, grant.micro_steps)
                self._done, self._under_way = 0, True
                # How long main took to answer, and a step: the wakeup spins before it sleeps if that pays.
                self._wakeup.expect(grant.at_ns - self._completed_ns, self._completed_ns - self._began_ns)
                self._began_ns = time.monotonic_ns()
                self.attempt += 1
                # A replica that writes A in place reads it with all completed steps of other replicas in it.
                self._version = sum(control.steps.tolist()) if self._in_place else grant.version
                return True
            part = control.pending_slice(replica)
            if part is not None:
                control.finish_slice(replica, part, self._slices.step(control.read_task(), part))
                self._main.notify()
            elif not self._wakeup.spin(self._has_news):
                self._wakeup.sleep(self._has_news, self._wakeup.event.wait, math.inf)
        return False

    def place(self) -> tuple[int, Version, int]:
        """Return the buffer and the version of the A that is granted, and the slot of its Δ."""
        return self.grant.buffer, self.grant.version, self.grant.slot

    def pull(self) -> FlatState:
        if self._in_place:
            return self._arena.version(0)
        state = self._arena.mapped.get(f"readonly {self.grant.buffer}")
        state = state if state is not None else self._arena.readonly_version(self.grant.buffer)
        state.version = self.grant.version
        return state

    def last_state(self) -> FlatState | None:
        """Return a copy of the newest A that is whole before and after copying; None: replicas write where it is."""
        if self._in_place or self._arena.layout.own_bytes:
            return None
        versions = self._control.versions
        while True:
            buffer = max(range(len(versions)), key=versions.__getitem__)
            version = versions[buffer]
            state = self._arena.readonly_version(buffer).clone()
            if versions[buffer] == version:
                return state

    def delta_buffer(self) -> FlatState:
        if self._in_place:
            return self._arena.version(0)
        state = self._arena.mapped.get(f"delta {self._replica} {self.grant.slot}")
        return state if state is not None else self._arena.delta(self._replica, self.grant.slot)

    def cancelled(self) -> bool:
        """Return whether the attempt under way was cancelled, or the run has ended."""
        return self._control.cancelled[self._replica] >= self.attempt or self._control.ended(self._replica)

    def pause(self, seconds: Seconds) -> None:
        """Sleep for a delay of the job, or until cancelled."""
        until = time.monotonic() + seconds
        self._control.paused_until_ns[self._replica] = int(until * 1e9)
        while not self.cancelled() and (left := until - time.monotonic()) > 0:
            self._wakeup.sleep(self.cancelled, self._wakeup.event.wait, left)

    def _has_news(self) -> bool:
        control, replica = self._control, self._replica
        return (
            control.last_allowed(replica) > self.attempt
            or control.ended(replica)
            or control.pending_slice(replica) is not None
            or self.asked()
        )

    def push(self, measured: Measured, *, cancelled: bool = False) -> None:
        """Publish the end of the attempt, after Δ was written: main reads the buffer once it sees the completion."""
        attempt, slot, control = self.attempt, self.grant.slot, self._control
        self.leave(attempt)
        synchronize(self._device)
        self._under_way, self._completed_ns = False, time.monotonic_ns()
        facts = measured.samples, measured.finite, measured.loss, self._completed_ns
        ending = CANCELLED if cancelled else ARRIVED
        completion = Completion(ending, attempt, self._version, slot, *facts, *(measured.micro or ()))
        control.write_completion(self._replica, completion)
        # With a lead, main is woken when half of it is used up, and grants more before this replica has to wait.
        if 2 * attempt >= control.granted(self._replica) + control.last_allowed(self._replica):
            self._main.notify()
