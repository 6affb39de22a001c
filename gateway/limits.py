"""What a request of a client may ask for: the checks that need no model and those that do.

Nothing is tokenized, rendered or sent before `check_generation` has passed; nothing is sent before `Checked.fit`. What
a scheduler checks as well is in `holdback.request_limits`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from holdback import codec
from holdback.errors import ErrorReason, InvalidArgumentError
from holdback.request_limits import (
    MAX_CACHE_SALT_BYTES,
    MAX_REQUEST_ID_BYTES,
    Range,
    check_bytes,
    check_min_tokens,
    check_num_entries,
    check_range,
    check_sampling,
    size_error,
)
from holdback.types import ModelInfo, SamplingParams
from holdback.v1 import inference_pb2

MAX_MODEL_NAME_BYTES = 256
MAX_PROMPT_BYTES = 8 * 1024 * 1024
MAX_TOKEN_IDS = 2 * 1024 * 1024
MAX_REQUEST_BYTES = 24 * 1024 * 1024
"""Over gRPC. The longest has two lists of so many ids, five bytes each at most, and less than 1 MiB besides."""

MAX_MESSAGES = 2048
MAX_ROLE_BYTES = 64
MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 1024
CHOICE_SUFFIX_BYTES = len("/127")
"""With several choices each is a request of its own, named by the id, a slash and its index."""

PRIORITY_RANGE = Range(-128, 127)
N_RANGE = Range(1, MAX_N)


@dataclass(frozen=True, slots=True)
class Checked:
    """A request whose fields are within their limits.

    Attributes:
        request_id: as sent; empty where the gateway shall make one.
        sampling: complete but for what the request left open: `seed` where `seed_given` is false, and `max_tokens`
            where `max_tokens_given` is false.
        seed_given: the request named a seed.
        max_tokens_given: the request named `max_tokens`.
        output_token_ids: outputs that the client has already.
    """

    request_id: str
    model: str
    sampling: SamplingParams
    seed_given: bool
    max_tokens_given: bool
    n: int
    stop: tuple[str, ...]
    keep_special_tokens: bool
    echo: bool
    priority: int
    cache_salt: str
    output_token_ids: tuple[int, ...]

    def fit(self, prompt_token_ids: Sequence[int], model: ModelInfo, default_max_tokens: int) -> SamplingParams:
        """The sampling parameters of this request on this model, `max_tokens` cut to what fits.

        Args:
            prompt_token_ids: the whole prompt.
            model: of the pool.
            default_max_tokens: for a request that names none; 0 is as much as fits.

        Raises:
            InvalidArgumentError: the prompt is empty or too long, a token id is outside the vocabulary, or
                `min_tokens` is more than the tokens that may come.
        """
        check_prompt(prompt_token_ids, model)
        self._check_vocabulary(model.vocab_size)
        room = model.max_model_len - len(prompt_token_ids)
        wanted = self.sampling.max_tokens if self.max_tokens_given else default_max_tokens or room
        check_min_tokens(self.sampling.min_tokens, wanted)
        max_tokens = min(wanted, room)
        if len(self.output_token_ids) > max_tokens:
            raise size_error("output_token_ids", len(self.output_token_ids), "tokens", f"at most {max_tokens}")
        return replace(self.sampling, max_tokens=max_tokens, min_tokens=min(self.sampling.min_tokens, max_tokens))

    def _check_vocabulary(self, vocab_size: int) -> None:
        check_vocabulary("output_token_ids", self.output_token_ids, vocab_size)
        check_vocabulary("sampling.stop_token_ids", self.sampling.stop_token_ids, vocab_size)
        check_vocabulary("sampling.allowed_token_ids", self.sampling.allowed_token_ids or (), vocab_size)
        check_vocabulary("sampling.logit_bias", self.sampling.logit_bias, vocab_size)


def check_generation(message: inference_pb2.Generation) -> Checked:
    """Checks all that can be checked without a model. Raises InvalidArgumentError."""
    n = message.n if message.HasField("n") else 1
    check_range("n", n, N_RANGE)
    spare = CHOICE_SUFFIX_BYTES if n > 1 else 0
    check_bytes("model", message.model, MAX_MODEL_NAME_BYTES)
    check_bytes("request_id", message.request_id, MAX_REQUEST_ID_BYTES - spare)
    check_input(message)
    check_sampling(message.sampling)
    _check_stop(message.stop)
    check_range("priority", message.priority, PRIORITY_RANGE)
    check_bytes("cache_salt", message.cache_salt, MAX_CACHE_SALT_BYTES)
    _check_resumption(message, n)
    return Checked(
        request_id=message.request_id,
        model=message.model,
        sampling=codec.decode_sampling(message.sampling),
        seed_given=message.sampling.HasField("seed"),
        max_tokens_given=message.sampling.HasField("max_tokens"),
        n=n,
        stop=tuple(message.stop),
        keep_special_tokens=message.keep_special_tokens,
        echo=message.echo,
        priority=message.priority,
        cache_salt=message.cache_salt,
        output_token_ids=tuple(message.output_token_ids),
    )


def check_input(message: inference_pb2.Generation | inference_pb2.TokenizeRequest) -> None:
    """Exactly one kind of input, and not too much of it. Raises InvalidArgumentError."""
    kind = message.WhichOneof("input")
    if kind is None:
        raise unset_error("input", "one of text, chat and, to generate, token_ids")
    if kind == "text":
        check_bytes("text", message.text, MAX_PROMPT_BYTES)
    elif kind == "chat":
        _check_chat(message.chat.messages)
    elif isinstance(message, inference_pb2.Generation):
        check_num_tokens("token_ids", len(message.token_ids.token_ids))


def check_prompt(prompt_token_ids: Sequence[int], model: ModelInfo) -> None:
    """The prompt has tokens, leaves room for one more, and the model knows them. Raises InvalidArgumentError."""
    check_prompt_size(len(prompt_token_ids), model)
    check_vocabulary("token_ids", prompt_token_ids, model.vocab_size)


def check_prompt_size(num_tokens: int, model: ModelInfo) -> None:
    """The first two things that `check_prompt` says. Raises InvalidArgumentError."""
    limit = f"[1, {model.max_model_len - 1}], for max_model_len is {model.max_model_len}"
    if num_tokens == 0:
        raise size_error("prompt", 0, "tokens", limit, ErrorReason.PROMPT_EMPTY)
    if num_tokens >= model.max_model_len:
        raise size_error("prompt", num_tokens, "tokens", limit, ErrorReason.PROMPT_TOO_LONG)


def check_vocabulary(field: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Every id is in the vocabulary, else the first that is not is named. Raises InvalidArgumentError."""
    if max(token_ids, default=0) < vocab_size and min(token_ids, default=0) >= 0:
        return
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidArgumentError.of(
                f"{field}[{index}]", token_id, f"[0, {vocab_size})", reason=ErrorReason.TOKEN_OUT_OF_VOCABULARY
            )


