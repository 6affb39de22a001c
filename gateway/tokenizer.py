"""Text to token ids with the tokenizer of a model directory, off the event loop.

Special tokens are added once. A prompt of plain text gets what the model's tokenizer.json adds (usually BOS, often
nothing); if the text itself begins with the BOS string, that one counts and no second is added. A rendered chat gets
none, for its template wrote them. As in transformers, `add_bos_token` beside a tokenizer.json means nothing.

Texts have threads by their length, so that none waits behind a longer kind; among its like, what is shorter goes first
(`turns`). The threads are those of all tokenizers of a process, and of long texts each kind has one: while it is
tokenized, a text takes up to 400 times its size.
"""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import tokenizers

from gateway.detokenizer import TokenTable, decode
from gateway.limits import MAX_TOKEN_IDS
from gateway.memory import give_back_memory
from gateway.turns import TurnLimits, Turns
from holdback.errors import ConfigError, ErrorReason
from holdback.request_limits import size_error
from holdback.types import ModelInfo

TOKENIZER_FILE = "tokenizer.json"
MAX_THREADS = 4
CHARS_PER_TOKEN = 4
"""What a token to decode counts, by its memory and that of its text."""

MEBI = 1024 * 1024
LONG_TEXT_CHARS = 64 * 1024
"""Above which a text takes memory that is worth giving back at once."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Texts of one kind, with threads of their own.

    Attributes:
        max_text_chars: the longest text.
        max_num_tokens: the most tokens to decode, which take about as long.
        max_chars: of all that waits for its turn.
        max_threads: of which there are no more than processors either.
    """

    max_text_chars: int
    max_num_tokens: int
    max_chars: int
    max_threads: int


LANES = (
    Lane(4 * 1024, 16 * 1024, 8 * MEBI, MAX_THREADS),
    Lane(64 * 1024, 128 * 1024, 32 * MEBI, MAX_THREADS),
    Lane(MEBI, 512 * 1024, 32 * MEBI, 1),
    Lane(8 * MEBI, MAX_TOKEN_IDS, 64 * MEBI, 1),
)
"""The longest of each take about 5 ms, 0.1 s, 1 s and 10 s, all that may wait of a kind at most 100 s of a thread."""

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


T = TypeVar("T")


