"""What a gateway answers, as the SDK gives it to programs."""

from __future__ import annotations

from dataclasses import dataclass

from holdback import codec
from holdback.types import FinishReason, ModelInfo, TokenLogprobs, Usage
from holdback.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class Choice:
    """One complete choice.

    Attributes:
        index: in [0, n).
        text: what the output adds to the prompt; stop strings and the token that ended it are left out.
        token_ids: every sampled token, a final EOS or stop token included.
        finish_reason: why it ended.
        stop_string: the stop string that matched, with STOP.
        stop_token_id: the stop token that was sampled, with STOP; None for EOS.
        logprobs: one for each of `token_ids`, if asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """A complete answer. `text`, `token_ids` and `finish_reason` are those of the first choice.

    Attributes:
        request_id: of the request.
        model: that answered, by its first name.
        seed: of choice 0; choice k has seed + k. The same request with this seed draws the same random numbers.
        choices: one for each of `n`.
        usage: the prompt counted once, completions summed.
    """

    request_id: str
    model: str
    seed: int
    choices: tuple[Choice, ...]
    usage: Usage

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason


@dataclass(frozen=True, slots=True)
class Piece:
    """New output of one choice. The texts of a choice's pieces concatenate to its text.

    Attributes:
        text: that became certain; may be empty.
        index: of the choice.
        token_ids: new tokens; text of a token may come with a later piece.
        logprobs: one for each of `token_ids`, if asked for.
        finish_reason: set on the last piece of each choice.
        stop_string: as in `Choice`.
        stop_token_id: as in `Choice`.
    """

    text: str = ""
    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """A model that a gateway serves.

    Attributes:
        name: it is shown by.
        aliases: that select it too.
        info: what runs; None while that is not known.
        default_max_tokens: of a request that names none; 0 is as much as fits.
        is_ready: a request sent now would be served.
    """

    name: str
    aliases: tuple[str, ...]
    info: ModelInfo | None
    default_max_tokens: int
    is_ready: bool


def decode_choice(message: inference_pb2.Choice) -> Choice:
    return Choice(
        index=message.index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        finish_reason=codec.decode_finish_reason(message.finish_reason),
        stop_string=stop_string(message.stop_reason),
        stop_token_id=stop_token_id(message.stop_reason),
        logprobs=tuple(map(codec.decode_logprobs, message.logprobs)),
    )


def stop_string(reason: inference_pb2.StopReason) -> str | None:
    return reason.stop_string if reason.WhichOneof("reason") == "stop_string" else None


def stop_token_id(reason: inference_pb2.StopReason) -> int | None:
    return reason.stop_token_id if reason.WhichOneof("reason") == "stop_token_id" else None


def decode_model(message: inference_pb2.Model) -> Model:
    return Model(
        name=message.name,
        aliases=tuple(message.aliases),
        info=codec.decode_model_info(message.info) if message.HasField("info") else None,
        default_max_tokens=message.default_max_tokens,
        is_ready=message.ready,
    )