def check_num_tokens(field: str, num_tokens: int) -> None:
    """Not more ids than any request may carry. Raises InvalidArgumentError."""
    if num_tokens > MAX_TOKEN_IDS:
        raise size_error(field, num_tokens, "entries", f"at most {MAX_TOKEN_IDS}")


def _check_chat(messages: Sequence[inference_pb2.ChatMessage]) -> None:
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise size_error("chat.messages", len(messages), "messages", f"[1, {MAX_MESSAGES}]")
    total = 0
    for index, message in enumerate(messages):
        if not message.role:
            raise InvalidArgumentError.of(f"chat.messages[{index}].role", "", f"1 to {MAX_ROLE_BYTES} bytes")
        check_bytes(f"chat.messages[{index}].role", message.role, MAX_ROLE_BYTES)
        total += len(message.content.encode())
    if total > MAX_PROMPT_BYTES:
        raise size_error("chat.messages", total, "bytes", f"at most {MAX_PROMPT_BYTES}")


def _check_stop(stop: Sequence[str]) -> None:
    check_num_entries("stop", len(stop), most=MAX_STOP_STRINGS)
    for index, text in enumerate(stop):
        if not text:
            raise InvalidArgumentError.of(f"stop[{index}]", text, f"1 to {MAX_STOP_STRING_BYTES} bytes")
        check_bytes(f"stop[{index}]", text, MAX_STOP_STRING_BYTES)


def _check_resumption(message: inference_pb2.Generation, n: int) -> None:
    if not message.output_token_ids:
        return
    check_num_tokens("output_token_ids", len(message.output_token_ids))
    if n != 1:
        raise InvalidArgumentError.of("n", n, "1, to resume from output_token_ids")
    if not message.sampling.HasField("seed"):
        raise unset_error("sampling.seed", "the seed of the first message, to resume from output_token_ids")


def unset_error(field: str, limit: str) -> InvalidArgumentError:
    """The error of a field that must be set."""
    return InvalidArgumentError(f"{field} is not set; allowed: {limit}", field=field, value="not set", limit=limit)
