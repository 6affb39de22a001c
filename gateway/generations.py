"""All generations that one gateway runs, whichever protocol they came by.

A generation goes: fields and limits, model, template and tokenizer, model limits, submission, then updates until every
choice has its end. Each protocol translates its message to `inference_pb2.Generation` and the choices back, so that one
set of limits, ids and endings holds for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Collection

from structlog.contextvars import bind_contextvars, unbind_contextvars

from gateway.generation import CallContext, GenerationRun
from gateway.limits import Checked, check_generation
from gateway.pool import Pool, Pools
from gateway.run_traces import end_span, start_span
from holdback.errors import (
    AlreadyExistsError,
    ErrorReason,
    HoldbackError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from holdback.tracing import Tracer, trace_id_of
from holdback.types import ModelInfo
from holdback.v1 import inference_pb2


class Generations:
    """Living generations by request id.

    Attributes:
        pools: that they run on.
        num_errors: generations that were refused or failed, by the shown name of the model (empty where none was
            chosen) and the reason of the error.
    """

    def __init__(self, pools: Pools, tracer: Tracer | None = None) -> None:
        self.pools = pools
        self._tracer = tracer
        self._runs: dict[str, GenerationRun] = {}
        self.num_errors = Counter[tuple[str, ErrorReason]]()
        self._num_running = Counter[tuple[str, str]]()  # by the name of a caller and what is counted
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False

    @property
    def num_running(self) -> int:
        return len(self._runs)

    @property
    def runs(self) -> Collection[GenerationRun]:
        """Those that live."""
        return self._runs.values()

    def check_open(self) -> None:
        """Raises UnavailableError once the gateway is stopping."""
        if self._is_draining:
            raise UnavailableError("the gateway is stopping; try another one", reason=ErrorReason.SHUTTING_DOWN)

    def drain(self) -> None:
        """From now on every new generation is refused; those that run go on."""
        self._is_draining = True

    async def wait_idle(self) -> None:
        """Returns when no generation runs."""
        await self._idle.wait()

    def fail_all(self, error: HoldbackError) -> None:
        """Ends every generation that still runs."""
        for run in self._runs.values():
            run.fail(error)

    @contextlib.asynccontextmanager
    async def run(self, message: inference_pb2.Generation, call: CallContext) -> AsyncIterator[GenerationRun]:
        """A generation that has been submitted, and is ended when the block is left, however that happens.

        Raises:
            HoldbackError: the request cannot be served; nothing of it is left.
        """
        model_name = ""
        try:
            self.check_open()
            checked = check_generation(message)
            pool = self.pools.select(checked.model)
            model_name = pool.names[0]
            async with self._run(pool, checked, message, call) as run:
                yield run
        except HoldbackError as error:
            self.num_errors[model_name, error.reason] += 1
            raise

    @contextlib.asynccontextmanager
    async def _run(
        self, pool: Pool, checked: Checked, message: inference_pb2.Generation, call: CallContext
    ) -> AsyncIterator[GenerationRun]:
        request_id = checked.request_id or f"gen-{uuid.uuid4().hex}"
        if request_id in self._runs:
            raise AlreadyExistsError(f"request_id is {request_id!r}, which is alive; allowed: another id")
        counted = self._count(call)
        span = None if self._tracer is None else start_span(self._tracer, request_id, pool, call)
        if span is not None:
            call = dataclasses.replace(call, trace=span.context)
        bind_contextvars(request_id=request_id, trace_id=trace_id_of(call.trace))
        run = GenerationRun(request_id, pool, checked, owner=call.caller.name)
        self._runs[request_id] = run
        self._idle.clear()
        try:
            model, prompt_token_ids = await run.unless_failed(_prepare(pool, message))
            run.submit(prompt_token_ids, model, call)
            yield run
        finally:
            run.close()
            run.count_ends()
            if span is not None:
                end_span(span, run)
            unbind_contextvars("request_id", "trace_id")
            self._num_running.subtract(counted)
            del self._runs[request_id]
            if not self._runs:
                self._idle.set()

    def _count(self, call: CallContext) -> list[tuple[str, str]]:
        """Counts a generation for its caller; what was counted. Raises ResourceExhaustedError beyond a key's limits."""
        caller = call.caller
        limits = {"requests": caller.max_requests} | ({"streams": caller.max_streams} if call.is_stream else {})
        for what, limit in limits.items():
            if limit is not None and self._num_running[caller.name, what] >= limit:
                raise ResourceExhaustedError(
                    f"API key {caller.name!r} has {limit} {what} running; allowed: {limit} at once (max_{what})",
                    reason=ErrorReason.KEY_LIMIT,
                )
        counted = [(caller.name, what) for what in limits]
        self._num_running.update(counted)
        return counted

    def abort(self, request_id: str, owner: str) -> None:
        """Ends a generation with finish reason `abort`.

        Raises:
            NotFoundError: this gateway runs none of that id for this owner.
        """
        run = self._runs.get(request_id)
        if run is None or run.owner != owner:
            raise NotFoundError(
                f"request_id is {request_id[:100]!r}; allowed: the id of a request of yours that this gateway runs",
                reason=ErrorReason.REQUEST_NOT_FOUND,
            )
        run.abort()


async def _prepare(pool: Pool, message: inference_pb2.Generation) -> tuple[ModelInfo, list[int]]:
    """The pool's model and the prompt's tokens. What is wrong with the input is said without waiting for a model."""
    prompt_token_ids = await pool.tokenize(message)
    return await pool.wait_for_model(), prompt_token_ids
