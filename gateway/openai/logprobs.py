"""Log-probabilities in the two shapes of the API.

A token that is no text alone, such as the first byte of a character, is written `bytes:\\xf0` as OpenAI does it. Two
tokens of equal bytes are one key in `top_logprobs` of a completion; the more likely one is shown.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.detokenizer import Detokenizer, TokenTable
from gateway.openai.shapes import MIN_LOGPROB, ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from holdback.types import TokenLogprobs


class TextOffsets:
    """Where in the text of a choice each of its tokens begins, in characters."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        """`detokenizer`: primed with everything before the first token."""
        self._detokenizer = detokenizer
        self._num_chars = 0

    def next(self, token_id: int) -> int:
        """Of the next token. A token that completes a character begins before it."""
        offset = self._num_chars
        self._num_chars += len(self._detokenizer.add(token_id))
        return offset


def completion_logprobs(
    entries: Sequence[TokenLogprobs], table: TokenTable, offsets: TextOffsets
) -> CompletionLogprobs:
    """Of new tokens of one choice, in order."""
    return CompletionLogprobs(
        tokens=[_name(table.in_middle(entry.token_id)) for entry in entries],
        token_logprobs=[_finite(entry.logprob) for entry in entries],
        top_logprobs=[_top(entry, table) for entry in entries],
        text_offset=[offsets.next(entry.token_id) for entry in entries],
    )


def chat_logprobs(entries: Sequence[TokenLogprobs], table: TokenTable) -> ChatLogprobs:
    """Of new tokens of one choice, in order."""
    return ChatLogprobs(content=[_chat_entry(entry, table) for entry in entries])


def _chat_entry(entry: TokenLogprobs, table: TokenTable) -> TokenLogprob:
    data = table.in_middle(entry.token_id)
    return TokenLogprob(
        token=_name(data),
        logprob=_finite(entry.logprob),
        bytes=list(data),
        top_logprobs=[
            TopLogprob(token=_name(data), logprob=_finite(logprob), bytes=list(data))
            for token_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
            for data in [table.in_middle(token_id)]
        ],
    )


def _top(entry: TokenLogprobs, table: TokenTable) -> dict[str, float]:
    """The most likely tokens and the chosen one."""
    found: dict[str, float] = {}
    ranked = zip((*entry.top_token_ids, entry.token_id), (*entry.top_logprobs, entry.logprob), strict=True)
    for token_id, logprob in ranked:
        found.setdefault(_name(table.in_middle(token_id)), _finite(logprob))
    return found


def _name(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
