"""The simulated device as an executor's configuration describes it."""

from __future__ import annotations

import pathlib
from typing import Any

from executor_svc.config import ExecutorConfig, build_limits
from executor_svc.devices.simulated import SimulatedDevice, SimulatedFaults, SimulatedLatencies
from executor_svc.model_directory import read_json
from holdback.buckets import blocks_for
from holdback.errors import ConfigError
from holdback.types import ModelInfo

DEFAULT_MAX_MODEL_LEN = 2048
DEFAULT_VOCAB_SIZE = 32_000
DEFAULT_EOS_TOKEN_IDS = (2,)
FAULTS = ("simulated_nan_token_id", "simulated_error_token_id", "simulated_hang_token_id")


def create_simulated_device(config: ExecutorConfig) -> SimulatedDevice:
    """Without `num_blocks` there are enough for `max_num_seqs` requests of `max_model_len`. Raises ConfigError."""
    max_model_len = config.max_model_len or DEFAULT_MAX_MODEL_LEN
    vocab_size, eos_token_ids = _vocabulary(config)
    _check_token_ids(config, vocab_size, eos_token_ids)
    num_blocks = config.num_blocks
    if num_blocks is None:
        num_blocks = 1 + config.num_seqs * blocks_for(max_model_len, config.block_size)
    model = ModelInfo(
        fingerprint=config.simulated_fingerprint,
        name="simulated",
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        max_model_len=max_model_len,
    )
    return SimulatedDevice(
        model,
        build_limits(config, max_model_len=max_model_len, num_blocks=num_blocks),
        SimulatedLatencies(config.simulated_prefill_us_per_token, config.simulated_decode_us),
        SimulatedFaults(*(getattr(config, name) for name in FAULTS)),
    )


def _check_token_ids(config: ExecutorConfig, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
    found = [("simulated_eos_token_ids", token_id) for token_id in eos_token_ids]
    found += [(name, getattr(config, name)) for name in FAULTS if getattr(config, name) is not None]
    for name, token_id in found:
        if not 0 <= token_id < vocab_size:
            raise ConfigError(f"{name} is {token_id}; allowed: [0, {vocab_size}), the vocabulary")


def _vocabulary(config: ExecutorConfig) -> tuple[int, tuple[int, ...]]:
    """Size and EOS ids: as configured, else those of the model that is simulated, so that its tokenizer fits."""
    model = {} if config.model is None else _read_model(config.model)
    vocab_size, eos = config.simulated_vocab_size, config.simulated_eos_token_ids
    if vocab_size is None:
        known = model.get("vocab_size")
        vocab_size = known if isinstance(known, int) else DEFAULT_VOCAB_SIZE
    if eos is None:
        known = model.get("eos_token_id", list(DEFAULT_EOS_TOKEN_IDS))
        eos = tuple(token_id for token_id in (known if isinstance(known, list) else [known]) if token_id is not None)
    return vocab_size, eos


def _read_model(directory: pathlib.Path) -> dict[str, Any]:
    """`config.json`, where there is one: a directory with a tokenizer alone is enough to simulate a model."""
    return read_json(directory / "config.json") if (directory / "config.json").exists() else {}
