"""An answer while it comes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Self

import grpc.aio

from holdback.answers import Piece
from holdback.endpoints import Endpoint
from holdback.errors import (
    AlreadyExistsError,
    HoldbackError,
    InternalError,
    RequestAbortedError,
)
from holdback.forks import Owner
from holdback.resumption import Progress
from holdback.retries import Backoff, Failure
from holdback.types import Usage
from holdback.v1 import inference_pb2

StreamCall = grpc.aio.UnaryStreamCall[inference_pb2.GenerateStreamRequest, inference_pb2.GenerateStreamResponse]
StartCall = Callable[[inference_pb2.GenerateStreamRequest], tuple[Endpoint, StreamCall]]
"""Sends a request to the gateway whose turn it is. Raises DeadlineExceededError when it is too late for it."""


class GenerationStream:
    """An answer while it comes: an async iterator of pieces.

    When the connection or the gateway is lost, the stream goes on at the last token that came, at another gateway if
    there is one; who iterates sees a pause. The request ends with `close`, with the end of `async with`, and when
    nothing refers to the stream any more, as after leaving the loop early.

    Attributes:
        num_resumes: how often the stream broke and went on.
    """

    def __init__(
        self, request: inference_pb2.Generation, start: StartCall, backoff: Backoff, *, max_resumes: int
    ) -> None:
        self.num_resumes = 0
        self._owner = Owner()
        self._progress = Progress(request)
        self._start = start
        self._backoff = backoff
        self._max_resumes = max_resumes
        self._closed = asyncio.Event()
        self._has_come = False  # anything, on the present call
        self._is_over = False
        self._endpoint, self._call = start(inference_pb2.GenerateStreamRequest(generation=request))

    @property
    def request_id(self) -> str:
        """Known with the first piece, as `model`, `seed` and `prompt_tokens`; empty until then.

        A stream that went on may have another id than before, where the old one was still held.
        """
        return self._progress.started.request_id

    @property
    def model(self) -> str:
        """That answers, by its first name."""
        return self._progress.started.model

    @property
    def seed(self) -> int:
        """Of choice 0."""
        return self._progress.started.seed

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self._progress.started.prompt_tokens

    @property
    def usage(self) -> Usage | None:
        """Of the whole answer; None until that is complete."""
        return self._progress.usage

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        while True:
            try:
                piece = await self._next_piece()
            except grpc.aio.AioRpcError as failure:
                await self._go_on_after(failure)
                continue
            except asyncio.CancelledError:
                raise_if_closed()
                self._call.cancel()
                raise
            if piece is None:
                raise StopAsyncIteration
            return piece

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(RuntimeError, AttributeError):  # the event loop is gone, or there never was a call
            self._cancel()

    def close(self) -> None:
        """Ends the request if it still runs; who iterates over it gets RequestAbortedError."""
        self._closed.set()
        self._cancel()

    def _cancel(self) -> None:
        if self._owner.is_here:
            self._call.cancel()

    async def _next_piece(self) -> Piece | None:
        """The next piece; None at the end."""
        if self._is_over:
            return None
        # no generator: it would refer to itself, and a loop that is left would go on at the gateway
        while isinstance(response := await self._call.read(), inference_pb2.GenerateStreamResponse):
            self._has_come = True
            self._backoff.reset()
            piece = self._progress.take(response)
            if piece is not None:
                return piece
        if self.usage is None:
            raise InternalError("the gateway ended the stream without saying that it is complete")
        return None

    async def _go_on_after(self, failed: grpc.aio.AioRpcError) -> None:
        """Makes the next call, which goes on where this one ended. Raises what the failure means if there is none."""
        if self._closed.is_set():
            raise RequestAbortedError("the stream was closed on this side") from failed
        failure = Failure.of(failed, self._endpoint)
        if failure.was_lost and self._progress.has_ended:
            self._progress.finish()
            self._is_over = True
            return
        wait_s = self._wait_after(failure)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), wait_s)
            raise RequestAbortedError("the stream was closed on this side")
        self._has_come = False
        self._endpoint, self._call = self._start(
            inference_pb2.GenerateStreamRequest(generation=self._rest(failure.error))
        )

    def _wait_after(self, failure: Failure) -> float:
        """Seconds until the next call. Raises the failure's error where none may be made."""
        is_held_still = self.num_resumes > 0 and isinstance(failure.error, AlreadyExistsError)
        if not self._has_come and (failure.was_not_taken or is_held_still):
            return self._backoff.wait_after(failure.error)
        if not failure.was_lost:
            raise failure.error
        if self._progress.num_choices > 1:
            raise failure.explain(f"an answer of n = {self._progress.num_choices} choices cannot be resumed")
        if self.num_resumes >= self._max_resumes:
            raise failure.explain(f"the stream was resumed {self.num_resumes} times, which is max_resumes")
        self.num_resumes += 1
        return self._backoff.wait_after(failure.error)

    def _rest(self, error: HoldbackError) -> inference_pb2.Generation:
        request = self._progress.rest()
        if isinstance(error, AlreadyExistsError):
            # A gateway that has not noticed yet that the old call is gone. It will; this one takes another id.
            request.request_id = ""
        return request


def raise_if_closed() -> None:
    """gRPC cancels the awaiting task when a call or client is closed; nobody has asked that task to stop."""
    task = asyncio.current_task()
    if task is not None and not task.cancelling():
        raise RequestAbortedError("the call was closed on this side") from None
