"""The simulated device as an executor's configuration describes it."""

from __future__ import annotations

from executor_svc.config import ExecutorConfig, build_limits
from executor_svc.devices.simulated import SimulatedDevice, SimulatedFaults, SimulatedLatencies
from holdback.buckets import blocks_for
from holdback.errors import ConfigError
from holdback.types import ModelInfo

DEFAULT_MAX_MODEL_LEN = 2048


def create_simulated_device(config: ExecutorConfig) -> SimulatedDevice:
    """Without `num_blocks` there are enough for `max_num_seqs` requests of `max_model_len`. Raises ConfigError."""
    max_model_len = config.max_model_len or DEFAULT_MAX_MODEL_LEN
    for token_id in config.simulated_eos_token_ids:
        if not 0 <= token_id < config.simulated_vocab_size:
            allowed = f"[0, {config.simulated_vocab_size}), the vocabulary"
            raise ConfigError(f"simulated_eos_token_ids is {token_id}; allowed: {allowed}")
    num_blocks = config.num_blocks
    if num_blocks is None:
        num_blocks = 1 + config.num_seqs * blocks_for(max_model_len, config.block_size)
    model = ModelInfo(
        fingerprint=config.simulated_fingerprint,
        name="simulated",
        vocab_size=config.simulated_vocab_size,
        eos_token_ids=config.simulated_eos_token_ids,
        max_model_len=max_model_len,
    )
    return SimulatedDevice(
        model,
        build_limits(config, max_model_len=max_model_len, num_blocks=num_blocks),
        SimulatedLatencies(config.simulated_prefill_us_per_token, config.simulated_decode_us),
        SimulatedFaults(config.simulated_nan_token_id, config.simulated_error_token_id, config.simulated_hang_token_id),
    )
