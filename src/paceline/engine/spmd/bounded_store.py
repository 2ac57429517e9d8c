"""The job's c10d store with a bound on each answer.

A client of a TCPStore waits in C++ for the answer to each request, and waits for ever where the network drops it: no
error comes, and no timeout of the store's own applies to most requests (torch 2.13). So each request is made in a
thread that is left alone if the time is up. It then keeps the client's lock, and later requests end the same way.
"""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store

from paceline.core.errors import WorkerError
from paceline.core.types import Seconds

T = TypeVar("T")


def bounded(call: Callable[[], T], timeout_s: Seconds, name: str) -> T:
    """Return what a call returns that may block in C++ for ever; it is left alone in its thread if the time is up.

    Raises:
        WorkerError: it did not return in time.
    """
    results: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        try:
            results.append((call(), None))
        except BaseException as error:
            results.append((None, error))

    thread = threading.Thread(target=run, name=f"paceline-{name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not results:
        raise WorkerError(f"{name} did not answer within {timeout_s:g} s")
    value, error = results[0]
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


@dataclass(frozen=True)
class BoundedStore:
    """A c10d store each of whose answers is waited for so long: of one that is cut off there are none, and no error.

    Args:
        store: with a prefix.
        timeout_s: longest wait for one answer.
    """

    store: Store
    timeout_s: Seconds

    def get(self, key: str) -> bytes:
        return self._call(lambda: self.store.get(key))

    def set(self, key: str, value: str) -> None:
        self._call(lambda: self.store.set(key, value))

    def check(self, keys: Sequence[str]) -> bool:
        return self._call(lambda: self.store.check(list(keys)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._call(lambda: self.store.compare_set(key, expected, desired))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        bound_s = self.timeout_s + timeout.total_seconds()
        bounded(lambda: self.store.wait(list(keys), timeout), bound_s, "the job's store")

    def found(self, key: str) -> Any:
        """Return the JSON value of a key, or None."""
        return json.loads(self.get(key)) if self.check([key]) else None

    def _call(self, call: Callable[[], T]) -> T:
        return bounded(call, self.timeout_s, "the job's store")
