"""The pools that a gateway serves: names, tokenizer, chat template and the way to the scheduler of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import structlog

from gateway.counts import PoolCounts
from gateway.engine_client import EngineClient
from gateway.limits import check_prompt_size
from gateway.template_workers import WorkerTemplate
from gateway.tokenizer import Tokenizer
from holdback import codec
from holdback.errors import ConfigError, ErrorReason, FailedPreconditionError, NotFoundError
from holdback.types import ModelInfo
from holdback.v1 import inference_pb2

log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class Pool:
    """One model.

    Attributes:
        names: that select it; the first is shown.
        tokenizer: of the model.
        chat_template: of the model.
        engine: connection to the pool's scheduler.
        counts: of what it has served.
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer
    chat_template: WorkerTemplate
    engine: EngineClient
    counts: PoolCounts = field(default_factory=PoolCounts)
    _checked_model: ModelInfo | None = field(default=None, init=False)
    _mismatch: str | None = field(default=None, init=False)

    @property
    def is_ready(self) -> bool:
        """A request sent now would be served."""
        return self.engine.is_ready and self.engine.status.model is not None and self.refusal is None

    @property
    def refusal(self) -> FailedPreconditionError | None:
        """Why the pool's model cannot be served with this tokenizer; None if it can, or is not known yet."""
        model = self.engine.status.model
        if model is not None and model != self._checked_model:
            self._checked_model = model
            self._mismatch = self.tokenizer.mismatch(model)
            if self._mismatch is not None:
                log.error("pool_refused", model=self.names[0], why=self._mismatch)
        if self._mismatch is None:
            return None
        return FailedPreconditionError(self._mismatch, reason=ErrorReason.MODEL_MISMATCH)

    async def wait_for_model(self) -> ModelInfo:
        """What the pool runs, as soon as it is known.

        Raises:
            UnavailableError: the scheduler has been away for too long.
            FailedPreconditionError: the model does not fit the tokenizer.
        """
        while True:
            next_change = self.engine.next_change
            failure = self.refusal or self.engine.loss
            if failure is not None:
                raise failure
            if self.engine.status.model is not None:
                return self.engine.status.model
            await next_change.wait()

    async def tokenize(self, message: inference_pb2.Generation | inference_pb2.TokenizeRequest) -> list[int]:
        """Token ids of a request's input, special tokens included once. Raises InvalidArgumentError."""
        kind = message.WhichOneof("input")
        if kind == "text":
            return await self.tokenizer.encode(message.text)
        if kind == "chat":
            messages = [{"role": entry.role, "content": entry.content} for entry in message.chat.messages]
            return await self.tokenizer.encode_rendered(await self.chat_template.render(messages))
        if isinstance(message, inference_pb2.Generation):
            token_ids, model = message.token_ids.token_ids, self.engine.status.model
            if model is not None:
                check_prompt_size(len(token_ids), model)  # to copy millions of them takes longer than others may wait
            return list(token_ids)
        raise ValueError("a tokenize request without input passed its check")

    def describe(self) -> inference_pb2.Model:
        """The pool as clients see it."""
        status = self.engine.status
        model = inference_pb2.Model(
            name=self.names[0],
            aliases=self.names[1:],
            default_max_tokens=status.default_max_tokens,
            ready=self.is_ready,
        )
        if status.model is not None:
            model.info.CopyFrom(codec.encode_model_info(status.model))
        return model


class Pools:
    """All pools of a gateway, in the order of its configuration."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        """Raises ConfigError for a name that two pools have."""
        self._pools = tuple(pools)
        self._by_name: dict[str, Pool] = {}
        for pool in pools:
            for name in pool.names:
                if name in self._by_name:
                    raise ConfigError(f"served_model_names has {name!r} twice; allowed: each name once")
                self._by_name[name] = pool

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._pools)

    @property
    def is_ready(self) -> bool:
        """At least one pool would serve a request now: one model's trouble does not take the others away."""
        return any(pool.is_ready for pool in self._pools)

    @property
    def longest_model_len(self) -> int:
        """`max_model_len` of the longest model; 0 while none is known."""
        models = (pool.engine.status.model for pool in self._pools)
        return max((model.max_model_len for model in models if model is not None), default=0)

    def select(self, name: str) -> Pool:
        """The pool of a name or alias; the only one for an empty name. Raises NotFoundError."""
        if not name and len(self._pools) == 1:
            return self._pools[0]
        pool = self._by_name.get(name)
        if pool is None:
            shown = repr(name if len(name) <= 100 else name[:97] + "...")
            known = ", ".join(pool.names[0] for pool in self._pools)
            raise NotFoundError(f"model is {shown}, which is not served; allowed: {known}")
        return pool