class Tokenizer:
    """The tokenizer of one pool.

    Attributes:
        table: bytes of every token, for detokenizing.
        special_tokens: `bos_token`, `eos_token` and so on, as the directory names them; the chat template sees them.
        chat_template: Jinja source, None where the directory has none.
        bos_token_id: None where there is none.
        eos_token_ids: all that the directory's files name; empty where they name none.
        largest_token_id: of the vocabulary, added tokens included.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        files: dict[str, Any],
        chat_template: str | None,
        threads: TokenizerThreads,
    ) -> None:
        config = files["tokenizer_config.json"]
        self._backend = backend
        self._threads = threads
        backend.no_truncation()
        backend.no_padding()
        self.table = TokenTable(backend)
        self.special_tokens = _special_tokens(config)
        self.chat_template = chat_template
        self.bos_token_id = self.id_of("bos_token")
        self.eos_token_ids = _eos_token_ids(files, self.id_of("eos_token"))
        self.largest_token_id = max(backend.get_vocab(with_added_tokens=True).values())
        self._largest_base_id = max(backend.get_vocab(with_added_tokens=False).values(), default=-1)
        self._prefix, self._suffix = self._added_tokens()

    @classmethod
    def load(cls, directory: pathlib.Path, threads: TokenizerThreads | None = None) -> Tokenizer:
        """The tokenizer in a directory of Hugging Face layout.

        Args:
            directory: of the model.
            threads: that it shares with others; its own where there are none.

        Raises:
            ConfigError: the directory or a file in it is missing or is not what its name says.
        """
        path = directory / TOKENIZER_FILE
        if not path.is_file():
            raise ConfigError(f"tokenizer is {str(directory)!r}; allowed: a model directory with {TOKENIZER_FILE}")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{path}: not a tokenizer: {error}") from None
        names = ("tokenizer_config.json", "generation_config.json", "config.json")
        files = {name: _read_json(directory / name) for name in names}
        template = _read_chat_template(directory, files["tokenizer_config.json"])
        return cls(backend, files, template, TokenizerThreads() if threads is None else threads)

    async def encode(self, text: str) -> list[int]:
        """Token ids of plain text, the model's special tokens added once.

        Raises:
            InvalidArgumentError: they are more than any request may have.
            ResourceExhaustedError: too much text of this kind waits already.
        """
        token_ids = await self.encode_rendered(text)
        prefix = self._prefix
        if self.bos_token_id is not None and token_ids[:1] == [self.bos_token_id] and prefix[-1:] == token_ids[:1]:
            prefix = prefix[:-1]
        return [*prefix, *token_ids, *self._suffix]

    async def encode_rendered(self, text: str) -> list[int]:
        """Token ids of text that already has its special tokens, as a chat template writes it. Raises as `encode`."""
        return await self._threads.for_text(len(text)).run(len(text), partial(self._encode, text))

    async def decode(
        self, token_ids: Sequence[int], *, keep_special_tokens: bool = False, whole_only: bool = False
    ) -> str:
        """Text of token ids, as `detokenizer.decode` says. Raises ResourceExhaustedError as `encode`."""
        work = partial(decode, self.table, token_ids, keep_special_tokens=keep_special_tokens, whole_only=whole_only)
        return await self._threads.for_tokens(len(token_ids)).run(len(token_ids) * CHARS_PER_TOKEN, work)

    def mismatch(self, model: ModelInfo) -> str | None:
        """Why this tokenizer cannot serve the model, with the numbers; None if it can.

        Added tokens may lie beyond the vocabulary, as one for images does in Gemma 3's text models; a prompt that has
        one is refused by itself.
        """
        if self._largest_base_id >= model.vocab_size:
            return (
                f"the tokenizer's largest token id is {self._largest_base_id}; "
                f"allowed: below vocab_size of model {model.name!r}, which is {model.vocab_size}"
            )
        unknown = [token_id for token_id in model.eos_token_ids if not self.table.has_token(token_id)]
        if unknown:
            return f"EOS id {unknown[0]} of model {model.name!r} is no token of the tokenizer"
        if self.eos_token_ids and model.eos_token_ids and not self.eos_token_ids & set(model.eos_token_ids):
            return (
                f"the EOS ids of model {model.name!r} are {sorted(model.eos_token_ids)}; "
                f"allowed: one of the tokenizer's, which are {sorted(self.eos_token_ids)}"
            )
        return None

    def close(self) -> None:
        """Ends the threads, also for those that share them."""
        self._threads.close()

    def _encode(self, text: str) -> list[int]:
        num_tokens, token_ids = self._token_ids(text)
        if len(text) > LONG_TEXT_CHARS:
            give_back_memory()
        if num_tokens > MAX_TOKEN_IDS:
            limit, reason = f"at most {MAX_TOKEN_IDS}", ErrorReason.PROMPT_TOO_LONG
            raise size_error("prompt", num_tokens, "tokens", limit, reason)
        return token_ids

    def _token_ids(self, text: str) -> tuple[int, list[int]]:
        """How many tokens the text has, and their ids where they are not too many. Raises nothing: the encoding, some
        gigabytes, would live as long as the error."""
        # `encode` of one text holds Python's lock for as long as it takes, seconds for a megabyte; this does not.
        # `fast` leaves out where in the text each token is, and its string: less than half of the time, less memory,
        # and what it gives is let go of in less time, in which the lock is held.
        encoding = self._backend.encode_batch_fast([text], add_special_tokens=False)[0]
        # To hand over more would hold the lock too long, and no request could have them.
        return len(encoding), encoding.ids if len(encoding) <= MAX_TOKEN_IDS else []

    def id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def _added_tokens(self) -> tuple[list[int], list[int]]:
        """What tokenizer.json puts before and after plain text."""
        encoding = self._backend.encode("a")
        token_ids, is_added = encoding.ids, encoding.special_tokens_mask
        own = [index for index, added in enumerate(is_added) if not added] or [len(token_ids)]
        return token_ids[: own[0]], token_ids[own[-1] + 1 :]


class TokenizerThreads:
    """Where the tokenizers of a process work, so that what they take together is bounded, however many there are."""

    def __init__(self) -> None:
        self._queues = [_Queue(lane) for lane in LANES]

    def for_text(self, num_chars: int) -> _Queue:
        """For a text of this length."""
        return next((queue for queue in self._queues if num_chars <= queue.lane.max_text_chars), self._queues[-1])

    def for_tokens(self, num_tokens: int) -> _Queue:
        """For so many tokens to decode."""
        return next((queue for queue in self._queues if num_tokens <= queue.lane.max_num_tokens), self._queues[-1])

    def close(self) -> None:
        """Takes no more work. What is under way goes on."""
        for queue in self._queues:
            queue.close()


class _Queue:
    """The threads of one lane, and what waits for them."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        num_threads = min(lane.max_threads, os.cpu_count() or 1)
        limits = TurnLimits(num_threads, lane.max_chars, largest_chars=lane.max_text_chars)
        self._turns = Turns("tokenized", limits)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=f"tokenizer-{lane.max_text_chars}")

    async def run(self, num_chars: int, work: Callable[[], T]) -> T:
        """The result of `work`, in a thread when its turn has come."""
        return await self._turns.run(num_chars, lambda: asyncio.get_running_loop().run_in_executor(self._threads, work))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found


def _eos_token_ids(files: dict[str, Any], eos_token_id: int | None) -> frozenset[int]:
    found = set() if eos_token_id is None else {eos_token_id}
    for name in ("generation_config.json", "config.json"):
        value = files[name].get("eos_token_id")
        found.update(i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
    return frozenset(found)


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in an optional file; empty where there is none."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: an object is needed, not {type(content).__name__}")
    return content


def _read_chat_template(directory: pathlib.Path, config: dict[str, Any]) -> str | None:
    """A file of its own wins over the configuration; of several named templates the one called `default` is meant."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not a template: {error}") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
