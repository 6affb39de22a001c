"""A directory in Hugging Face layout, as far as its files can be judged without loading a model, or torch.

A wrong path or a broken download is found in a fraction of a second, not after the seconds that torch takes to load.
What its config.json says is for `model_config` to judge.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from safetensors import SafetensorError, safe_open

from holdback.errors import ConfigError

_MAX_JSON_BYTES = 16 << 20
_MAX_TOKENIZER_BYTES = 256 << 20
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_QUANTIZED_DTYPES = ("F4", "F6_", "F8", "I", "U", "BOOL", "C")
# Of these dtypes old files have masks and position ids, and MXFP4 has blocks of numbers with their scales.
_NO_WEIGHTS = ("position_ids", "token_type_ids", "masked_bias", ".attn.bias", ".attention.bias", "_blocks", "_scales")


def refuse(directory: pathlib.Path, problem: str) -> ConfigError:
    """The error of a directory that is no model: its name and what is wrong with it."""
    return ConfigError(f"model directory {str(directory)!r} {problem}")


def describe_error(error: Exception) -> str:
    """What a library raised, in one line of at most 300 characters: its kind, and what it says if it says anything."""
    line = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    return line if len(line) <= 300 else f"{line[:297]}..."


def read_json(path: pathlib.Path, max_bytes: int = _MAX_JSON_BYTES) -> dict[str, Any]:
    """A JSON object of a model directory. Raises ConfigError for a file that is missing, too large or no such thing."""
    try:
        size = path.stat().st_size
        content = json.loads(path.read_text(encoding="utf-8")) if size <= max_bytes else None
    except OSError as error:
        raise refuse(path.parent, f"has no {path.name} that can be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise refuse(path.parent, f"has a {path.name} that is not JSON: {error}") from error
    if not isinstance(content, dict):
        limit = f"a JSON object of at most {max_bytes} bytes"
        raise refuse(path.parent, f"has a {path.name} of {size} bytes that is none; allowed: {limit}")
    return content


def list_weights(directory: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files that transformers loads of a directory, each whole: model.safetensors, else its index's.

    Raises:
        ConfigError: there is none, one is missing, cut off or quantized, or lacks a tensor that the index places in it.
    """
    if (directory / _SINGLE).is_file():
        _read_tensor_names(directory, _SINGLE)
        return [directory / _SINGLE]
    if not (directory / _INDEX).is_file():
        raise refuse(directory, _say_what_is_there_instead(directory))
    placed = _read_index(directory)
    for name in sorted(placed):
        lacking = sorted(placed[name] - _read_tensor_names(directory, name))
        if lacking:
            raise refuse(directory, f"has an index that places {lacking[0]} in the shard {name}, which lacks it")
    return [directory / name for name in sorted(placed)]


def _say_what_is_there_instead(directory: pathlib.Path) -> str:
    pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    if pickles:
        return f"has its weights in {pickles[0]}, and unpickling may run code; allowed: {_SINGLE} or {_INDEX}"
    return f"has no weights in {_SINGLE} or by {_INDEX}; other forms are not read"


def _read_index(directory: pathlib.Path) -> dict[str, set[str]]:
    """The names of the tensors that the index places in each shard."""
    weight_map = read_json(directory / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise refuse(directory, f"has a {_INDEX} without a weight_map")
    placed: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or name in ("", "..") or pathlib.PurePath(name).name != name:
            raise refuse(directory, f"has an index that names the shard {name!r}; allowed: a file name")
        placed.setdefault(name, set()).add(tensor)
    return placed


def _read_tensor_names(directory: pathlib.Path, name: str) -> set[str]:
    if not (directory / name).is_file():
        raise refuse(directory, f"lacks the shard {name}, which its index names")
    try:
        with safe_open(directory / name, framework="np") as shard:  # compares the header with the file's size
            names: list[str] = list(shard.keys())
            dtypes = {tensor: shard.get_slice(tensor).get_dtype() for tensor in names}
    except (SafetensorError, OSError, ValueError) as error:
        raise refuse(directory, f"has a shard {name} that is cut off or no safetensors file: {error}") from error
    for tensor, dtype in dtypes.items():
        if dtype.startswith(_QUANTIZED_DTYPES) and not (dtype[0] in "IUB" and tensor.endswith(_NO_WEIGHTS)):
            raise refuse(directory, f"has the weight {tensor} in {dtype}; allowed: F64, F32, F16, BF16")
    return set(dtypes)


def check_tokenizer(directory: pathlib.Path, vocab_size: int) -> None:
    """Whether the vocabulary of the directory's tokenizer.json, if it has one, fits that of the model.

    Added tokens may lie beyond it, as one for images does in Gemma 3's text models; a prompt that has one is refused.

    Raises:
        ConfigError: the tokenizer has tokens that the model does not know, or the file is broken.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return
    model = read_json(path, _MAX_TOKENIZER_BYTES).get("model")
    if not isinstance(model, dict):
        raise refuse(directory, "has a tokenizer.json without a model, so no tokenizer can be made of it")
    vocabulary = model.get("vocab")
    largest = -1
    if isinstance(vocabulary, dict):
        largest = max((number for number in vocabulary.values() if isinstance(number, int)), default=-1)
    elif isinstance(vocabulary, list):
        largest = len(vocabulary) - 1
    if largest >= vocab_size:
        limit = f"below the model's vocab_size, which is {vocab_size}"
        raise refuse(directory, f"has a tokenizer.json whose largest token id is {largest}; allowed: {limit}")
