"""The cpu device as an executor's configuration describes it."""

from __future__ import annotations

import os
import pathlib
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
    kernels_directory = _kernels_directory(config)
    # libgomp reads it when torch loads it. Its threads would spin for milliseconds between two operations, on cores
    # that the kernels' own threads and the other services need.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    from executor_svc.devices.cpu import CpuDevice, CpuSettings

    settings = CpuSettings(
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        kv_cache_bytes=config.kv_cache_bytes,
        kv_memory_fraction=config.kv_memory_fraction,
        kv_memory_cap_fraction=config.kv_memory_cap_fraction,
        kv_memory_min_bytes=config.kv_memory_min_bytes or 0,
        max_num_seqs=config.num_seqs,
        max_num_batched_tokens=config.num_batched_tokens,
        num_batched_tokens_buckets=config.num_batched_tokens_buckets,
        num_seqs_buckets=config.num_seqs_buckets,
        num_threads=config.num_threads if ranks is None else ranks.num_threads(config.num_threads),
        use_kernels=config.use_kernels,
        kernels_directory=kernels_directory,
        require_cached=config.require_cached,
        compile_only=config.compile_only,
    )
    return CpuDevice(config.model, settings, ranks)


def _kernels_directory(config: ExecutorConfig) -> pathlib.Path | None:
    """The one named, else a folder in the compile cache if one is named."""
    if config.kernels_directory is not None:
        return config.kernels_directory
    if config.compile_cache is None:
        return None
    return config.compile_cache / "kernels"
