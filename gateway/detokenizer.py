"""Token ids to text, one token at a time, and the strings that end it.

The idea: away from the start of a text, every token stands for the same bytes wherever it is, so text is the UTF-8 of
those bytes and one token costs one table look-up. What is not yet a whole character (at most three bytes) waits for
the next token; what can no longer become one is shown as U+FFFD, one for each maximal invalid part, as Rust and the
Unicode standard do it. Hence pieces concatenate to the same text however tokens arrive, streamed or not.

Why not `tokenizers.decoders.DecodeStream` (0.23): primed with a prompt that ends inside a character it gives out the
whole prompt with the first token; it holds back everything after a byte that is no character until some later token
looks whole, decoding all of it again each time; and it cannot be flushed, so a truncated character is lost.

One difference from `Tokenizer.decode`, with byte-fallback vocabularies only (`<0x0A>`): there a run of byte tokens with
one wrong byte is shown as U+FFFD for each byte, whole characters of the run included, so nothing of a run could be
streamed before it ends, and a text in Thai may be one such run. Here whole characters of a run stay.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from holdback.errors import ConfigError, InternalError

MAX_PENDING_BYTES = 3
"""An incomplete UTF-8 character is at most this long."""

DECODED_AT_ONCE = 16 * 1024
"""Tokens that are turned into text in one go, which takes Python's lock for a few milliseconds."""

SUPPORTED_DECODERS = ("ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece")


class TokenDecoder(Protocol):
    """What is used of `tokenizers.Tokenizer`."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def id_to_token(self, id: int) -> str | None: ...  # noqa: A002
    def get_added_tokens_decoder(self) -> dict[int, Any]: ...
    def get_vocab_size(self, with_added_tokens: bool = True) -> int: ...
    def to_str(self, pretty: bool = False) -> str: ...


class TokenTable:
    """The bytes of every token of one vocabulary, found when first asked for. Shared by all requests of a pool."""

    def __init__(self, tokenizer: TokenDecoder) -> None:
        """Raises ConfigError for a decoder that cannot be streamed."""
        self._tokenizer = tokenizer
        kinds = decoder_kinds(tokenizer)
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        self._special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._middle: dict[int, bytes] = {}
        self._context, self._context_text = (0, "") if self._is_byte_level else self._find_context()

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def in_middle(self, token_id: int) -> bytes:
        """What the token adds to a text that has begun; nothing for an id without a token."""
        found = self._middle.get(token_id)
        if found is None:
            found = self._middle[token_id] = self._derive(token_id)
        return found

    def at_start(self, token_id: int) -> bytes:
        """What the token is as the first of a text, where many vocabularies drop a space."""
        if self._is_byte_level or self._tokenizer.id_to_token(token_id) is None:
            return self.in_middle(token_id)
        byte, text = self._byte_token(token_id), self._text([token_id])
        return byte if byte is not None and "\ufffd" in text else text.encode()

    def has_token(self, token_id: int) -> bool:
        return self._tokenizer.id_to_token(token_id) is not None

    def _derive(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return byte_level_bytes(token)
        byte = self._byte_token(token_id)
        if byte is not None:
            return byte
        text = self._text([self._context, token_id])
        if not text.startswith(self._context_text):
            raise InternalError(f"token {token_id} changes the text before it; the tokenizer cannot be streamed")
        return text[len(self._context_text) :].encode()

    def _byte_token(self, token_id: int) -> bytes | None:
        token = self._tokenizer.id_to_token(token_id) or ""
        if not (self._has_byte_tokens and len(token) == 6 and token.startswith("<0x") and token.endswith(">")):
            return None
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return None

    def _find_context(self) -> tuple[int, str]:
        """A token to put before others, so that they are decoded as in the middle of a text."""
        for token_id in range(self._tokenizer.get_vocab_size()):
            if token_id in self._special or self._byte_token(token_id) is not None:
                continue
            text = self._text([token_id])
            if text.isalnum() and self._text([token_id, token_id]).startswith(text):
                return token_id, text
        raise ConfigError("the tokenizer has no token of letters or digits; it cannot be streamed")

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def decoder_kinds(tokenizer: TokenDecoder) -> set[str]:
    """Names of the tokenizer's decoding steps. Raises ConfigError for those whose text changes with later tokens."""
    steps = list(_steps(json.loads(tokenizer.to_str())["decoder"]))
    kinds = {str(step["type"]) for step in steps}
    unknown = sorted(kinds.difference(SUPPORTED_DECODERS))
    if unknown:
        raise ConfigError(f"the tokenizer's decoder is {unknown[0]}; allowed: {', '.join(SUPPORTED_DECODERS)}")
    if "ByteLevel" in kinds and not kinds <= {"ByteLevel", "ByteFallback", "Fuse"}:
        raise ConfigError(f"the tokenizer's decoder is {sorted(kinds)}; allowed: ByteLevel with nothing beside it")
    if any(step["type"] == "Strip" and step["stop"] for step in steps):
        raise ConfigError("the tokenizer's decoder strips the end of a text; allowed: Strip with stop 0")
    return kinds


