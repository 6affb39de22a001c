"""`holdback model import`: makes a model directory in Hugging Face layout from a GGUF file or from another directory.

What is imported once is read by every executor (weights, configuration) and by the gateway (tokenizer, chat template)
without a conversion of its own. The directory is made aside and renamed when complete, so a destination that exists is a
whole one, and a record of its source in it makes a second import of the same source do nothing.

Quantized GGUF weights are unpacked into dense ones: the device runs float32 or bfloat16.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import pathlib
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import gguf
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers import pre_tokenizers as pre
from tqdm import tqdm  # type: ignore[import-untyped]

from executor_svc.models import DTYPES, load_plain, parse_dtype, read_config
from holdback.errors import ConfigError

CONVERTER_VERSION = 1
"""Raised when an import of the same source would give other files; older imports are then not taken as complete."""

RECORD_NAME = "holdback_import.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
# The splits that transformers makes of `tokenizer.ggml.pre`, and those of the GPT-2 kind, which it makes of any other
# name. A name in neither, nor below, would be split as GPT-2 does and silently give other token ids.
GPT2_SPLITS = frozenset({"default", "gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais"})
DIGIT_SPLITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
PROBE_TEXTS = (
    "Hello, world! It's 12:34 on 2024-05-06,  and   1234567 tokens  42 wait.\n\n  7 indented\tlines\n 8",
    "naïve café — 東京 한국어 🙂👩‍👩‍👧 \u00a0ⅷ ½ ٣٤",
)


@dataclass(frozen=True, slots=True)
class Source:
    """What is imported.

    Attributes:
        name: as the caller wrote it.
        path: a GGUF file or a directory in Hugging Face layout.
    """

    name: str
    path: pathlib.Path

    @property
    def is_gguf(self) -> bool:
        return self.path.is_file()

    def files(self) -> list[pathlib.Path]:
        if self.is_gguf:
            return [self.path]
        wanted = {
            *TOKENIZER_FILES,
            "config.json",
            "generation_config.json",
            "vocab.json",
            "merges.txt",
            "tokenizer.model",
        }
        return sorted(path for path in self.path.iterdir() if path.name in wanted or ".safetensors" in path.name)


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes two imports the same: the bytes of the source, the dtype and the converter."""

    source_sha256: str
    dtype: str
    converter_version: int = CONVERTER_VERSION


def import_model(
    source_name: str, destination: pathlib.Path, dtype: str = "float32", *, show_progress: bool | None = None
) -> bool:
    """Imports `source_name` to `destination`. True when it did, False when a complete import was already there.

    Args:
        source_name: a GGUF file, a directory in Hugging Face layout, or `package:NAME` for the only .gguf file in an
            installed package.
        destination: directory to make; its parent is made too.
        dtype: "float32" or "bfloat16", of the weights written.
        show_progress: None shows a bar on a terminal only.

    Raises:
        ConfigError: the source is no model, or the destination exists and is something else.
    """
    parse_dtype(dtype)
    source = find_source(source_name)
    bar = tqdm(
        total=4, desc="reading source", unit="step", disable=None if show_progress is None else not show_progress
    )
    with bar, _quiet_transformers(show_bars=not bar.disable):
        identity = Identity(_digest(source), dtype)
        bar.update()
        if _already_there(destination, identity):
            return False
        with _made_aside(destination) as aside:
            _convert(source, aside, dtype, _stage_setter(bar))
            _write_record(aside, source, identity)
    return True


def find_source(name: str) -> Source:
    """The file or directory that `name` means. Raises ConfigError when there is none, or no single one."""
    package = name.removeprefix("package:")
    if package != name:
        return Source(name, _gguf_in_package(package))
    path = pathlib.Path(name)
    if not path.exists():
        raise ConfigError(f"SRC is {name!r}, which does not exist; allowed: a GGUF file or a model directory")
    if path.is_dir():
        read_config(path)
    return Source(name, path)


def _gguf_in_package(package: str) -> pathlib.Path:
    if not package.isidentifier():
        raise ConfigError(f"SRC is 'package:{package}'; allowed: package: and the name of a top-level package")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"SRC is 'package:{package}', and no such package is installed")
    found = [path for place in spec.submodule_search_locations for path in sorted(pathlib.Path(place).rglob("*.gguf"))]
    if len(found) != 1:
        raise ConfigError(f"SRC is 'package:{package}', which holds {len(found)} .gguf files; allowed: exactly 1")
    return found[0]


