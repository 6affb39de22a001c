"""Small tokenizers of the kinds that language models have, trained here in milliseconds."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "Hello world, how are you today? The quick brown fox runs far and the red fox ran home.",
    "a <end> of the text; def main(): return 0x1F # spaces   and\ttabs\nand lines",
    "Ünïcödé übermäßig čeština русский",
] * 4
SPECIAL_TOKENS = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|user|>{{ message['role'] }}: {{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
KINDS = ("byte_level", "byte_fallback", "metaspace")


@functools.cache
def make_tokenizer(kind: str) -> Tokenizer:
    """`byte_level` as GPT-2 and Llama 3, `byte_fallback` as Llama 2, `metaspace` as T5. Callers copy it."""
    tokenizer = {"byte_level": _byte_level, "byte_fallback": _byte_fallback, "metaspace": _metaspace}[kind]()
    tokenizer.add_tokens([AddedToken("wörd with space", normalized=False), AddedToken("<|tool|>", normalized=False)])
    return tokenizer


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL_TOKENS, show_progress=False
        ),
    )
    return tokenizer


def _byte_fallback() -> Tokenizer:
    """BPE over `▁` words that writes characters it does not know as bytes; the first space of a text is its own."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    ascii_texts = [text for text in TEXTS if text.isascii()]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL_TOKENS + byte_tokens, show_progress=False)
    trained.train_from_iterator(ascii_texts, trainer)
    state = json.loads(trained.to_str())
    state["model"]["byte_fallback"] = True
    for token in state["added_tokens"]:
        token["special"] = token["content"] in SPECIAL_TOKENS
    state["added_tokens"] = [token for token in state["added_tokens"] if token["special"]]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=SPECIAL_TOKENS, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def with_bos(tokenizer: Tokenizer) -> Tokenizer:
    """A copy that puts `<s>` in front of a text."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", known_id(copy, "<s>"))]
    )
    return copy


def save_directory(path: pathlib.Path, tokenizer: Tokenizer, **config: Any) -> pathlib.Path:
    """Writes a model directory's tokenizer files; `config` is added to tokenizer_config.json, None removes a key."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    full = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE} | config
    content = {key: value for key, value in full.items() if value is not None}
    (path / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    return path


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token for each byte."""
    if tokenizer.token_to_id("<0x00>") is not None:
        tokens = [f"<0x{byte:02X}>" for byte in data]
    else:
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        tokens = [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in data]
    return [known_id(tokenizer, token) for token in tokens]


def known_id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    if found is None:
        raise LookupError(f"no token {token!r}")
    return found
