"""The waiting queue: first come, first served, and any request can be taken out by its id.

A scheduler needs only the small protocol `WaitingQueue`. On its own it has a `RequestQueue`; a lane of the dispatcher
gets a view of the one global queue instead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from holdback.errors import AlreadyExistsError
from scheduler_svc.core.request import Request


class WaitingQueue(Protocol):
    """Requests that are bound to no lane, in the order in which they are to be bound.

    Every operation but iteration must cost the same however many requests wait (K9). A scheduler peeks at the head in
    each step and takes it in the step that schedules its first chunk.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    def __contains__(self, req_id: object) -> bool: ...

    def peek(self) -> Request | None:
        """The head, without taking it; None where there is none."""
        ...

    def popleft(self) -> Request:
        """Takes the head. Raises IndexError where there is none."""
        ...

    def append(self, request: Request) -> None: ...

    def appendleft(self, request: Request) -> None: ...

    def remove(self, req_id: str) -> Request | None:
        """Takes the request of that id, wherever it is; None where there is none."""
        ...


class RequestQueue:
    """The plain `WaitingQueue`. Every operation but iteration is O(1)."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, req_id: object) -> bool:
        return req_id in self._requests

    def peek(self) -> Request | None:
        return next(iter(self._requests.values()), None)

    def popleft(self) -> Request:
        if not self._requests:
            raise IndexError("popleft from an empty queue")
        return self._requests.popitem(last=False)[1]

    def append(self, request: Request) -> None:
        """Raises AlreadyExistsError: a request of this id waits."""
        if request.req_id in self._requests:
            raise AlreadyExistsError(f"req_id is {request.req_id!r}; allowed: an id that is not waiting")
        self._requests[request.req_id] = request

    def appendleft(self, request: Request) -> None:
        """Raises AlreadyExistsError: a request of this id waits."""
        self.append(request)
        self._requests.move_to_end(request.req_id, last=False)

    def remove(self, req_id: str) -> Request | None:
        return self._requests.pop(req_id, None)
