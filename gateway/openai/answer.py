"""One answer: from a checked request over its generations to a response, whole or as events.

The response begins with the first output, not before: an error that comes earlier has its own HTTP status. After that
it is an event, and the stream ends without `[DONE]`. A client that goes away ends the generations at once, for what the
connection says is listened to all the time. Writing waits for the reader, and while it does the generations merge.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.choice import Choice, Delta
from gateway.counts import HttpCounts
from gateway.detokenizer import Detokenizer
from gateway.generation import CallContext, GenerationRun, prompt_text, seed_of_choice
from gateway.generations import Generations
from gateway.limits import check_generation
from gateway.openai.errors import CLIENT_CLOSED, error_object, error_response
from gateway.openai.events import DONE, Events, error_event, merged
from gateway.openai.fields import GenerationRequest
from gateway.openai.logprobs import TextOffsets
from gateway.openai.observing import observation_of
from gateway.openai.shapes import Error, ResumableChoice, Resume, Usage
from gateway.openai.styles import ChoiceState, Style
from holdback.errors import HoldbackError, InternalError, InvalidArgumentError, UnavailableError
from holdback.tracing import trace_id_of
from holdback.types import FinishReason
from holdback.v1 import inference_pb2

log = structlog.get_logger(__name__)

CLIENT_LEFT = "CLIENT_LEFT"
"""What the log says of answers that nobody waits for any more."""

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answer(Response):
    """Answers one request. Nothing of it runs before the response is sent, and nothing afterwards."""

    def __init__(
        self,
        style: Style,
        request: GenerationRequest,
        call: CallContext,
        generations: Generations,
        counts: HttpCounts,
    ) -> None:
        super().__init__()
        self._style = style
        self._request = request
        self._call = call
        self._generations = generations
        self._counts = counts
        self._id = f"{style.id_prefix}-{uuid.uuid4().hex}"
        self._messages: list[inference_pb2.Generation] = []
        self._runs: list[GenerationRun] = []
        self._choices: dict[tuple[int, int], ChoiceState] = {}
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        observation_of(scope).request_id = self._id
        answering = asyncio.create_task(self._answer(scope, receive, send))
        leaving = asyncio.create_task(_until_client_leaves(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
            else:
                observation = observation_of(scope)
                observation.error, observation.status = CLIENT_LEFT, CLIENT_CLOSED  # also of a stream that had begun
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                await self._submit(stack)
                observation_of(scope).trace_id = trace_id_of(self._runs[0].trace) or ""
                await (self._stream(scope, send) if self._request.stream else self._whole(scope, receive, send))
        except HoldbackError as error:
            await self._fail(error, scope, receive, send)
        except Exception:
            log.exception("request_failed", request_id=self._id)
            await self._fail(InternalError("the gateway failed; its log says why"), scope, receive, send)

    async def _submit(self, stack: contextlib.AsyncExitStack) -> None:
        """Starts the generations of all prompts, or raises before it has started any with a wrong field."""
        self._messages = self._request.generations()
        named = list(zip(self._request.input_names, self._messages, strict=True))
        if len(named) > 1:
            with self._generations.counting_refusals():
                await self._check_all(named)
        for number, (name, message) in enumerate(named):
            message.request_id = self._id if len(named) == 1 else f"{self._id}-{number}"
            running = self._generations.run(message, self._call, counts_errors=number == 0)
            with self._client_errors(name):
                run = await stack.enter_async_context(running)
            self._runs.append(run)
            self._add_choices(number, run, message)

    async def _check_all(self, named: list[tuple[str, inference_pb2.Generation]]) -> None:
        """What a generation that is alone checks by itself. Raises InvalidArgumentError."""
        self._generations.check_fits_key(self._call, len(named), self._request.n or 1)
        for name, message in named:
            with self._client_errors(name):
                check_generation(message)
            await asyncio.sleep(0)  # tokens of others go between

    def _add_choices(self, number: int, run: GenerationRun, message: inference_pb2.Generation) -> None:
        table, keep = run.pool.tokenizer.table, message.keep_special_tokens
        has_logprobs = self._request.num_logprobs is not None
        before = (*run.prompt_token_ids, *message.output_token_ids) if has_logprobs else ()
        for choice in run.choices:
            state = self._choices[number, choice.index] = ChoiceState(len(self._choices), table)
            if has_logprobs:
                state.logprobs = []
                state.offsets = TextOffsets(Detokenizer(table, before, keep_special_tokens=keep))

    @contextlib.contextmanager
    def _client_errors(self, input_name: str) -> Iterator[None]:
        try:
            yield
        except InvalidArgumentError as error:
            raise self._request.client_error(error, input_name) from None

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        prompts = await self._echoed_prompts()
        for (number, _), state in self._choices.items():
            state.texts.append(prompts[number])
        async with aclosing(merged(self._runs)) as outputs:
            async for number, choice, delta in outputs:
                self._collect(self._choices[number, choice.index], choice, delta)
        answer = self._style.answer(self._head(), list(self._choices.values()), self._usage())
        response = Response(answer.model_dump_json(), media_type="application/json")
        self._has_begun = True
        await response(scope, receive, send)

    def _collect(self, state: ChoiceState, choice: Choice, delta: Delta) -> None:
        state.texts.append(delta.text)
        if state.logprobs is not None:
            state.logprobs.extend(delta.logprobs)
        if _has_ended(choice):
            state.end = choice.end

    async def _stream(self, scope: Scope, send: Send) -> None:
        prompts = await self._echoed_prompts()
        head = self._head() | {"object": self._style.chunk_object}
        events = Events(head, includes_usage=self._request.includes_usage)
        async with aclosing(merged(self._runs)) as outputs:
            first = await anext(outputs)
            if first[1].error is not None:
                raise first[1].error
            self._has_begun = True
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            with self._counts.streaming():
                await _send(send, self._openings(events, prompts) + self._written(events, *first))
                async for output in outputs:
                    written = self._written(events, *output)
                    if written:
                        await _send(send, written)
        usage = events.usage(self._usage()) if self._request.includes_usage else b""
        await _send(send, usage + DONE, is_last=True)

    def _openings(self, events: Events, prompts: list[str]) -> bytes:
        written = []
        for (number, _), state in self._choices.items():
            opening = self._style.opening(state)
            if opening is not None:
                written.append(events.choice(opening))
            if prompts[number]:
                written.append(events.choice(self._style.piece(state, prompts[number], ())))
        return b"".join(written)

    def _written(self, events: Events, number: int, choice: Choice, delta: Delta) -> bytes:
        """The events of one piece of output; none for tokens that tell nothing yet."""
        state = self._choices[number, choice.index]
        written = b""
        if delta.text or delta.logprobs:
            written = events.choice(self._style.piece(state, delta.text, delta.logprobs))
        if choice.end is not None and _has_ended(choice):
            written += events.choice(self._style.ending(state, choice.end))
        return written

    async def _echoed_prompts(self) -> list[str]:
        """What each prompt puts in front of its choices: nothing without `echo`, or where it has come already."""
        if not any(message.echo and not message.output_token_ids for message in self._messages):
            return [""] * len(self._messages)
        return [await prompt_text(run, message) for run, message in zip(self._runs, self._messages, strict=True)]

    async def _fail(self, error: HoldbackError, scope: Scope, receive: Receive, send: Send) -> None:
        """A response, or the last event of one that has begun."""
        observation_of(scope).error = error.reason.value
        if not self._has_begun:
            await error_response(error)(scope, receive, send)
            return
        resume = self._resume() if isinstance(error, UnavailableError) else None
        await _send(send, error_event(Error(**error_object(error), resume=resume)), is_last=True)

    def _resume(self) -> Resume:
        choices = []
        for number, run in enumerate(self._runs):
            for choice in run.choices:
                given = list(self._messages[number].output_token_ids)
                outputs = given if choice.submission is None else choice.submission.output_token_ids
                choices.append(
                    ResumableChoice(
                        index=self._choices[number, choice.index].index,
                        seed=seed_of_choice(run.seed, choice.index),
                        output_token_ids=outputs[: choice.num_outputs],
                    )
                )
        return Resume(model=self._runs[0].pool.names[0], choices=choices)

    def _head(self) -> dict[str, Any]:
        pool = self._runs[0].pool
        model = pool.engine.status.model
        fingerprint = "" if model is None else model.fingerprint
        return {
            "id": self._id,
            "created": int(time.time()),
            "model": pool.names[0],
            "system_fingerprint": fingerprint,
        }

    def _usage(self) -> Usage:
        return Usage.of([run.usage for run in self._runs])


async def _send(send: Send, body: bytes, *, is_last: bool = False) -> None:
    """Waits while the reader is slow."""
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})


async def _until_client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _has_ended(choice: Choice) -> bool:
    """Whether a choice has ended as it should. Raises InternalError for an end that is an error without a name."""
    if choice.end is None or choice.error is not None:
        return False
    if choice.end.finish_reason is FinishReason.ERROR:
        raise InternalError("the request failed and nothing was said of why")
    return True
