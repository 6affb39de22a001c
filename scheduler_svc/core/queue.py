"""The waiting queue: first come, first served, or by priority, and any request can be taken out by its id.

A scheduler needs only the small protocol `WaitingQueue`. On its own it has a `RequestQueue` or a
`PriorityRequestQueue`; a lane of the dispatcher gets a view of the one global queue instead.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from holdback.errors import AlreadyExistsError
from scheduler_svc.core.config import SchedulingPolicy
from scheduler_svc.core.request import Request

Item = TypeVar("Item")
Key = tuple[float, ...]


class WaitingQueue(Protocol):
    """Requests that are bound to no lane, in the order in which they are to be bound.

    No operation but iteration may cost more with more that waits, but for a logarithm (K9). A scheduler peeks at the
    head in each step and takes it in the step that schedules its first chunk.
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


class KeyedQueue(Generic[Item]):
    """Items in the order of their keys, and any can be taken out by its id.

    `peek` is O(1), `push`, `pop` and `remove` are O(log n), each on average over many. An item that is taken out leaves
    its place in the heap behind; such places go when they come to the top, or when they are more than the items.
    """

    def __init__(self) -> None:
        self._items: dict[str, tuple[Key, Item]] = {}
        self._heap: list[tuple[Key, str]] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        """In order; O(n log n)."""
        return (item for _, item in sorted(self._items.values(), key=lambda entry: entry[0]))

    def __contains__(self, item_id: object) -> bool:
        return item_id in self._items

    def push(self, item_id: str, key: Key, item: Item) -> None:
        """Puts an item in. Keys are of one length, and no two are equal.

        Raises:
            AlreadyExistsError: an item of this id is in.
        """
        if item_id in self._items:
            raise AlreadyExistsError(f"req_id is {item_id!r}; allowed: an id that is not waiting")
        self._items[item_id] = key, item
        heapq.heappush(self._heap, (key, item_id))

    def peek(self) -> Item | None:
        """The item with the smallest key; None where there is none."""
        return self._items[self._heap[0][1]][1] if self._heap else None

    def pop(self) -> Item:
        """Takes the item with the smallest key. Raises IndexError where there is none."""
        if not self._heap:
            raise IndexError("pop from an empty queue")
        _, item = self._items.pop(self._heap[0][1])
        self._drop_left_places()
        return item

    def remove(self, item_id: str) -> Item | None:
        """Takes the item of that id; None where there is none."""
        entry = self._items.pop(item_id, None)
        if entry is None:
            return None
        self._drop_left_places()
        return entry[1]

    def _drop_left_places(self) -> None:
        """The top of the heap is an item again, or the heap is empty."""
        heap, items = self._heap, self._items
        if len(heap) > 2 * len(items):
            self._heap = heap = [(key, item_id) for item_id, (key, _) in items.items()]
            heapq.heapify(heap)
        while heap and not self._is_in(heap[0]):
            heapq.heappop(heap)

    def _is_in(self, place: tuple[Key, str]) -> bool:
        """Whether a place is that of an item; one of the same id may have come back with another key."""
        key, item_id = place
        entry = self._items.get(item_id)
        return entry is not None and entry[0] == key


class PriorityRequestQueue:
    """Lower `priority` first, within one priority first come, first served. O(log n), iteration O(n log n).

    A request that returns (`appendleft`) is put in front of its own priority.
    """

    def __init__(self) -> None:
        self._queue: KeyedQueue[Request] = KeyedQueue()
        self._next_number = itertools.count()
        self._next_number_in_front = itertools.count(-1, -1)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    def __contains__(self, req_id: object) -> bool:
        return req_id in self._queue

    def peek(self) -> Request | None:
        return self._queue.peek()

    def popleft(self) -> Request:
        return self._queue.pop()

    def append(self, request: Request) -> None:
        """Raises AlreadyExistsError: a request of this id waits."""
        self._queue.push(request.req_id, (request.spec.priority, next(self._next_number)), request)

    def appendleft(self, request: Request) -> None:
        """Raises AlreadyExistsError: a request of this id waits."""
        self._queue.push(request.req_id, (request.spec.priority, next(self._next_number_in_front)), request)

    def remove(self, req_id: str) -> Request | None:
        return self._queue.remove(req_id)


def new_queue(policy: SchedulingPolicy) -> WaitingQueue:
    """An empty queue of one scheduler."""
    return PriorityRequestQueue() if policy is SchedulingPolicy.PRIORITY else RequestQueue()
