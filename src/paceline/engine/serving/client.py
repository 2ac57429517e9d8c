"""The end of a process that joins a server: its connection, its replica, and A when it leaves."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, final

from torch import Tensor

from paceline.core.data_order import BatchRange
from paceline.core.errors import InputError, WorkerError
from paceline.core.types import Seconds
from paceline.engine.base import Job, loop_message
from paceline.engine.server import messages
from paceline.engine.server.calls import JSON, SocketPeer
from paceline.engine.server.messages import Bytes, ReplicaAssignment, Reply, ServerGrant
from paceline.engine.server.peer import Peer, PeerError, PeerLostError, PendingResult
from paceline.engine.server.push_client import CancelFlag
from paceline.engine.server.served_replica import run_replica
from paceline.engine.server.server_link import ServerLinks
from paceline.engine.server.wire import CONNECT_S, StreamAddress
from paceline.engine.serving.address import ServerAddress
from paceline.engine.serving.host import RUN, facts
from paceline.engine.worker_metrics import SERVER_NAME
from paceline.replica.flat_state import FlatLayout

# Times that a server is asked within the timeout whether it is alive.
ASKS = 4


class JoinedServer:
    """A server that this process joins, until it leaves.

    Args:
        address: of the server.
        timeout_s: time without an answer after which it is given up; None: the server's own.

    Raises:
        InputError: nothing answers there, or the token is another one.
    """

    def __init__(self, address: ServerAddress, timeout_s: Seconds | None = None) -> None:
        self._address, self._cancel = address, CancelFlag(RUN)
        self._links: ServerLinks | None = None
        self._ended: str | None = None
        """Why the server has gone on without this process, or answers no more."""
        self._over = threading.Event()
        stream = StreamAddress(address.host, address.port, address.token.encode(), "")
        with contextlib.ExitStack() as closing:
            try:
                self._peer = ServerPeer(stream, self._told)
                closing.callback(self._peer.close)
                self.terms: Mapping[str, Any] = self._peer.begin("terms").result(CONNECT_S)
            except EOFError as error:
                raise InputError(
                    f"what listens at {address.text} does not take the token of {address.where}; write the one that "
                    f"{SERVER_NAME} in the server's out= has"
                ) from error
            except (OSError, PeerError) as error:  # TimeoutError, too
                raise InputError(
                    f"no server answers at {address.text}: {str(error) or type(error).__name__}; start it with "
                    "paceline.serve(…), or write the address that it has printed"
                ) from error
            closing.pop_all()
        self._timeout_s: Seconds = timeout_s or self.terms["timeout_s"]
        threading.Thread(target=self._watch, name="server", daemon=True).start()

    def join(self, job: Job) -> ReplicaAssignment:
        """Become a replica of the server's run.

        Raises:
            InputError: the server refuses it.
            WorkerError: the server is lost.
        """
        try:
            answer = self._peer.begin("join", facts(job), os.getpid(), socket.gethostname()).result()
        except PeerError as error:
            raise self.lost(error) from error
        if "refused" in answer:
            raise InputError(f"the server at {self._address.text} refuses this process: {answer['refused']}")
        return ReplicaAssignment(*answer["assignment"])

    def train(self, job: Job, assignment: ReplicaAssignment) -> Mapping[str, Tensor]:
        """Run the loop to its end; return A, parameters and buffers by full name, as it is when this process leaves.

        Raises:
            WorkerError: the server is lost, or has gone on without this process.
        """
        self._links = links = ServerLinks(RUN, [self._peer], 0.0)
        try:
            run_replica(job, assignment, links, self._cancel)
            arrays: Sequence[Bytes] = self._peer.begin("leave").result()
        except PeerError as error:
            raise self.lost(error) from error
        except BaseException as error:
            with contextlib.suppress(PeerError):
                self._peer.begin("fail", f"raised {type(error).__name__}: {error}"[:1000]).result()
            raise
        finally:
            self.close()
        module = job.program.build()
        state = messages.state_of(FlatLayout.of(module, job.running_buffers), arrays)
        names = module.state_dict().keys()
        return {name: tensor for name, tensor in state.named() if name in names}

    def lost(self, error: PeerError) -> WorkerError:
        """Return why a call has no answer, as the script is to see it."""
        where = f"the server at {self._address.text}"
        if self._ended is not None:
            return WorkerError(f"{where} {self._ended}")
        if isinstance(error, PeerLostError):
            return WorkerError(f"{where} is gone: {error}; what it has saved is in its checkpoint= and out=")
        return WorkerError(f"{where}: {error}")

    def close(self) -> None:
        """End the connection."""
        self._over.set()
        self._peer.close()

    def _told(self, method: str, *args: Any) -> None:
        if method == "cancel":
            self._cancel.cancel(*args)
        elif method == "expelled":
            self._break_off(f"has gone on without this process: {args[0]}")
        elif method == "failed":
            self._break_off(f"has failed: {args[0]}")

    def _break_off(self, why: str) -> None:
        """Have whoever waits for the server be told that it is lost."""
        self._ended = why
        if self._links is not None:
            self._links.break_off()
        self._peer.close()

    def _watch(self) -> None:
        """See whether the server is alive, as long as this process waits for it."""
        timeout_s = self._timeout_s
        while not self._over.wait(timeout_s / ASKS):
            try:
                self._peer.begin("alive").result(timeout_s)
            except TimeoutError:
                self._break_off(f"has not answered for {timeout_s:g} s")
                return
            except PeerError:
                return


@final
class ServerPeer(Peer):
    """The server, as the parts of a replica call it: their arguments and results are made of JSON.

    Args:
        address: of the server.
        told: takes what the server tells this process.
    """

    def __init__(self, address: StreamAddress, told: Callable[..., None]) -> None:
        self._address = address
        self._peer = SocketPeer(address, {"joins": True}, told, JSON)

    async def call(self, method: str, *args: Any) -> Any:
        return self.begin(method, *args).result()

    def begin(self, method: str, *args: Any) -> "_Pending":
        of_run = args[0] if method == "ask" else ""
        if of_run == "reported":
            args = of_run, loop_message(args[1])
        convert = {"stream": self._stream, "first": _reply}.get(of_run)
        return _Pending(self._peer.begin(method, *args), convert)

    def tell(self, method: str, *args: Any) -> None:
        self._peer.tell(method, *args)

    def put(self, arrays: Sequence[Bytes]) -> list[Any]:
        del arrays
        return []

    def close(self) -> None:
        """Close the connection; whoever waits is told that the server is lost."""
        self._peer.close()

    def _stream(self, told: Sequence[Any]) -> StreamAddress:
        """Return where the server takes pushes: it listens at one address, by which this process has reached it."""
        _, port, host_id, name = told
        return StreamAddress(self._address.host, port, self._address.token, host_id, name)


class _Pending(PendingResult):
    """A call whose result is converted."""

    def __init__(self, future: Future[Any], convert: Callable[[Any], Any] | None) -> None:
        self._future, self._convert = future, convert

    def result(self, timeout_s: Seconds | None = None) -> Any:
        """Wait for the result; raises TimeoutError where it has not come by then."""
        value = self._future.result(timeout_s)
        return value if self._convert is None else self._convert(value)


def _reply(told: Sequence[Any]) -> Reply:
    grant, arrays = told
    if grant is None:
        return None, []
    attempt, batches, version = grant
    return ServerGrant(attempt, BatchRange(*batches), version), arrays