def _digest(source: Source) -> str:
    digest = hashlib.sha256()
    for path in source.files():
        digest.update(struct.pack("<Q", path.stat().st_size))
        if not source.is_gguf:
            digest.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _already_there(destination: pathlib.Path, identity: Identity) -> bool:
    """Whether `destination` is a complete import of the same source. Raises ConfigError when it is anything else."""
    if not destination.exists() or (destination.is_dir() and not any(destination.iterdir())):
        return False
    try:
        record = json.loads((destination / RECORD_NAME).read_text(encoding="utf-8"))
        recorded, sizes = record["identity"], record["file_sizes"]
        is_complete = all((destination / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"DEST is {str(destination)!r}, which exists and is no complete import; remove it") from None
    if not is_complete:
        raise ConfigError(f"DEST is {str(destination)!r}, an import whose files have changed since; remove it")
    if recorded != asdict(identity):
        raise ConfigError(
            f"DEST is {str(destination)!r}, an import of something else: it records {recorded}, "
            f"this one is {asdict(identity)}; remove it or choose another"
        )
    return True


@contextlib.contextmanager
def _made_aside(destination: pathlib.Path) -> Iterator[pathlib.Path]:
    """A directory beside `destination` that becomes it on success and is gone on failure."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    aside = destination.parent / f".{destination.name}.{os.getpid()}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        aside.rename(destination)
    except OSError as error:
        raise ConfigError(f"DEST is {str(destination)!r}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _stage_setter(bar: Any) -> Callable[[str], None]:
    def enter(stage: str) -> None:
        bar.set_description(stage)
        bar.update()

    return enter


def _convert(source: Source, aside: pathlib.Path, dtype: str, enter: Callable[[str], None]) -> None:
    enter("loading weights")
    model = _load_gguf(source.path) if source.is_gguf else load_plain(source.path, torch.float32)
    enter("writing weights")
    model.to(DTYPES[dtype])  # type: ignore[arg-type]
    model.config.dtype = DTYPES[dtype]
    model.save_pretrained(aside, max_shard_size="5GB")
    enter("writing tokenizer")
    if not source.is_gguf and (source.path / "tokenizer.json").is_file():
        for name in TOKENIZER_FILES:
            if (source.path / name).is_file():
                shutil.copyfile(source.path / name, aside / name)
    else:
        tokenizer = _gguf_tokenizer(source.path) if source.is_gguf else _converted_tokenizer(source.path)
        tokenizer.save_pretrained(aside)
        _check_tokenizer(aside, tokenizer)
    _check_vocabulary(aside, int(model.config.vocab_size))


def _load_gguf(path: pathlib.Path) -> Any:
    """The model of a GGUF file, dense, in float32."""
    try:
        gguf.GGUFReader(path)  # maps every tensor, so a truncated file is found before anything is built
        return transformers.AutoModelForCausalLM.from_pretrained(
            str(path.parent),
            gguf_file=path.name,
            quantization_config=transformers.GgufConfig(dequantize=True),
            dtype=torch.float32,
            local_files_only=True,
        )
    except (ValueError, IndexError, KeyError, OSError, RuntimeError, struct.error, UnicodeDecodeError) as error:
        raise ConfigError(f"SRC is {str(path)!r}, which is no GGUF model that can be read: {error}") from error


def _gguf_tokenizer(path: pathlib.Path) -> Any:
    """The tokenizer that a GGUF file describes, its text split the way the original splits it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
    fields = gguf.GGUFReader(path).fields
    kind = fields["tokenizer.ggml.model"].contents()
    split = fields["tokenizer.ggml.pre"].contents() if "tokenizer.ggml.pre" in fields else "default"
    if kind != "gpt2":
        return tokenizer
    if split in DIGIT_SPLITS:
        byte_level = pre.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), byte_level])
    elif split not in GPT2_SPLITS | _splits_of_transformers():
        raise ConfigError(
            f"SRC is {str(path)!r}, whose tokenizer.ggml.pre is {split!r}: how it splits text is not known here; "
            "import a directory in Hugging Face layout instead"
        )
    return tokenizer


def _splits_of_transformers() -> frozenset[str]:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return frozenset(GGUF_PRE_TOKENIZER_SPLITS)


def _converted_tokenizer(path: pathlib.Path) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise ConfigError(
            f"SRC is {str(path)!r}, which has no tokenizer.json, nor one that can be made: {error}"
        ) from error


def _check_tokenizer(directory: pathlib.Path, original: Any) -> None:
    """The written tokenizer.json must give what the tokenizer gave in memory, alone and through transformers."""
    alone = Tokenizer.from_file(str(directory / "tokenizer.json"))
    again = transformers.AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    for text in PROBE_TEXTS:
        expected = original(text).input_ids
        if alone.encode(text).ids != expected or again(text).input_ids != expected:
            raise ConfigError(f"the tokenizer of the source changes when it is written: {text!r} gets other token ids")


def _check_vocabulary(directory: pathlib.Path, vocab_size: int) -> None:
    tokens = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size(with_added_tokens=True)
    if tokens > vocab_size:
        raise ConfigError(f"the tokenizer has {tokens} tokens; allowed by the model: {vocab_size}")


def _write_record(aside: pathlib.Path, source: Source, identity: Identity) -> None:
    record = {
        "source": source.path.name,
        "identity": asdict(identity),
        "file_sizes": {path.name: path.stat().st_size for path in sorted(aside.iterdir())},
    }
    (aside / RECORD_NAME).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _quiet_transformers(*, show_bars: bool) -> Iterator[None]:
    """Errors only, and its bars only where ours shows: what it has to say of a conversion is checked here anyway."""
    logging = transformers.logging
    before, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    (logging.enable_progress_bar if show_bars else logging.disable_progress_bar)()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        (logging.enable_progress_bar if had_bars else logging.disable_progress_bar)()


def run(source_name: str, destination: pathlib.Path, dtype: str) -> str:
    """Imports with a progress bar and returns the sentence to print."""
    if import_model(source_name, destination, dtype, show_progress=None if sys.stderr.isatty() else False):
        return f"imported {source_name} to {destination} as {dtype}"
    return f"{destination} is already a complete import of {source_name} as {dtype}"
