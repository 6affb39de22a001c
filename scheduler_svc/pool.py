"""The pool: one model, whether it is served, and who may serve it.

The configuration's pins, else the first executor, say what the model is; an executor that differs is refused. Ready
means that a request sent now would be accepted and find an executor in time.
"""

from __future__ import annotations

from collections.abc import Callable

from holdback import codec
from holdback.errors import ErrorReason, FailedPreconditionError, UnavailableError
from holdback.types import ModelInfo
from holdback.v1 import scheduler_pb2
from scheduler_svc.clock import Clock, Timer
from scheduler_svc.config import SchedulerServiceConfig

MODEL_FIELDS = ("fingerprint", "vocab_size", "eos_token_ids", "max_model_len")
"""What all executors must agree on; `name` is for people."""

ANY_MODEL = ModelInfo(fingerprint="", name="", vocab_size=2**31, eos_token_ids=(), max_model_len=2**31)
"""Until the pool's model is known a request is held to what every model demands; the rest is checked then."""


class Pool:
    """What gateways are told of the pool, and when requests stop waiting for an executor.

    Attributes:
        model: None until the first executor has joined.
        num_executors: that serve.
        is_lost: there was an executor, and there has been none for `executor_loss_timeout_s`.
        is_stopping: the scheduler shuts down.
    """

    def __init__(self, config: SchedulerServiceConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._listeners: list[Callable[[], None]] = []
        self._loss: Timer | None = None
        self.model: ModelInfo | None = None
        self.num_executors = 0
        self.is_lost = False
        self.is_stopping = False

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls `listener` after every change; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    @property
    def not_ready_reason(self) -> str:
        """For people; empty when ready."""
        if self.is_stopping:
            return "the scheduler is stopping"
        if self.model is None:
            return "no executor has registered yet"
        if self.is_lost:
            return f"no executor for more than executor_loss_timeout_s, {self._config.executor_loss_timeout_s:g} s"
        return ""

    @property
    def max_model_len(self) -> int | None:
        """Of the pool's model; None while nothing says it."""
        return self._config.max_model_len if self.model is None else self.model.max_model_len

    @property
    def is_ready(self) -> bool:
        return not self.not_ready_reason

    def status(self) -> scheduler_pb2.PoolStatus:
        reason = self.not_ready_reason
        return scheduler_pb2.PoolStatus(
            model=None if self.model is None else codec.encode_model_info(self.model),
            default_max_tokens=self._config.default_max_tokens or 0,
            ready=not reason,
            not_ready_reason=reason,
            num_executors=self.num_executors,
        )

    def check_model(self, model: ModelInfo) -> None:
        """Raises FailedPreconditionError: the model is not the pool's; names the field and both values."""
        for name, expected in self._expected().items():
            value = getattr(model, name)
            if value != expected:
                raise FailedPreconditionError(
                    f"model.{name} is {value!r}; allowed: {expected!r}, that of the pool",
                    reason=ErrorReason.MODEL_MISMATCH,
                )

    def check_not_stopping(self) -> None:
        """Raises UnavailableError (SHUTTING_DOWN)."""
        if self.is_stopping:
            raise UnavailableError("the scheduler is stopping", reason=ErrorReason.SHUTTING_DOWN)

    def check_serves(self) -> None:
        """Raises UnavailableError: nothing would serve a request sent now (SHUTTING_DOWN, NO_EXECUTOR)."""
        self.check_not_stopping()
        if self.is_lost:
            raise self.no_executor()

    def no_executor(self) -> UnavailableError:
        return UnavailableError(
            f"the pool has had no executor for executor_loss_timeout_s, {self._config.executor_loss_timeout_s:g} s",
            reason=ErrorReason.NO_EXECUTOR,
        )

    def executor_joined(self, model: ModelInfo) -> None:
        """Raises FailedPreconditionError, and changes nothing, when the model is not the pool's."""
        self.check_model(model)
        if self.model is None:
            self.model = model
        if self._loss is not None:
            self._loss.cancel()
        self._loss = None
        self.is_lost = False
        self.num_executors += 1
        self._tell()

    def executor_left(self) -> None:
        self.num_executors -= 1
        if self.num_executors == 0:
            self._loss = self._clock.call_later(self._config.executor_loss_timeout_s, self._give_up)
        self._tell()

    def stop(self) -> None:
        if self._loss is not None:
            self._loss.cancel()
        self.is_stopping = True
        self._tell()

    def _expected(self) -> dict[str, object]:
        if self.model is not None:
            return {name: getattr(self.model, name) for name in MODEL_FIELDS}
        pins = {"fingerprint": self._config.model_fingerprint, "max_model_len": self._config.max_model_len}
        return {name: value for name, value in pins.items() if value is not None}

    def _give_up(self) -> None:
        self._loss = None
        self.is_lost = True
        self._tell()

    def _tell(self) -> None:
        for listener in list(self._listeners):
            listener()
