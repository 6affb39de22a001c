"""`holdback model import`: makes a model directory in Hugging Face layout from a GGUF file or from another directory.

What is imported once is read by every executor (weights, configuration) and by the gateway (tokenizer, chat template)
without a conversion of its own. The directory is made aside and renamed when complete, so a destination that exists is
a whole one, and a record of its source in it makes a second import of the same source do nothing.

Quantized GGUF weights are unpacked into dense ones: devices run float32, bfloat16 or float16.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import pathlib
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import gguf
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers import pre_tokenizers as pre
from tqdm import tqdm

from executor_svc.model_config import read_config
from executor_svc.models import DTYPES, load_plain, parse_dtype, quiet_transformers
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
# transformers knows the split of some values of `tokenizer.ggml.pre` and splits as GPT-2 does for any other, which
# gives other token ids without a word where that is wrong. So a value must be known there or here.
GPT2_SPLITS = frozenset({"gpt-2", "phi-2"})
DIGIT_SPLITS = frozenset({"smollm", "starcoder", "refact"})
"""Each numeral is a piece of its own, the rest is split as by GPT-2."""

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
        dtype: a key of `models.DTYPES`, of the weights written.
        show_progress: None shows a bar on a terminal only.

    Raises:
        ConfigError: the source is no model, or the destination exists and is something else.
    """
    parse_dtype(dtype)
    source = find_source(source_name)
    bar = tqdm(
        total=4, desc="reading source", unit="step", disable=None if show_progress is None else not show_progress
    )
    with bar, _quiet(show_bars=not bar.disable):
        identity = Identity(_digest(source), dtype)  # over every byte: a name and a date prove nothing
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
    if path.is_dir():
        read_config(path)
    elif not path.is_file():
        raise ConfigError(f"SRC is {name!r}, which is no file or directory; allowed: a GGUF file or a model directory")
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
    try:
        for path in source.files():
            name = b"" if source.is_gguf else path.name.encode()
            digest.update(struct.pack("<I", len(name)) + name)
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    except OSError as error:
        raise ConfigError(f"SRC is {source.name!r}, which cannot be read: {error}") from error
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
    metadata = _read_gguf_metadata(source.path) if source.is_gguf else {}
    model = _load_gguf(source.path) if source.is_gguf else load_plain(source.path, torch.float32)
    enter("writing weights")
    model.to(DTYPES[dtype])
    model.config.dtype = DTYPES[dtype]
    model.save_pretrained(aside, max_shard_size="5GB")
    _drop_keys(aside / "config.json", lambda key: key.startswith("_"))
    enter("writing tokenizer")
    if source.is_gguf:
        _write_tokenizer(aside, _gguf_tokenizer(source.path, metadata))
    elif (source.path / "tokenizer.json").is_file():
        for name in TOKENIZER_FILES:
            if (source.path / name).is_file():
                shutil.copyfile(source.path / name, aside / name)
    else:
        _write_tokenizer(aside, _converted_tokenizer(source.path))
    _check_vocabulary(aside, int(model.config.get_text_config(decoder=True).vocab_size))
    usual = (aside / "config.json").stat().st_mode & 0o777  # as the umask has it
    for path in aside.iterdir():
        path.chmod(usual)  # safetensors makes files that only their owner reads


def _read_gguf_metadata(path: pathlib.Path) -> dict[str, Any]:
    """Scalars and strings of a GGUF file. Raises ConfigError where it is none, or cut off: every tensor is mapped."""
    try:
        fields = gguf.GGUFReader(path).fields
        return {name: field.contents() for name, field in fields.items() if gguf.GGUFValueType.ARRAY not in field.types}
    except (ValueError, IndexError, KeyError, OSError, OverflowError) as error:
        raise _refuse(path, f"which is cut off or no GGUF file: {error}") from error


def _load_gguf(path: pathlib.Path) -> Any:
    """The model of a GGUF file, dense, in float32."""
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(
            str(path.parent),
            gguf_file=path.name,
            quantization_config=transformers.GgufConfig(dequantize=True),
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (ValueError, IndexError, KeyError, TypeError, OSError, RuntimeError, NotImplementedError) as error:
        raise _refuse(path, f"which transformers cannot load: {error}") from error


def _refuse(path: pathlib.Path, problem: str) -> ConfigError:
    return ConfigError(f"SRC is {str(path)!r}, {problem}")


def _gguf_tokenizer(path: pathlib.Path, metadata: dict[str, Any]) -> Any:
    """The tokenizer that a GGUF file describes, its text split the way the original splits it."""
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind == "gpt2" and split not in GPT2_SPLITS | DIGIT_SPLITS | _splits_of_transformers():
        problem = f"whose tokenizer.ggml.pre is {split!r}: how that splits text is not known here"
        raise _refuse(path, f"{problem}; import the model's Hugging Face directory instead")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(path.parent), gguf_file=path.name, local_files_only=True, trust_remote_code=False
        )
    except (ValueError, IndexError, KeyError, TypeError, OSError, RuntimeError) as error:
        raise _refuse(path, f"whose tokenizer transformers cannot read: {error}") from error
    if kind == "gpt2" and split in DIGIT_SPLITS:
        byte_level = pre.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), byte_level])
    return tokenizer


def _splits_of_transformers() -> frozenset[str]:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return frozenset(GGUF_PRE_TOKENIZER_SPLITS)


def _converted_tokenizer(path: pathlib.Path) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise _refuse(path, f"which has no tokenizer.json, nor files to make one from: {error}") from error


def _write_tokenizer(directory: pathlib.Path, tokenizer: Any) -> None:
    """Writes a tokenizer and proves that both ways to read it give what it gave in memory."""
    tokenizer.save_pretrained(directory)
    _drop_keys(directory / "tokenizer_config.json", lambda key: key in ("local_files_only", "is_local", "backend"))
    alone = Tokenizer.from_file(str(directory / "tokenizer.json"))
    again = transformers.AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    for text in PROBE_TEXTS:
        expected = tokenizer(text).input_ids
        if alone.encode(text).ids != expected or again(text).input_ids != expected:
            raise ConfigError(f"the tokenizer of SRC changes when it is written: {text!r} gets other token ids")


def _drop_keys(path: pathlib.Path, is_unwanted: Callable[[str], bool]) -> None:
    """Takes out of a JSON file what says only where and how it was made."""
    content = json.loads(path.read_text(encoding="utf-8"))
    kept = {key: value for key, value in content.items() if not is_unwanted(key)}
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


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
def _quiet(*, show_bars: bool) -> Iterator[None]:
    """As `quiet_transformers`, and silences its one bar, of GGUF tensors, that asks nobody."""
    silence = contextlib.nullcontext() if show_bars else contextlib.redirect_stderr(io.StringIO())
    with quiet_transformers(show_bars=show_bars), silence:
        yield


def run(source_name: str, destination: pathlib.Path, dtype: str) -> str:
    """Imports with a progress bar on a terminal and returns the sentence to print."""
    if import_model(source_name, destination, dtype):
        return f"imported {source_name} to {destination} as {dtype}"
    return f"{destination} is already a complete import of {source_name} as {dtype}"
