"""All generations that one gateway runs, whichever protocol they came by.

A generation goes: fields and limits, model, template and tokenizer, model limits, submission, then updates until every
choice has its end. Each protocol translates its message to `inference_pb2.Generation` and the choices back, so that one
set of limits, ids and endings holds for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator

from structlog.contextvars import bind_contextvars, unbind_contextvars

from gateway.access import Caller
from gateway.generation import CallContext, GenerationRun
from gateway.limits import CHOICE_SUFFIX_BYTES, Checked, check_generation
from gateway.pool import Pool, Pools
from gateway.run_traces import end_span, start_span
from gateway.short_calls import ShortCalls
from holdback.errors import (
    AlreadyExistsError,
    ErrorReason,
    HoldbackError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from holdback.request_limits import MAX_REQUEST_ID_BYTES
from holdback.tracing import Tracer, trace_id_of
from holdback.types import FinishReason, ModelInfo
from holdback.v1 import inference_pb2


class Generations:
    """Living generations by request id, which each caller has for itself.

    Attributes:
        pools: that they run on.
        short_calls: what is answered beside them.
        num_errors: generations that were refused or failed, by the shown name of the model (empty where none was
            chosen) and the reason of the error.
    """

    def __init__(self, pools: Pools, tracer: Tracer | None = None) -> None:
        self.pools = pools
        self.short_calls = ShortCalls()
        self._tracer = tracer
        self._runs: dict[tuple[str, str], GenerationRun] = {}  # by the name of a caller and the id it gave
        # Each is there from the start: Prometheus sees no increase in a series that begins with its first error.
        names = ("", *(pool.names[0] for pool in pools))
        self.num_errors = Counter(dict.fromkeys(itertools.product(names, ErrorReason), 0))
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
        """From now on every new call is refused; those that run go on."""
        self._is_draining = True

    async def wait_idle(self) -> None:
        """Returns when no generation runs and no other call is being answered."""
        await self._idle.wait()
        await self.short_calls.wait_idle()

    def fail_all(self, error: HoldbackError) -> None:
        """Ends every generation that still runs, and every other call."""
        self.short_calls.fail_all(error)
        for run in self._runs.values():
            run.fail(error)

    @contextlib.contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts what refuses a generation before a model is chosen."""
        try:
            yield
        except HoldbackError as error:
            self.num_errors["", error.reason] += 1
            raise

    @contextlib.asynccontextmanager
    async def run(
        self, message: inference_pb2.Generation, call: CallContext, *, counts_errors: bool = True
    ) -> AsyncIterator[GenerationRun]:
        """A generation that has been submitted, and is ended when the block is left, however that happens.

        Args:
            message: what is asked for.
            call: what it came with.
            counts_errors: an error that leaves the block is counted. False within the block of another generation of
                the same call, which the error leaves as well.

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
        except Exception as error:
            # What is no error of ours is told as a fault of ours.
            reason = error.reason if isinstance(error, HoldbackError) else InternalError.default_reason
            self.num_errors[model_name, reason] += counts_errors
            raise

    @contextlib.asynccontextmanager
    async def _run(
        self, pool: Pool, checked: Checked, message: inference_pb2.Generation, call: CallContext
    ) -> AsyncIterator[GenerationRun]:
        request_id = checked.request_id or f"gen-{uuid.uuid4().hex}"
        key = (call.caller.name, request_id)
        if key in self._runs:
            raise AlreadyExistsError(f"request_id is {request_id!r}, which is alive; allowed: another id")
        counted = self._count(call, checked.n)
        span = None if self._tracer is None else start_span(self._tracer, request_id, pool, call)
        if span is not None:
            call = dataclasses.replace(call, trace=span.context)
        bind_contextvars(request_id=request_id, trace_id=trace_id_of(call.trace))
        run = GenerationRun(
            request_id, pool, checked, scheduler_request_id=_scheduler_request_id(call.caller, request_id)
        )
        self._runs[key] = run
        self._idle.clear()
        try:
            try:
                model, prompt_token_ids = await run.unless_failed(_prepare(pool, message))
                await run.submit(prompt_token_ids, model, call)
            except asyncio.CancelledError:
                pool.counts.num_ended[FinishReason.ABORT] += checked.n - len(run.choices)  # these have not begun
                raise
            yield run
        finally:
            run.close()
            run.count_ends()
            if span is not None:
                end_span(span, run)
            unbind_contextvars("request_id", "trace_id")
            self._num_running -= counted
            del self._runs[key]
            if not self._runs:
                self._idle.set()

    def check_fits_key(self, call: CallContext, num_prompts: int, n: int) -> None:
        """Raises InvalidArgumentError for a request that its key does not allow even when nothing else runs."""
        shares = {"max_requests": num_prompts * n, "max_streams": num_prompts if call.is_stream else 0}
        for limit_name, wanted in shares.items():
            limit = getattr(call.caller, limit_name)
            if limit is not None and wanted > limit:
                field, value = ("n", n) if num_prompts == 1 else ("prompt", f"{num_prompts} prompts")
                what = "choices in all" if limit_name == "max_requests" else "prompts with stream"
                raise InvalidArgumentError.of(
                    field, value, f"at most {limit} {what} ({limit_name} of API key {call.caller.name!r})"
                )

    def _count(self, call: CallContext, n: int) -> Counter[tuple[str, str]]:
        """Counts a generation for its caller, each choice as a request; what was counted.

        Raises:
            InvalidArgumentError: it is more than its key ever allows.
            ResourceExhaustedError: it is more than its key allows beside what runs.
        """
        self.check_fits_key(call, 1, n)
        caller = call.caller
        shares = {"requests": (n, caller.max_requests)}
        if call.is_stream:
            shares["streams"] = (1, caller.max_streams)
        for what, (wanted, limit) in shares.items():
            running = self._num_running[caller.name, what]
            if limit is not None and running + wanted > limit:
                raise ResourceExhaustedError(
                    f"API key {caller.name!r} has {running} {what} running and asks for {wanted};"
                    f" allowed: {limit} at once (max_{what})",
                    reason=ErrorReason.KEY_LIMIT,
                )
        counted = Counter({(caller.name, what): wanted for what, (wanted, _) in shares.items()})
        self._num_running += counted
        return counted

    def abort(self, request_id: str, owner: str) -> None:
        """Ends a generation with finish reason `abort`.

        Raises:
            NotFoundError: this gateway runs none of that id for this owner.
        """
        run = self._runs.get((owner, request_id))
        if run is None:
            raise NotFoundError(
                f"request_id is {request_id[:100]!r}; allowed: the id of a request of yours that this gateway runs",
                reason=ErrorReason.REQUEST_NOT_FOUND,
            )
        run.abort()


async def _prepare(pool: Pool, message: inference_pb2.Generation) -> tuple[ModelInfo, list[int]]:
    """The pool's model and the prompt's tokens. What is wrong with the input is said without waiting for a model."""
    prompt_token_ids = await pool.tokenize(message)
    return await pool.wait_for_model(), prompt_token_ids


def _scheduler_request_id(caller: Caller, request_id: str) -> str:
    """The id at the scheduler, where the requests of all callers are: no key meets the ids of another."""
    if not caller.name:
        return request_id
    scope = hashlib.sha256(caller.name.encode()).hexdigest()[:12]
    if len(scope) + 1 + len(request_id.encode()) + CHOICE_SUFFIX_BYTES > MAX_REQUEST_ID_BYTES:
        request_id = hashlib.sha256(request_id.encode()).hexdigest()
    return f"{scope}-{request_id}"
