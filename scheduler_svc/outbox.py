"""What one gateway has not been told yet.

While its stream takes messages, a step's tokens leave at once, as the lists that they came in. While it does not, those
of one request are merged, so what is held is bounded by the lengths of the answers, and the scheduler never waits for a
gateway.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdback import codec, rpc
from holdback.errors import HoldbackError
from holdback.types import FinishReason, TokenLogprobs, Usage
from holdback.v1 import scheduler_pb2

MAX_TOKENS_PER_MESSAGE = 65_536
"""Bounds a merged message: with 20 log-probabilities for each token about 11 MB, below the limit of `rpc`."""

MAX_REQUESTS_PER_MESSAGE = 5_000
"""Bounds the starts, and the ends, of a message; an end with a long reason has about 2 KB."""

MAX_STEPS_KEPT = 32
"""Steps that wait as they came; with one more the gateway is slow, and they are merged by request."""


@dataclass(slots=True)
class _Step:
    """One new token for each of some requests, as parallel lists that are not the outbox's to change."""

    handles: Sequence[int]
    output_indices: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None]


@dataclass(slots=True)
class _Pending:
    """New tokens of one request: contiguous outputs from `output_index` on; logprobs by offset into `token_ids`."""

    output_index: int
    token_ids: list[int]
    logprobs: list[tuple[int, TokenLogprobs]]


