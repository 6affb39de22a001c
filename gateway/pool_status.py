"""What a scheduler last said of its pool."""

from __future__ import annotations

from dataclasses import dataclass

from holdback import codec
from holdback.types import ModelInfo
from holdback.v1 import scheduler_pb2


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """What a pool is and whether it serves.

    Attributes:
        model: None until the pool knows it.
        default_max_tokens: of a request that names none; 0 is what fits.
        is_ready: a request sent now would be served.
        not_ready_reason: for people.
    """

    model: ModelInfo | None = None
    default_max_tokens: int = 0
    is_ready: bool = False
    not_ready_reason: str = "the scheduler has not been reached yet"

    @classmethod
    def decode(cls, message: scheduler_pb2.PoolStatus) -> PoolStatus:
        """The status in a message."""
        model = codec.decode_model_info(message.model) if message.HasField("model") else None
        return cls(model, message.default_max_tokens, message.ready, message.not_ready_reason)
