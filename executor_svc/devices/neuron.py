"""The `neuron` device: compiled steps on a NeuronCore of Trainium 2 or 3, through torch-neuronx in its native form.

Nothing of it is special to Neuron but this file and `neuron_config`: where tensors are (`DEVICE`), what compiles graphs
(`BACKEND`), and what the runtime says of itself. What of this has never run on a device is said in `docs/neuron.md`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import structlog
import torch

from executor_svc.compile_cache import CompileCache
from executor_svc.config import ExecutorConfig, build_limits
from executor_svc.devices.compiled import CompiledDevice, GraphSettings
from executor_svc.devices.neuron_config import check_neuron_limits
from executor_svc.kv_budget import (
    DEFAULT_FRACTION,
    DEFAULT_MIN_BYTES,
    DeviceMemory,
    KVMemorySettings,
    KVShape,
    choose_num_blocks,
)
from executor_svc.kv_cache import block_bytes
from executor_svc.model_probe import check_logits, find_layers
from executor_svc.models import LoadedModel, load_model
from holdback.errors import ConfigError

log = structlog.get_logger(__name__)

DEVICE = "neuron"
"""The torch device. Stock torch does not know it; tests put `cpu` here."""

BACKEND: str | Callable[..., Any] = "neuron"
"""The backend of `torch.compile` that torch-neuronx registers."""


class NeuronDevice(CompiledDevice):
    """A model on one NeuronCore."""

    kind = "neuron"


def load_neuron_device(config: ExecutorConfig, cache: CompileCache) -> NeuronDevice:
    """Loads the model and puts it on the device. Raises ConfigError.

    Args:
        config: checked, its environment set.
        cache: where graphs are kept.
    """
    if config.model is None:
        raise ConfigError("model is required by the device neuron")
    open_runtime()
    model = load_model(config.model, config.dtype, config.max_model_len)
    layers = find_layers(model)
    check_logits(model, layers)
    model.module.to(DEVICE)
    bytes_per_block = block_bytes(layers, config.block_size, model.module.dtype)
    shape = KVShape(bytes_per_block, config.block_size, model.info.max_model_len)
    num_blocks = choose_num_blocks(shape, _memory_settings(config), measure_memory(config, model))
    limits = build_limits(config, max_model_len=model.info.max_model_len, num_blocks=num_blocks)
    check_neuron_limits(limits)
    device = NeuronDevice(model, layers, limits, GraphSettings(torch.device(DEVICE), BACKEND))
    device.compile_cache, device.compiled = cache, cache.counts
    return device


def open_runtime() -> None:
    """Loads torch-neuronx, which makes `DEVICE` and `BACKEND` known to torch. Raises ConfigError without a device."""
    if DEVICE == "cpu":
        return
    try:
        importlib.import_module("torch_neuronx")
        num_devices = int(torch.get_device_module(DEVICE).device_count())
    except ImportError as error:
        raise ConfigError(f"device is neuron, but torch_neuronx cannot be imported: {error}") from None
    except (AttributeError, RuntimeError, OSError, ValueError) as error:
        raise ConfigError(
            f"device is neuron, but torch_neuronx is not its native form or finds no runtime: {error}"
        ) from None
    if num_devices < 1:
        raise ConfigError("device is neuron, but this machine has no NeuronCore that this process may use")


def measure_memory(config: ExecutorConfig, model: LoadedModel) -> DeviceMemory:
    """Of the NeuronCore, the model on it. Raises ConfigError where its size is not known."""
    weights = sum(parameter.nbytes for parameter in model.module.parameters())
    if DEVICE == "cpu":
        return DeviceMemory(config.neuron_memory_bytes or 0, weights, weights)
    runtime = torch.get_device_module(DEVICE)
    runtime.synchronize()  # the allocator counts what is done, not what is queued
    total = config.neuron_memory_bytes or int(runtime.get_device_properties().total_memory)
    if total < 1:
        raise ConfigError("neuron_memory_bytes is not set, and the Neuron runtime reports no size of its memory")
    used = max(int(runtime.memory_allocated()), int(runtime.memory_reserved()))
    return DeviceMemory(total, max(used, weights), weights)


def _memory_settings(config: ExecutorConfig) -> KVMemorySettings:
    has_size = config.num_blocks is not None or config.kv_cache_bytes is not None
    fraction = config.kv_memory_fraction or DEFAULT_FRACTION
    min_bytes = DEFAULT_MIN_BYTES if config.kv_memory_min_bytes is None else config.kv_memory_min_bytes
    return KVMemorySettings(
        num_blocks=config.num_blocks,
        kv_cache_bytes=config.kv_cache_bytes,
        fraction=None if has_size else fraction,
        cap_fraction=config.kv_memory_cap_fraction,
        min_bytes=min_bytes,
    )
