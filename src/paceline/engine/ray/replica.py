"""The actor of one worker: the loop of a replica, or a follower of one that has several workers."""

import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from paceline.comm.linux import keep_freed_memory
from paceline.core.errors import encode_failure
from paceline.engine.base import Job
from paceline.engine.ray.actors import Actor, RayPeer, refuse_other_versions
from paceline.engine.server import messages
from paceline.engine.server.gang import Gang, GangListener
from paceline.engine.server.messages import ReplicaAssignment
from paceline.engine.server.peer import PeerError
from paceline.engine.server.push_client import CancelFlag
from paceline.engine.server.replica_group import follow, lead
from paceline.engine.server.served_replica import on_servers_clock, run_replica
from paceline.engine.server.server_link import ServerLinks
from paceline.engine.server.wire import StreamAddress
from paceline.engine.spmd.group_member import error_message
from paceline.engine.spmd.replica_group import PeerExited


class ReplicaActor(Actor):
    """The actor of a replica, kept from run to run; ``cancel`` and ``turn_to`` are called while ``run`` computes."""

    def __init__(self) -> None:
        keep_freed_memory()
        self._cancel = CancelFlag(-1)
        self._links: ServerLinks | None = None
        self._listener: GangListener | None = None
        """Where the other workers of the replica find this one."""
        self._named: list[tuple[int, int, RayPeer]] = []
        """Servers that have taken another's place: the run, whose place, and which."""

    def cancel(self, run: int, attempt: float) -> None:
        """Cancel an attempt; infinity ends training."""
        self._cancel.cancel(run, attempt)

    def turn_to(self, run: int, number: int, server: Any) -> None:
        """Call this server from now on in the place of one."""
        self._named = [*(named for named in self._named if named[0] == run), (run, number, RayPeer(server))]
        self._follow_names()

    def _follow_names(self) -> None:
        for run, number, server in self._named:
            if self._links is not None and run == self._links.run and self._links.each[number].server != server:
                self._links.each[number].turn_to(server)

    def listen(self) -> StreamAddress:
        """Return where the other workers find the first one, which this is, in the next run."""
        if self._listener is not None:
            self._listener.close()
        self._listener = GangListener(self._interface)
        return self._listener.address

    def run(
        self,
        parts: Sequence[messages.Bytes],
        assignment: ReplicaAssignment,
        servers: Sequence[Any],
        node: str,
        versions: Mapping[str, str],
        number: int = 0,
        listener: Sequence[Any] = (),
    ) -> messages.Ended:
        """Be a replica, or a worker of one, to the end of a run.

        Args:
            parts: of the job, which is packed.
            assignment: of the replica.
            servers: their actors, the first one first.
            node: of the first server.
            versions: on that node.
            number: of this worker in the replica.
            listener: future result of the first worker's ``listen``, where there are several.
        """
        self._cancel = cancel = CancelFlag(assignment.run)
        tell: Callable[[BaseException], bytes] = functools.partial(encode_failure, assignment.replica)
        try:
            refuse_other_versions(versions)  # this node may have joined the cluster later
            job: Job = messages.unpack(parts)
            job.torch_settings.apply()
            patience_s = job.timeout_s if job.strategy.standby else 0.0
            links = ServerLinks(assignment.run, [*map(RayPeer, servers)], patience_s)
            self._links = links
            self._follow_names()  # some may have been named before
            if not job.strategy.spread:
                ended = run_replica(job, assignment, links, cancel)
            else:
                gang = Gang(job, assignment.replica, self._interface, self._found(listener), self._listener)
                tell = functools.partial(error_message, gang.places[number])
                ended = follow(gang, assignment, number) if number else lead(gang, assignment, links, cancel)
            if node != self.place().node and ended.spans:
                ended = ended._replace(spans=on_servers_clock(ended.spans, links.first))
            return ended
        except PeerError:
            raise  # the server has ended
        except PeerExited:
            return messages.Ended(None, [])  # main sees which it was
        except BaseException as error:
            return messages.Ended(tell(error), [])
        finally:
            gc.collect()  # modules are in reference cycles, which would keep arrays in the object store

    @property
    def _interface(self) -> str:
        """Address by which Ray knows this host."""
        address: str = ray.util.get_node_ip_address()
        return address

    @staticmethod
    def _found(listener: Sequence[Any]) -> StreamAddress:
        """Return where the first worker is found."""
        try:
            address: StreamAddress = ray.get(listener[0])
        except ray.exceptions.RayActorError as error:
            raise PeerExited("the replica's first worker") from error
        return address
