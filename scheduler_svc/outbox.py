"""What one gateway has not been told yet.

While its stream takes messages, each step's updates leave at once as one message. While it does not, updates of one
request are merged, so what is held is bounded by the lengths of the answers, and the scheduler never waits for a
gateway.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
    token_ids: list[int]
    logprobs: list[tuple[int, TokenLogprobs]]


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
        token_ids: list[int],
        logprobs: Sequence[TokenLogprobs | None] | None,
    ) -> None:
        """New outputs of a request; they follow those given before without a gap. `token_ids` is the outbox's then."""
        pending = self._pending.get(handle)
        offset = 0
        if pending is None:
            pending = self._pending[handle] = _Pending(output_index, token_ids, [])
        else:
            offset = len(pending.token_ids)
            pending.token_ids += token_ids
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
        parts = self._take_parts()
        updates.handles.extend(parts)
        updates.output_indices.extend([part.output_index for part in parts.values()])
        updates.token_ids.extend(itertools.chain.from_iterable([part.token_ids for part in parts.values()]))
        if len(updates.token_ids) != len(parts):
            updates.num_new_tokens.extend([len(part.token_ids) for part in parts.values()])
        if any(part.logprobs for part in parts.values()):
            _fill_logprobs(updates, parts.values())
        if not self._pending:
            updates.ended.extend(self._ended)
            self._ended.clear()

    def _take_parts(self) -> dict[int, _Pending]:
        """At most a message full of tokens, by handle; what is left stays."""
        room = MAX_TOKENS_PER_MESSAGE
        if sum([len(pending.token_ids) for pending in self._pending.values()]) <= room:
            parts, self._pending = self._pending, {}
            return parts
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


def _fill_logprobs(updates: scheduler_pb2.RequestUpdates, parts: Iterable[_Pending]) -> None:
    start = 0
    for part in parts:
        for offset, entry in part.logprobs:
            updates.logprobs.add(token_index=start + offset, logprobs=codec.encode_logprobs(entry))
        start += len(part.token_ids)
