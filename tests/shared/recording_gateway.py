"""A gateway that records what it is sent and answers with the messages that it is given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from holdback import rpc
from holdback.v1 import inference_pb2, inference_pb2_grpc, types_pb2

STOP = types_pb2.FINISH_REASON_STOP
Response = inference_pb2.GenerateStreamResponse


def started() -> Response:
    return Response(started=inference_pb2.GenerationStarted(request_id="r", model="toy", seed=-5, prompt_tokens=3))


def delta(text: str, token_ids: list[int], index: int = 0) -> Response:
    logprobs = [types_pb2.TokenLogprobs(token_id=i, logprob=-0.5) for i in token_ids]
    return Response(delta=inference_pb2.ChoiceDelta(index=index, text=text, token_ids=token_ids, logprobs=logprobs))


def end(index: int = 0, **reason: Any) -> Response:
    stop_reason = inference_pb2.StopReason(**reason) if reason else None
    return Response(end=inference_pb2.ChoiceEnd(index=index, finish_reason=STOP, stop_reason=stop_reason))


def finished() -> Response:
    usage = types_pb2.Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
    return Response(finished=inference_pb2.GenerationFinished(usage=usage))


class Gateway(inference_pb2_grpc.InferenceServiceServicer):
    """Records the last request and answers with `events`, `response` or `error`; `hang` answers no more."""

    def __init__(self) -> None:
        self.request: Any = None
        self.events: list[Response] = []
        self.response: Any = None
        self.error: Exception | None = None
        self.hang = False
        self.called = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def GenerateStream(self, request: Any, context: Any) -> AsyncIterator[Response]:  # noqa: N802
        self.request = request
        self.called.set()
        for event in self.events:
            yield event
        await self._end(context)

    async def _answer(self, request: Any, context: Any) -> Any:
        self.request = request
        self.called.set()
        await self._end(context)
        return self.response

    async def _end(self, context: Any) -> None:
        if self.error is not None:
            await rpc.abort(context, self.error)  # type: ignore[arg-type]
        if self.hang:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()

    Generate = Abort = Tokenize = Detokenize = ListModels = GetModel = GetLoad = _answer
