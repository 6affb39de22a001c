"""The cpu device as an executor's configuration describes it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from executor_svc.config import ExecutorConfig, build_limits
from executor_svc.model_config import choose_max_model_len, read_config
from executor_svc.model_directory import list_weights
from holdback.buckets import blocks_for
from holdback.errors import ConfigError

if TYPE_CHECKING:
    from executor_svc.devices.cpu import CpuDevice
    from executor_svc.parallel.group import RankGroup


def create_cpu_device(config: ExecutorConfig, ranks: RankGroup | None = None) -> CpuDevice:
    """Refuses what settings and directory show to be impossible, then loads torch and the model. Raises ConfigError.

    Args:
        config: of the executor.
        ranks: those that share the model with this process; None when it has all of it.
    """
    if config.model is None:
        raise ConfigError("model is required by the device cpu")
    _check_limits(config, config.max_model_len)
    model_config = read_config(config.model)
    _check_limits(config, _length_without_torch(model_config, config.max_model_len))
    list_weights(config.model)
    # libgomp reads it when torch loads it. Its threads would spin for milliseconds between two operations, on cores
    # that the kernels' own threads and the other services need.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    from executor_svc.devices.cpu import CpuDevice

    return CpuDevice(config, ranks)


def _check_limits(config: ExecutorConfig, max_model_len: int | None) -> None:
    if max_model_len is not None:
        smallest = 1 + blocks_for(max_model_len, config.block_size)
        num_blocks = smallest if config.num_blocks is None else config.num_blocks
        build_limits(config, max_model_len=max_model_len, num_blocks=num_blocks)


def _length_without_torch(model_config: dict[str, Any], wanted: int | None) -> int | None:
    """What `max_model_len` will be; what only transformers can tell of it is the one that is set."""
    try:
        return choose_max_model_len(model_config, wanted)
    except ConfigError:
        return wanted
