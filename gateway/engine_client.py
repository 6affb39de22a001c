"""The gateway's one stream to the scheduler of a pool.

All requests share it: each has a handle on the stream, and each step's new tokens come in one message. When the stream
breaks, or is silent for `silence_timeout_s`, requests and their clients' streams stay. On the next stream every open
request is submitted again, with its outputs so far, the time it has waited and a higher generation, those that had
started first. Only when there has been no scheduler for `loss_timeout_s` do they end, with UNAVAILABLE.

Tokens count by output index: what is known already is dropped, a gap breaks the stream and so heals it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools

import grpc
import grpc.aio
import structlog

from gateway.counts import RequestTimes
from gateway.load import LoadReader
from gateway.pool_status import PoolStatus
from gateway.scheduler_messages import (
    Stream,
    check_accepted,
    decode_ended,
    longest_silence_s,
    read_response,
    read_tokens,
)
from gateway.submission import Ended, EndRule, OutOfOrderError, Shared, Submission
from holdback import codec, rpc
from holdback.errors import (
    AlreadyExistsError,
    ConfigError,
    ErrorReason,
    FailedPreconditionError,
    HoldbackError,
    UnavailableError,
)
from holdback.tls import NO_TLS, Stamp, Tls
from holdback.types import PROTOCOL_VERSION, FinishReason, ModelInfo, RequestSpec
from holdback.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2

log = structlog.get_logger(__name__)

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0


class EngineClient:
    """Connection to one scheduler. Make it, `start` it, use it and `close` it on one event loop.

    Attributes:
        target: address of the scheduler.
        status: of the pool, as the scheduler said it last.
        load: of the pool, for whoever asks.
        num_resubmitted: requests that were submitted again on another stream.
    """

    def __init__(
        self,
        target: str,
        *,
        model_name: str,
        session: str,
        gateway_id: str,
        loss_timeout_s: float,
        silence_timeout_s: float,
        tls: Tls = NO_TLS,
    ) -> None:
        """
        Args:
            target: address of the scheduler, which no client is told.
            model_name: what clients are told instead.
            session: random name of this client, 16 to 64 bytes; the scheduler keeps one stream for each.
            gateway_id: name for people, at most 128 bytes.
            loss_timeout_s: how long requests wait for a scheduler that cannot be reached.
            silence_timeout_s: after which a stream on which nothing comes, not even a heartbeat, is lost.
            tls: how it is called; files that have changed count from the next stream on.

        Raises:
            ConfigError: a file of `tls` is none.
        """
        self.target = target
        self._model_name = model_name
        self.status = PoolStatus()
        self.num_resubmitted = 0
        self._tls = tls
        self._tls_stamp: Stamp | None = None
        self._open_channel()
        self._hello = scheduler_pb2.GatewayHello(
            protocol_version=types_pb2.ProtocolVersion(major=PROTOCOL_VERSION[0], minor=PROTOCOL_VERSION[1]),
            session=session,
            gateway_id=gateway_id,
        )
        self._loss_timeout_s = loss_timeout_s
        self._silence_timeout_s = silence_timeout_s
        self._log = log.bind(scheduler=target)
        self._open: dict[str, Submission] = {}
        self._by_handle: dict[int, Submission] = {}
        self._handles = itertools.count()
        self._outbox: collections.deque[scheduler_pb2.ConnectRequest] = collections.deque()
        self._outbox_filled = asyncio.Event()
        self._is_live = False
        self._loss_timer: asyncio.TimerHandle | None = None
        self._has_given_up = False
        self._next_change = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        """A request sent now would be served: by the scheduler, or when it is back in time."""
        return self.status.is_ready and not self._has_given_up

    @property
    def loss(self) -> UnavailableError | None:
        """Why requests are refused, once the scheduler has been away for too long."""
        return self._unavailable() if self._has_given_up else None

    def start(self) -> None:
        """Begins to connect, and goes on until `close`."""
        self._start_loss_timer()
        self._task = asyncio.create_task(self._run(), name=f"scheduler {self.target}")

    async def close(self) -> None:
        """Ends the stream, whereupon the scheduler aborts what is left of it."""
        self._stop_loss_timer()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._channel.close()
        self._end_all(UnavailableError("the gateway stops", reason=ErrorReason.SHUTTING_DOWN))

    @property
    def next_change(self) -> asyncio.Event:
        """Set when `status`, `is_ready` or `loss` next changes. Taken before looking at them, it misses nothing."""
        return self._next_change

    @property
    def is_connected(self) -> bool:
        """There is a stream, and the scheduler has said what its pool is."""
        return self._is_live

    def submit(
        self,
        spec: RequestSpec,
        model: ModelInfo,
        wakeup: asyncio.Event | None = None,
        times: RequestTimes | None = None,
        shared: Shared | None = None,
    ) -> Submission:
        """Submits a request; it is sent when there is a stream.

        Args:
            spec: with a `request_id` that no living request of this client has.
            model: that the request was checked against.
            wakeup: to be told of updates by; one of its own if None.
            times: told of what happens to the request.
            shared: with other choices; None for a request that is alone.

        Raises:
            AlreadyExistsError: a request of that id is alive.
            UnavailableError: the scheduler has been away for too long.
        """
        if spec.request_id in self._open:
            raise AlreadyExistsError(f"request_id is {spec.request_id!r}, which is alive; allowed: another id")
        if self._has_given_up:
            raise self._unavailable()
        submission = Submission(
            spec=spec,
            model_fingerprint=model.fingerprint,
            end_rule=EndRule.of(spec, model.eos_token_ids) if shared is None else shared.end_rule,
            clock=asyncio.get_running_loop().time,
            wakeup=asyncio.Event() if wakeup is None else wakeup,
            on_close=self._close_submission,
            times=times,
            shared=shared,
        )
        self._open[spec.request_id] = submission
        if self._is_live:
            self._send(submission)
        return submission

    async def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            await self._renew_channel()
            try:
                # With TLS a refused certificate may be one that has been renewed meanwhile: it must not wait for ever.
                await self._serve(self._stub.Connect(wait_for_ready=self._tls.ca is None))
            except grpc.aio.AioRpcError as failure:
                self._log.warning("scheduler_stream_ended", code=failure.code().name, details=failure.details())
            except UnavailableError as error:
                self._log.warning("scheduler_silent", why=error.message)
                self._tls_stamp = None  # its connection may lead nowhere, so the next stream gets another
            except (HoldbackError, OutOfOrderError) as error:
                self._log.error("scheduler_stream_refused", error=str(error))
            except Exception:  # a fault of ours must not end the connection for good
                self._log.exception("scheduler_stream_failed")
            backoff_s = FIRST_BACKOFF_S if self._is_live else min(2 * backoff_s, MAX_BACKOFF_S)
            self._on_lost()
            await asyncio.sleep(backoff_s)

    def _open_channel(self) -> None:
        self._tls_stamp = self._tls.stamp()
        self._channel = rpc.create_channel(self.target, self._tls)
        self._stub: scheduler_pb2_grpc.SchedulerServiceAsyncStub = scheduler_pb2_grpc.SchedulerServiceStub(
            self._channel
        )
        self.load = LoadReader(self._stub, self.target, self._model_name, asyncio.get_running_loop().time)

    async def _renew_channel(self) -> None:
        """A connection of its own for the next stream, if the last was silent or certificates have changed."""
        if self._tls.stamp() == self._tls_stamp:
            return
        old = self._channel
        try:
            self._open_channel()
        except ConfigError as error:  # half written, perhaps; the old ones may still do
            self._log.error("certificates_kept", why=error.message)
        else:
            await old.close()

    async def _serve(self, call: Stream) -> None:
        """One stream, from the greeting until it ends."""
        writer: asyncio.Task[None] | None = None
        try:
            await call.write(scheduler_pb2.ConnectRequest(hello=self._hello))
            accepted = check_accepted(await read_response(call, self._silence_timeout_s))
            silence_s = longest_silence_s(accepted, self._silence_timeout_s)
            writer = asyncio.create_task(self._write(call), name=f"write to scheduler {self.target}")
            while (response := await read_response(call, silence_s)) is not None:
                self._on_response(response)
        finally:
            if writer is not None:
                writer.cancel()
            call.cancel()

    async def _write(self, call: Stream) -> None:
        """Sends what is in the outbox. When the stream breaks, its reader says so."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._outbox_filled.wait()
                self._outbox_filled.clear()
                while self._outbox:
                    await call.write(self._outbox.popleft())

    def _on_response(self, response: scheduler_pb2.ConnectResponse) -> None:
        kind = response.WhichOneof("response")
        if kind == "updates":
            self._on_updates(response.updates)
        elif kind == "pool":
            self._on_pool(response.pool)

    def _on_pool(self, pool: scheduler_pb2.PoolStatus) -> None:
        self.status = PoolStatus.decode(pool)
        if self.status.model is not None:
            self._end_those_of_other_models(self.status.model)
        if not self._is_live:
            self._go_live()
        self._notify()

    def _go_live(self) -> None:
        """The stream works and its pool is known: whatever is open goes to it, what had started first."""
        self._is_live = True
        self._has_given_up = False
        self._stop_loss_timer()
        self._log.info("scheduler_connected", num_resubmitted=len(self._open))
        for submission in sorted(self._open.values(), key=lambda entry: not entry.has_started):
            self._send(submission)

    def _send(self, submission: Submission) -> None:
        """Submits a request on this stream, unless it has ended without the scheduler's saying so."""
        outputs = submission.output_token_ids
        ended = submission.end_rule.after(outputs[-1], len(outputs)) if outputs else None
        if ended is not None:
            self._end(submission, ended)
            return
        is_resubmission = submission.was_sent
        if is_resubmission:
            submission.generation += 1
            self.num_resubmitted += 1
        try:
            spec = submission.current_spec()
        except HoldbackError as error:
            self._end(submission, Ended(FinishReason.ABORT, error=error))
            return
        submission.was_sent = True
        submission.handle = next(self._handles)
        self._by_handle[submission.handle] = submission
        request = scheduler_pb2.ConnectRequest()
        request.add.handle = submission.handle
        shared = codec.encode_shared(spec) if submission.shared is None else submission.shared.spec
        codec.fill_spec(request.add.spec, spec, shared)
        if is_resubmission:
            request.add.resubmission.has_started = submission.has_started
            request.add.resubmission.age_ms = round(submission.age_s * 1000)
        self._put(request)

    def _on_updates(self, updates: scheduler_pb2.RequestUpdates) -> None:
        for started in updates.started:
            submission = self._by_handle.get(started.handle)
            if submission is not None:
                submission.on_started(started.num_cached_tokens, started.queued_ms)
        self._on_tokens(updates)
        for ended in updates.ended:
            submission = self._by_handle.get(ended.handle)
            if submission is not None:
                self._end(submission, decode_ended(ended))

    def _on_tokens(self, updates: scheduler_pb2.RequestUpdates) -> None:
        for new in read_tokens(updates):
            submission = self._by_handle.get(new.handle)
            if submission is not None:
                submission.on_tokens(new.first_index, new.token_ids, new.logprobs)
                if submission.ended is not None:
                    self._close_submission(submission)

    def _on_lost(self) -> None:
        self._is_live = False
        self._outbox.clear()
        self._by_handle.clear()
        for submission in self._open.values():
            submission.on_lost()
        if self._loss_timer is None and not self._has_given_up:
            self._start_loss_timer()
        self._notify()

    def _start_loss_timer(self) -> None:
        self._loss_timer = asyncio.get_running_loop().call_later(self._loss_timeout_s, self._give_up)

    def _stop_loss_timer(self) -> None:
        if self._loss_timer is not None:
            self._loss_timer.cancel()
            self._loss_timer = None

    def _give_up(self) -> None:
        self._loss_timer = None
        self._has_given_up = True
        self._log.error("scheduler_away_too_long", num_ended=len(self._open), timeout_s=self._loss_timeout_s)
        self._end_all(self._unavailable())
        self._notify()

    def _unavailable(self) -> UnavailableError:
        message = f"the scheduler of model {self._model_name!r} could not be reached for {self._loss_timeout_s:g} s"
        return UnavailableError(message, reason=ErrorReason.NO_SCHEDULER)

    def _end_all(self, error: HoldbackError) -> None:
        for submission in list(self._open.values()):
            self._end(submission, Ended(FinishReason.ERROR, error=error))

    def _end_those_of_other_models(self, model: ModelInfo) -> None:
        """Outputs of one model are not continued by another."""
        for submission in list(self._open.values()):
            if submission.model_fingerprint != model.fingerprint:
                error = FailedPreconditionError(
                    f"the pool's model is now {model.name!r} ({model.fingerprint}); "
                    f"the request began with {submission.model_fingerprint}"
                )
                submission.end(Ended(FinishReason.ERROR, error=error))
                self._abort(submission)

    def _end(self, submission: Submission, ended: Ended) -> None:
        self._forget(submission)
        submission.end(ended)

    def _close_submission(self, submission: Submission) -> None:
        if self._open.get(submission.spec.request_id) is submission:
            self._abort(submission)
            submission.end(Ended(FinishReason.ABORT))

    def _abort(self, submission: Submission) -> None:
        """Tells the scheduler, if it knows the request, and forgets it."""
        if submission.handle is not None:
            abort = scheduler_pb2.AbortSubmission(
                request_id=submission.spec.request_id, generation=submission.generation
            )
            self._put(scheduler_pb2.ConnectRequest(abort=abort))
        self._forget(submission)

    def _forget(self, submission: Submission) -> None:
        self._open.pop(submission.spec.request_id, None)
        if submission.handle is not None:
            self._by_handle.pop(submission.handle, None)

    def _put(self, request: scheduler_pb2.ConnectRequest) -> None:
        self._outbox.append(request)
        self._outbox_filled.set()

    def _notify(self) -> None:
        self._next_change.set()
        self._next_change = asyncio.Event()
