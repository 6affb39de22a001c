"""What one gateway has not been told yet.

While its stream takes messages, each step's updates leave at once as one message. While it does not, updates of one
request are merged, so what is held is bounded by the lengths of the answers, and the scheduler never waits for a
gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdback import codec, rpc
from holdback.errors import HoldbackError
from holdback.types import FinishReason, TokenLogprobs, Usage
from holdback.v1 import scheduler_pb2

MAX_TOKENS_PER_MESSAGE = 65_536
"""Bounds a merged message: with 20 log-probabilities for each token about 11 MB, below the limit of `rpc`."""


@dataclass(slots=True)
class _Pending:
    """New tokens of one request: contiguous outputs from `output_index` on; logprobs by offset into `token_ids`."""

    output_index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)


class Outbox:
    """Collects updates; a writer takes them as messages, in an order that each request's reader can rely on."""

    def __init__(self) -> None:
        self._pool: scheduler_pb2.PoolStatus | None = None
        self._started: list[scheduler_pb2.RequestStarted] = []
        self._pending: dict[int, _Pending] = {}
        self._ended: list[scheduler_pb2.RequestEnded] = []
        self._filled = asyncio.Event()

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
        handle: int,
        output_index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None] | None,
    ) -> None:
        """New outputs of a request; they follow those given before without a gap."""
        pending = self._pending.get(handle)
        if pending is None:
            pending = self._pending[handle] = _Pending(output_index)
        offset = len(pending.token_ids)
        pending.token_ids.extend(token_ids)
        if logprobs:
            pending.logprobs += [(offset + i, entry) for i, entry in enumerate(logprobs) if entry is not None]
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

    async def wait(self) -> None:
        """Returns when there is something to take."""
        await self._filled.wait()

    def take(self) -> scheduler_pb2.ConnectResponse | None:
        """The next message, or None when all is told. Ends go after the last tokens of all."""
        if self._pool is not None:
            response = scheduler_pb2.ConnectResponse(pool=self._pool)
            self._pool = None
            return response
        if not (self._started or self._pending or self._ended):
            self._filled.clear()
            return None
        response = scheduler_pb2.ConnectResponse()
        self._fill(response.updates)
        return response

    def _fill(self, updates: scheduler_pb2.RequestUpdates) -> None:
        updates.started.extend(self._started)
        self._started.clear()
        counts = self._move_tokens(updates)
        if any(count != 1 for count in counts):
            updates.num_new_tokens.extend(counts)
        if not self._pending:
            updates.ended.extend(self._ended)
            self._ended.clear()

    def _move_tokens(self, updates: scheduler_pb2.RequestUpdates) -> list[int]:
        """Moves at most a message full of tokens, oldest request first; returns how many of each."""
        handles, indices, counts, token_ids = [], [], [], list[int]()
        for handle in list(self._pending):
            if len(token_ids) == MAX_TOKENS_PER_MESSAGE:
                break
            part = self._split(handle, MAX_TOKENS_PER_MESSAGE - len(token_ids))
            for offset, entry in part.logprobs:
                index = len(token_ids) + offset
                updates.logprobs.add(token_index=index, logprobs=codec.encode_logprobs(entry))
            handles.append(handle)
            indices.append(part.output_index)
            counts.append(len(part.token_ids))
            token_ids += part.token_ids
        updates.handles.extend(handles)
        updates.output_indices.extend(indices)
        updates.token_ids.extend(token_ids)
        return counts

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
