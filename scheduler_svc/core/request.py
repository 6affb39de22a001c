"""A request as the scheduler sees it: token counts, blocks, and what has been produced so far.

The scheduler that holds a request is the only one that changes it. Counters are kept here once and everything else is
derived from them:

    [ prompt ......... | output ............ | one token is sampled, not yet computed
    0        num_prompt_tokens        num_tokens
             num_prefill_tokens = num_prompt_tokens + outputs that were there at the start of this run (K4)
    num_computed_tokens: scheduled so far, steps in flight included; a hit of the prefix cache counts as computed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdback.errors import ErrorReason, InvalidArgumentError
from holdback.types import FinishReason, ModelInfo, RequestSpec, Usage
from scheduler_svc.core.prefix_cache import block_key, root_key


class Request:
    """One request on its way through the scheduler.

    Attributes:
        req_id: the scheduler's name for it.
        spec: what was submitted. `spec.output_token_ids` are prefilled, never sampled again.
        max_tokens: most output tokens, earlier ones included; lowered to what fits `max_model_len` (K10).
        stop_ids: tokens that end it: `stop_token_ids`, and EOS unless it is ignored.
        output_token_ids: all outputs so far, those of the submission first. Only ever appended to.
        num_prompt_tokens: length of the prompt.
        num_prefill_tokens: length of what prefill must compute: prompt, and outputs that came with the submission.
        num_computed_tokens: tokens whose KV is computed by the steps scheduled so far, steps in flight included.
        block_ids: its block table, in order of position.
        num_hit_blocks: how many of them, from the first on, came from the prefix cache; it wrote the others.
        slot: row of the executor's `last_token` table while bound to a lane, else None.
        num_cached_tokens: prompt tokens that its first run got from the prefix cache.
        is_first_run: False for what goes on after earlier outputs or a lost lane; its hits are not counted as hits.
        finish_reason: why it ended; None while it lives.
        decode_until: below this count of computed tokens a decode step needs no new block and is not past the last
            token. 0 while it prefills. The scheduler's own; it saves a decode step three comparisons per row.
        next_block_at: number of outputs with which the next output block is known and computed; never reached where
            blocks are not shared. The scheduler's own.
        outputs_until: the smaller of `next_block_at` and `max_tokens`: with fewer outputs nothing happens to the
            request but a stop token. The scheduler's own.
    """

    __slots__ = (
        "_block_keys",
        "_root_key",
        "block_ids",
        "decode_until",
        "eos_token_ids",
        "finish_reason",
        "is_first_run",
        "max_tokens",
        "next_block_at",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_hit_blocks",
        "num_prefill_tokens",
        "num_prompt_tokens",
        "output_token_ids",
        "outputs_until",
        "req_id",
        "slot",
        "spec",
        "stop_ids",
    )

    def __init__(self, req_id: str, spec: RequestSpec, eos_token_ids: tuple[int, ...]) -> None:
        self.req_id = req_id
        self.spec = spec
        self.eos_token_ids = eos_token_ids
        sampling = spec.sampling
        self.max_tokens = sampling.max_tokens
        self.stop_ids = frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else eos_token_ids)
        self.output_token_ids: list[int] = list(spec.output_token_ids)
        self.num_prompt_tokens = len(spec.prompt_token_ids)
        self.num_prefill_tokens = self.num_prompt_tokens + len(self.output_token_ids)
        self.num_computed_tokens = 0
        self.block_ids: list[int] = []
        self.slot: int | None = None
        self.num_hit_blocks = 0
        self.num_cached_tokens = 0
        self.is_first_run = not self.output_token_ids
        self.finish_reason: FinishReason | None = None
        self.decode_until = 0
        self.next_block_at = 0
        self.outputs_until = 0
        self._block_keys: dict[int, list[bytes]] = {}
        self._root_key = root_key([("cache_salt", spec.cache_salt)] if spec.cache_salt else [])

    def __repr__(self) -> str:
        return f"Request({self.req_id!r}, computed {self.num_computed_tokens} of {self.num_tokens})"

    @property
    def num_tokens(self) -> int:
        """Tokens that are known: prompt and outputs."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def is_prefill(self) -> bool:
        """K4: the phase of the next step that contains it."""
        return self.num_computed_tokens < self.num_prefill_tokens

    @property
    def last_computed(self) -> int:
        """Computed tokens of the step that samples the last allowed output; that output itself is never computed."""
        return self.num_prompt_tokens + self.max_tokens - 1

    @property
    def num_steps_left(self) -> int:
        """Tokens that are still to be computed until the last allowed output is sampled."""
        return self.last_computed - self.num_computed_tokens

    @property
    def num_output_placeholders(self) -> int:
        """Outputs that steps in flight will sample; their tokens are not known yet."""
        if self.is_prefill:
            return 0
        return self.num_computed_tokens + 1 - self.num_tokens

    def ending(self, token_id: int) -> tuple[FinishReason | None, int | None]:
        """Whether `token_id`, the newest output, ends the request: EOS first, then stop ids, then length.

        Returns:
            The reason, None while the request goes on; and the stop id that ended it.
        """
        sampling, num_outputs = self.spec.sampling, len(self.output_token_ids)
        if token_id in self.stop_ids and num_outputs >= sampling.min_tokens:
            is_eos = token_id in self.eos_token_ids and not sampling.ignore_eos
            return FinishReason.STOP, None if is_eos else token_id
        return (FinishReason.LENGTH if num_outputs >= self.max_tokens else None), None

    def start_decode(self, block_size: int, *, publishes: bool) -> None:
        """Sets the marks of the row loops, once the last prefill chunk is scheduled."""
        num_prefill = self.num_prefill_tokens
        self.decode_until = min(len(self.block_ids) * block_size, self.last_computed)
        # With one output more than this is beyond the prompt, all tokens of the block behind the prefill are computed.
        next_boundary = (num_prefill // block_size + 1) * block_size
        self.next_block_at = next_boundary - self.num_prompt_tokens + 1 if publishes else self.max_tokens + 1
        self.outputs_until = min(self.max_tokens, self.next_block_at)

    def limit_length(self, max_model_len: int) -> None:
        """K10: cuts `max_tokens` to what fits behind the prompt."""
        self.max_tokens = min(self.max_tokens, max_model_len - self.num_prompt_tokens)

    def token_ids(self, start: int, stop: int) -> Sequence[int]:
        """Known tokens at positions [start, stop), prompt and outputs as one sequence."""
        num_prompt = self.num_prompt_tokens
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        if stop <= num_prompt:
            return self.spec.prompt_token_ids[start:stop]
        return [*self.spec.prompt_token_ids[start:num_prompt], *self.output_token_ids[: stop - num_prompt]]

    def block_key(self, index: int, block_size: int) -> bytes:
        """Key of full block number `index` in the prefix cache; its tokens must be known.

        Keys are computed once each and only as far as they are asked for. While the request waits, lanes of different
        block sizes may ask.
        """
        keys = self._block_keys.setdefault(block_size, [])
        while len(keys) <= index:
            start = len(keys) * block_size
            parent = keys[-1] if keys else self._root_key
            keys.append(block_key(parent, self.token_ids(start, start + block_size)))
        return keys[index]

    def usage(self) -> Usage:
        return Usage(self.num_prompt_tokens, len(self.output_token_ids), self.num_cached_tokens)

    def continuation(self) -> Request:
        """The same request, unbound, to go on elsewhere: it prefills prompt and outputs so far (K4).

        Steps that still compute the old object change nothing of the new one.
        """
        spec = replace(self.spec, output_token_ids=tuple(self.output_token_ids))
        request = Request(self.req_id, spec, self.eos_token_ids)
        request.is_first_run = False
        request.num_cached_tokens = self.num_cached_tokens
        return request


def check_request(spec: RequestSpec, model: ModelInfo) -> None:
    """Refuses at submission what the model can never serve.

    Raises:
        InvalidArgumentError: an empty prompt (PROMPT_EMPTY); prompt, or prompt and outputs so far, that leave no room
            for one more token within `max_model_len` (PROMPT_TOO_LONG, K10); a token id outside the vocabulary
            (TOKEN_OUT_OF_VOCABULARY); nothing left of `max_tokens`.
    """
    num_prompt, num_outputs = len(spec.prompt_token_ids), len(spec.output_token_ids)
    if num_prompt == 0:
        raise InvalidArgumentError.of("prompt_token_ids", "0 tokens", "at least 1", reason=ErrorReason.PROMPT_EMPTY)
    if num_prompt + num_outputs >= model.max_model_len:
        raise prompt_too_long(num_prompt, num_outputs, model.max_model_len)
    if spec.sampling.max_tokens <= num_outputs:
        limit = f"more than the {num_outputs} output tokens so far" if num_outputs else ">= 1"
        raise InvalidArgumentError.of("sampling.max_tokens", spec.sampling.max_tokens, limit)
    _check_token_ids("prompt_token_ids", spec.prompt_token_ids, model.vocab_size)
    _check_token_ids("output_token_ids", spec.output_token_ids, model.vocab_size)
    _check_token_ids("sampling.stop_token_ids", spec.sampling.stop_token_ids, model.vocab_size)
    _check_token_ids("sampling.allowed_token_ids", spec.sampling.allowed_token_ids or (), model.vocab_size)
    _check_token_ids("sampling.logit_bias", tuple(spec.sampling.logit_bias), model.vocab_size, is_list=False)


def prompt_too_long(num_prompt: int, num_outputs: int, max_model_len: int) -> InvalidArgumentError:
    """K10: prompt and outputs so far leave no room for one more token."""
    shown = f"{num_prompt} tokens" if num_outputs == 0 else f"{num_prompt} tokens with {num_outputs} outputs so far"
    limit = f"at most {max_model_len - 1} in all, as max_model_len is {max_model_len} with at least one new token"
    message = f"prompt_token_ids is {shown}; allowed: {limit}"
    return InvalidArgumentError(
        message, field="prompt_token_ids", value=shown, limit=limit, reason=ErrorReason.PROMPT_TOO_LONG
    )


def _check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int, *, is_list: bool = True) -> None:
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    index, token_id = next((i, token_id) for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size)
    path = f"{field}[{index}]" if is_list else field
    raise InvalidArgumentError.of(path, token_id, f"[0, {vocab_size})", reason=ErrorReason.TOKEN_OUT_OF_VOCABULARY)
