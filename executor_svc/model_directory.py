"""A directory in Hugging Face layout, as far as it can be judged without loading a model, or torch.

A wrong path or a broken download is found in a fraction of a second, not after the seconds that torch takes to load.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from safetensors import SafetensorError, safe_open

from holdback.errors import ConfigError

_MAX_JSON_BYTES = 16 << 20


def read_config(directory: pathlib.Path) -> dict[str, Any]:
    """`config.json` of a model directory. Raises ConfigError where it says nothing that can be run."""
    if not directory.is_dir():
        raise refuse(directory, "is no directory; allowed: one with config.json and *.safetensors")
    config = read_json(directory / "config.json")
    for key in ("model_type", "architectures"):
        if not config.get(key):
            raise refuse(directory, f"has a config.json without {key}, so no model can be made of it")
    if config.get("quantization_config"):
        raise refuse(directory, "has quantized weights; allowed: float weights")
    return config


def refuse(directory: pathlib.Path, problem: str) -> ConfigError:
    """The error of a directory that is no model: its name and what is wrong with it."""
    return ConfigError(f"model directory {str(directory)!r} {problem}")


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object of a model directory. Raises ConfigError for a file that is missing, too large or no such thing."""
    try:
        size = path.stat().st_size
        content = json.loads(path.read_text(encoding="utf-8")) if size <= _MAX_JSON_BYTES else None
    except OSError as error:
        raise refuse(path.parent, f"has no {path.name} that can be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise refuse(path.parent, f"has a {path.name} that is not JSON: {error}") from error
    if not isinstance(content, dict):
        limit = f"a JSON object of at most {_MAX_JSON_BYTES} bytes"
        raise refuse(path.parent, f"has a {path.name} of {size} bytes that is none; allowed: {limit}")
    return content


def list_weights(directory: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files of a model, each whole.

    Raises:
        ConfigError: there is none, or one is missing or cut off.
    """
    index_path = directory / "model.safetensors.index.json"
    if index_path.is_file():
        weight_map = read_json(index_path).get("weight_map")
        names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    else:
        names = [path.name for path in directory.glob("*.safetensors")]
    if not names:
        raise refuse(directory, "has no weights in *.safetensors; other forms are not read")
    for name in names:
        if not isinstance(name, str) or pathlib.PurePath(name).name != name:
            raise refuse(directory, f"has an index that names the shard {name!r}; allowed: a file name")
    unique = sorted(set(names))
    for name in unique:
        _check_shard(directory, name)
    return [directory / name for name in unique]


def _check_shard(directory: pathlib.Path, name: str) -> None:
    if not (directory / name).is_file():
        raise refuse(directory, f"lacks the shard {name}, which its index names")
    try:
        with safe_open(directory / name, framework="np"):  # reads the header and compares it with the file's size
            pass
    except (SafetensorError, OSError, ValueError) as error:
        raise refuse(directory, f"has a shard {name} that is cut off or no safetensors file: {error}") from error
