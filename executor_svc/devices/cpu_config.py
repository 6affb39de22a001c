"""The cpu device as an executor's configuration describes it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from executor_svc.config import ExecutorConfig, build_limits
from executor_svc.model_config import read_config
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
    if config.max_model_len is not None:
        smallest = 1 + blocks_for(config.max_model_len, config.block_size)
        build_limits(config, max_model_len=config.max_model_len, num_blocks=config.num_blocks or smallest)
    read_config(config.model)
    list_weights(config.model)
    # libgomp reads it when torch loads it. Its threads would spin for milliseconds between two operations, on cores
    # that the kernels' own threads and the other services need.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    from executor_svc.devices.cpu import CpuDevice

    return CpuDevice(config, ranks)