def _steps(decoder: dict[str, Any] | None) -> Iterable[dict[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for inner in decoder["decoders"]:
            yield from _steps(inner)
    else:
        yield decoder


def _byte_level_alphabet() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes: itself if printable, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_LEVEL_ALPHABET = _byte_level_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; an added token with any other character is written as it is."""
    try:
        return bytes([_BYTE_LEVEL_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()


class Detokenizer:
    """Text of one output, that is `decode(prompt + output)` without the characters that `decode(prompt)` has whole."""

    def __init__(
        self, table: TokenTable, prompt_token_ids: Sequence[int] = (), *, keep_special_tokens: bool = False
    ) -> None:
        """Looks at the end of the prompt only, however long it is.

        Args:
            table: of the pool's vocabulary.
            prompt_token_ids: what comes before; a character that it leaves incomplete is completed by the output.
            keep_special_tokens: special tokens appear in the text.
        """
        self._table = table
        self._keep_special_tokens = keep_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        tail = self._tail(prompt_token_ids)
        self._has_begun = tail is not None
        self._decode(tail or b"")
        self._has_output = False

    def add(self, token_id: int) -> str:
        """The text that became certain with this token; may be empty. Ids without a token add nothing."""
        if not self._is_shown(token_id):
            return ""
        self._has_output = True
        if self._has_begun:
            return self._decode(self._table.in_middle(token_id))
        self._has_begun = True
        return self._decode(self._table.at_start(token_id))

    def add_all(self, token_ids: Sequence[int]) -> str:
        """The text of several tokens, as of one after the other: faster, for each of them is looked at once."""
        start = 0
        first = ""
        while start < len(token_ids) and not self._has_begun:
            first += self.add(token_ids[start])
            start += 1
        rest = token_ids[start:]
        shown = {token_id: self._table.in_middle(token_id) for token_id in set(rest) if self._is_shown(token_id)}
        self._has_output = self._has_output or bool(shown)
        return first + self._decode(b"".join([shown[token_id] for token_id in rest if token_id in shown]))

    def flush(self) -> str:
        """The rest at the end of the output: U+FFFD if it ends within a character, else nothing."""
        return self._utf8.decode(b"", final=True) if self._has_output else ""

    def _decode(self, data: bytes) -> str:
        text = self._utf8.decode(data)
        pending = self._utf8.getstate()[0]
        # Python waits for the third byte of half a surrogate pair, although no third byte makes it a character.
        if len(pending) == 2 and pending[0] == 0xED and pending[1] >= 0xA0:
            self._utf8.reset()
            return text + "\ufffd\ufffd"
        return text

    def _is_shown(self, token_id: int) -> bool:
        return (self._keep_special_tokens or not self._table.is_special(token_id)) and self._table.has_token(token_id)

    def _tail(self, token_ids: Sequence[int]) -> bytes | None:
        """The last bytes of the prompt, enough to hold an incomplete character; None where it shows no token."""
        tail: bytes | None = None
        for token_id in reversed(token_ids):
            if self._is_shown(token_id):
                tail = self._table.in_middle(token_id) + (tail or b"")
                if len(tail) >= MAX_PENDING_BYTES:
                    break
        return None if tail is None else tail[-MAX_PENDING_BYTES:]


def decode(
    table: TokenTable, token_ids: Sequence[int], *, keep_special_tokens: bool = False, whole_only: bool = False
) -> str:
    """All tokens at once, by the same rules; `whole_only` leaves out a character that is incomplete at the end."""
    detokenizer = Detokenizer(table, keep_special_tokens=keep_special_tokens)
    starts = range(0, len(token_ids), DECODED_AT_ONCE)
    text = "".join([detokenizer.add_all(token_ids[start : start + DECODED_AT_ONCE]) for start in starts])
    return text if whole_only else text + detokenizer.flush()


class StopStrings:
    """Finds the first of some strings in text that comes in pieces, and gives out no part of it.

    What is withheld is exactly the longest end of the text that begins some stop string. Each character moves one
    state of a Knuth-Morris-Pratt automaton for each string, so the cost depends on the new text alone. Of several
    matches the one that ends first counts, then the longest: the outcome is the same however the text was cut.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """`stop`: none of them empty; nothing is looked for when there are none."""
        self._patterns = [_Pattern(text) for text in sorted(set(stop), key=len, reverse=True)]
        self._states = [0] * len(self._patterns)
        self._first_characters = frozenset(text[0] for text in stop)
        self._withheld = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """Text that is now certain, and the stop string that ended it; nothing may be added after one."""
        if not self._withheld and self._first_characters.isdisjoint(text):
            return text, None
        for position, character in enumerate(text):
            matched = self._advance(character)
            if matched is not None:
                before = self._withheld + text[: position + 1]
                self._withheld = ""
                return before[: len(before) - len(matched)], matched
        pending = self._withheld + text
        num_certain = len(pending) - max(self._states)
        self._withheld = pending[num_certain:]
        return pending[:num_certain], None

    def flush(self) -> str:
        """What is still withheld, when the text ends without a match."""
        rest, self._withheld = self._withheld, ""
        self._states = [0] * len(self._patterns)
        return rest

    def _advance(self, character: str) -> str | None:
        """Moves every automaton by one character; the longest stop string that ends here, if any does."""
        matched = None
        for index, pattern in enumerate(self._patterns):
            state = self._states[index]
            if not state and character != pattern.text[0]:
                continue
            state = pattern.next_state(state, character)
            if state == len(pattern.text):
                matched = matched or pattern.text
                state = pattern.fallback(state)
            self._states[index] = state
        return matched


class _Pattern:
    """A stop string; its states are how many of its characters the text ends with.

    The table of the automaton is made as far as text has matched: a request has many strings, and few of them begin.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._fallbacks = [0, 0]

    def next_state(self, state: int, character: str) -> int:
        while state and self.text[state] != character:
            state = self.fallback(state)
        return state + (self.text[state] == character)

    def fallback(self, state: int) -> int:
        """The longest end of the first `state` characters that is a beginning as well, and not all of them."""
        while len(self._fallbacks) <= state:
            self._fallbacks.append(self.next_state(self._fallbacks[-1], self.text[len(self._fallbacks) - 1]))
        return self._fallbacks[state]