class Outbox:
    """Collects updates; a writer takes them as messages, in an order that each request's reader can rely on."""

    def __init__(self) -> None:
        self._pool: scheduler_pb2.PoolStatus | None = None
        self._started: list[scheduler_pb2.RequestStarted] = []
        # Tokens in `_pending` are older than those in `_steps`.
        self._pending: dict[int, _Pending] = {}
        self._steps: deque[_Step] = deque()
        self._ended: list[scheduler_pb2.RequestEnded] = []
        self._filled = asyncio.Event()
        self._is_closed = False

    def set_pool(self, status: scheduler_pb2.PoolStatus) -> None:
        """The latest status is sent; one that was not sent in time is dropped."""
        self._pool = status
        self._filled.set()

    def started(self, handle: int, *, num_cached_tokens: int, queued_ms: int, executor_id: str) -> None:
        self._started.append(
            scheduler_pb2.RequestStarted(
                handle=handle, num_cached_tokens=num_cached_tokens, queued_ms=queued_ms, executor_id=executor_id
            )
        )
        self._filled.set()

    def tokens(
        self,
        handles: Sequence[int],
        output_indices: Sequence[int],
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None] = (),
    ) -> None:
        """One new output for each of these requests; it follows those given before without a gap.

        Args:
            handles: each once. The other lists are parallel; none of them may change afterwards.
            logprobs: empty when no request asked.
        """
        self._steps.append(_Step(handles, output_indices, token_ids, logprobs))
        if len(self._steps) > MAX_STEPS_KEPT:
            self._merge()
        self._filled.set()

    def ended(
        self,
        handle: int,
        finish_reason: FinishReason,
        usage: Usage,
        *,
        stop_token_id: int | None = None,
        error: HoldbackError | None = None,
    ) -> None:
        message = scheduler_pb2.RequestEnded(
            handle=handle,
            finish_reason=codec.encode_finish_reason(finish_reason),
            stop_token_id=stop_token_id,
            usage=codec.encode_usage(usage),
        )
        if error is not None:
            message.error.CopyFrom(rpc.encode_error(error))
        self._ended.append(message)
        self._filled.set()

    def close(self) -> None:
        """The stream is over and nothing more goes out on it. A gateway that submits again is told on its next one."""
        self._is_closed = True
        self._filled.set()

    async def wait(self) -> None:
        """Returns when there is something to take."""
        await self._filled.wait()

    def take(self) -> scheduler_pb2.ConnectResponse | None:
        """The next message, or None when all is told. Ends go after the last tokens of all."""
        if self._pool is not None:
            response = scheduler_pb2.ConnectResponse(pool=self._pool)
            self._pool = None
            return response
        if self._is_closed or not (self._started or self._pending or self._steps or self._ended):
            self._filled.clear()
            return None
        response = scheduler_pb2.ConnectResponse()
        self._fill(response.updates)
        return response

    def _fill(self, updates: scheduler_pb2.RequestUpdates) -> None:
        if len(self._started) > MAX_REQUESTS_PER_MESSAGE:
            # Tokens and ends wait for the message in which the last start is told.
            updates.started.extend(self._started[:MAX_REQUESTS_PER_MESSAGE])
            del self._started[:MAX_REQUESTS_PER_MESSAGE]
            return
        updates.started.extend(self._started)
        self._started.clear()
        if self._pending:
            self._merge()
            _fill_parts(updates, self._take_parts())
        else:
            self._fill_steps(updates)
        if not self._pending and not self._steps:
            updates.ended.extend(self._ended[:MAX_REQUESTS_PER_MESSAGE])
            del self._ended[:MAX_REQUESTS_PER_MESSAGE]

    def _fill_steps(self, updates: scheduler_pb2.RequestUpdates) -> None:
        """At most a message full of steps, as they came."""
        num_tokens = 0
        while self._steps:
            step = self._steps[0]
            if num_tokens and num_tokens + len(step.token_ids) > MAX_TOKENS_PER_MESSAGE:
                return
            self._steps.popleft()
            updates.handles.extend(step.handles)
            updates.output_indices.extend(step.output_indices)
            updates.token_ids.extend(step.token_ids)
            for row, entry in enumerate(step.logprobs):
                if entry is not None:
                    updates.logprobs.add(token_index=num_tokens + row, logprobs=codec.encode_logprobs(entry))
            num_tokens += len(step.token_ids)

    def _merge(self) -> None:
        """Puts the tokens of each request together."""
        while self._steps:
            step = self._steps.popleft()
            rows = zip(step.handles, step.output_indices, step.token_ids, strict=True)
            for (handle, output_index, token_id), entry in itertools.zip_longest(rows, step.logprobs):
                pending = self._pending.get(handle)
                if pending is None:
                    pending = self._pending[handle] = _Pending(output_index, [], [])
                if entry is not None:
                    pending.logprobs.append((len(pending.token_ids), entry))
                pending.token_ids.append(token_id)

    def _take_parts(self) -> dict[int, _Pending]:
        """At most a message full of tokens, by handle; what is left stays."""
        room = MAX_TOKENS_PER_MESSAGE
        parts = {}
        for handle in list(self._pending):
            if room == 0:
                break
            parts[handle] = self._split(handle, room)
            room -= len(parts[handle].token_ids)
        return parts

    def _split(self, handle: int, room: int) -> _Pending:
        """Takes at most `room` tokens of a request; what is left stays."""
        pending = self._pending.pop(handle)
        if len(pending.token_ids) > room:
            self._pending[handle] = _Pending(
                pending.output_index + room,
                pending.token_ids[room:],
                [(offset - room, entry) for offset, entry in pending.logprobs if offset >= room],
            )
            pending.logprobs = [(offset, entry) for offset, entry in pending.logprobs if offset < room]
            del pending.token_ids[room:]
        return pending


def _fill_parts(updates: scheduler_pb2.RequestUpdates, by_handle: dict[int, _Pending]) -> None:
    parts = by_handle.values()
    updates.handles.extend(by_handle)
    updates.output_indices.extend([part.output_index for part in parts])
    updates.token_ids.extend(itertools.chain.from_iterable([part.token_ids for part in parts]))
    updates.num_new_tokens.extend([len(part.token_ids) for part in parts])
    _fill_logprobs(updates, parts)


def _fill_logprobs(updates: scheduler_pb2.RequestUpdates, parts: Iterable[_Pending]) -> None:
    start = 0
    for part in parts:
        for offset, entry in part.logprobs:
            updates.logprobs.add(token_index=start + offset, logprobs=codec.encode_logprobs(entry))
        start += len(part.token_ids)
