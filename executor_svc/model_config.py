"""What a model's config.json says, judged before anything is loaded, and without torch.

transformers takes much that cannot run, or that would run as something else than its weights were trained as. What can
be told from the configuration is told here, in one sentence; what cannot is for `model_probe`.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterator
from typing import Any

from executor_svc.model_directory import read_json, refuse
from holdback.errors import ConfigError

# Far above any model that there is; a number beyond would have transformers build modules until memory ends.
_LARGEST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "n_embd": 1 << 20,
    "num_hidden_layers": 1024,
    "n_layer": 1024,
    "num_attention_heads": 4096,
    "n_head": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 4096,
    "max_position_embeddings": 1 << 30,
    "n_positions": 1 << 30,
}
# Numbers that every layer divides by or raises to a power.
_LARGEST_EPSILON = 1.0
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
_ABOVE_0 = ("rope_theta", "rotary_emb_base", "rope_local_base_freq", "partial_rotary_factor", "rotary_pct", "factor")
UNPACKED_AT_LOAD = "mxfp4"
"""As gpt-oss is published: 4 bits with a scale for each 32 weights."""

_LIMIT_KEYS = ("max_position_embeddings", "n_positions")


def read_config(directory: pathlib.Path) -> dict[str, Any]:
    """`config.json` of a model directory. Raises ConfigError where it describes nothing that can be run."""
    if not directory.is_dir():
        raise refuse(directory, "is no directory; allowed: one with config.json and *.safetensors")
    config = read_json(directory / "config.json")
    _check_kind(directory, config)
    text = text_config(config)
    _check_sizes(directory, text)
    for part in (text, *_ropes(text)):
        _check_reals(directory, part)
    return config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part that describes the language model, which multimodal configurations nest."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _check_kind(directory: pathlib.Path, config: dict[str, Any]) -> None:
    kinds = {"model_type": [config.get("model_type")], "architectures": config.get("architectures")}
    for key, names in kinds.items():
        if not config.get(key):
            raise refuse(directory, f"has a config.json without {key}, so no model can be made of it")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise refuse(directory, f"has a config.json whose {key} is {config[key]!r}; allowed: names of models")
    if config.get("quantization_config") and not is_unpacked_at_load(config):
        allowed = f"float weights, or quant_method {UNPACKED_AT_LOAD!r}, which is unpacked"
        raise refuse(directory, f"has quantized weights ({_quantization(config)}); allowed: {allowed}")
    if config.get("is_encoder_decoder"):
        raise refuse(directory, "has an encoder beside its decoder; allowed: decoder-only models")
    if config.get("transformers_weights"):
        raise refuse(directory, "names its weights by transformers_weights; allowed: model.safetensors or its index")


def is_unpacked_at_load(config: dict[str, Any]) -> bool:
    """Whether weights are quantized in a form that transformers turns into floats as it reads them."""
    settings = config.get("quantization_config")
    return isinstance(settings, dict) and settings.get("quant_method") == UNPACKED_AT_LOAD


def _quantization(config: dict[str, Any]) -> str:
    settings = config["quantization_config"]
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    return f"quantization_config with quant_method {method!r}"


def _check_sizes(directory: pathlib.Path, config: dict[str, Any]) -> None:
    for key, largest in _LARGEST.items():
        value = config.get(key)
        if value is not None and not _is_number_in(value, 1, largest):
            raise refuse(directory, f"has a config.json whose {key} is {value!r}; allowed: [1, {largest}]")
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        message = (
            f"whose num_attention_heads is {heads}; allowed: a multiple of num_key_value_heads, which is {kv_heads}"
        )
        raise refuse(directory, f"has a config.json {message}")


def _check_reals(directory: pathlib.Path, config: dict[str, Any]) -> None:
    """Those in which NaN, infinity or a wrong sign would make every logit NaN."""
    for key in (*_EPSILONS, *_ABOVE_0):
        value = config.get(key)
        if not isinstance(value, (int, float)):
            continue
        if key in _EPSILONS and not 0 <= value <= _LARGEST_EPSILON:
            raise refuse(directory, f"has a config.json whose {key} is {value!r}; allowed: [0, {_LARGEST_EPSILON:g}]")
        if key in _ABOVE_0 and not 0 < value < math.inf:
            raise refuse(directory, f"has a config.json whose {key} is {value!r}; allowed: a finite number above 0")


def _is_number_in(value: object, smallest: int, largest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and smallest <= value <= largest


def choose_max_model_len(config: dict[str, Any], wanted: int | None) -> int:
    """The model's own limit, or a lower one that is wanted.

    Args:
        config: content of config.json.
        wanted: None takes the model's limit.

    Raises:
        ConfigError: it is beyond the model's limit, or beyond where its rotary positions can be computed in chunks.
    """
    text = text_config(config)
    limit = _trained_limit(text)
    if limit is None:
        if wanted is None:
            raise ConfigError("max_model_len is not set, and config.json has no max_position_embeddings for it")
        limit = wanted
    chosen = limit if wanted is None else wanted
    if not 2 <= chosen <= limit:
        raise ConfigError(f"max_model_len is {chosen}; allowed: [2, {limit}], as the model's config.json says")
    for kind, static_up_to in _changing_ropes(text):
        if chosen > static_up_to:
            raise ConfigError(
                f"max_model_len is {chosen}, and a model of rope_type {kind!r} turns all tokens otherwise once a text "
                f"is longer than it was trained for, which KV memory cannot follow; allowed: [2, {static_up_to}]"
            )
    return chosen


def _trained_limit(config: dict[str, Any]) -> int | None:
    limit = next((config[key] for key in _LIMIT_KEYS if config.get(key)), None)
    return None if limit is None else max(limit, *(_scaled_limit(rope) for rope in _ropes(config)))


def _scaled_limit(rope: dict[str, Any]) -> int:
    """What RoPE scaling stretches the trained length to, where the configuration states both; else 0."""
    trained, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    return int(trained * factor) if isinstance(trained, int) and isinstance(factor, (int, float)) else 0


def _changing_ropes(config: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Types of RoPE whose angles depend on a request's length, each with the length up to which they do not."""
    for rope in _ropes(config):
        kind = str(rope.get("rope_type") or rope.get("type") or "")
        trained = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        longest = config.get("max_position_embeddings")
        if "dynamic" in kind:
            yield kind, longest if isinstance(longest, int) else 0
        elif kind in ("longrope", "su"):
            yield kind, trained if isinstance(trained, int) else 0


def _ropes(config: dict[str, Any]) -> list[dict[str, Any]]:
    """One set of rotary parameters, or one per kind of layer."""
    found = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(found, dict):
        return [{}]
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or [found]


def read_eos_token_ids(directory: pathlib.Path, config: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Of generation_config.json, which is what `generate` goes by, else of config.json; none is allowed.

    Raises:
        ConfigError: one is outside the vocabulary.
    """
    path = directory / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    found = generation.get("eos_token_id")
    if found is None:
        found = text_config(config).get("eos_token_id")
    ids = [] if found is None else found if isinstance(found, list) else [found]
    for token_id in ids:
        if not _is_number_in(token_id, 0, vocab_size - 1):
            raise ConfigError(f"eos_token_id is {token_id}; allowed: [0, {vocab_size}), the vocabulary of the model")
    return tuple(dict.fromkeys(ids))
