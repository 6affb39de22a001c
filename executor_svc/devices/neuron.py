"""The `neuron` device: compiled steps on NeuronCores of Trainium 2 or 3, through torch-neuronx in its native form.

Nothing of it is special to Neuron but this file and `neuron_config`: where tensors are (`DEVICE`), what compiles graphs
(`BACKEND`), and what the runtime says of itself. What of this has never run on a device is said in `docs/neuron.md`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
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
from executor_svc.kv_cache import LayerShape, block_bytes
from executor_svc.model_probe import check_logits, find_layers
from executor_svc.models import LoadedModel, load_model
from executor_svc.parallel.group import GLOO, RankGroup
from holdback.errors import ConfigError

log = structlog.get_logger(__name__)

DEVICE = "neuron"
"""The torch device. Stock torch does not know it; tests put `cpu` here."""

BACKEND: str | Callable[..., Any] = "neuron"
"""The backend of `torch.compile` that torch-neuronx registers."""


class NeuronDevice(CompiledDevice):
    """A model on one NeuronCore, or one rank's share of it."""

    kind = "neuron"


def load_neuron_device(config: ExecutorConfig, cache: CompileCache, ranks: RankGroup | None = None) -> NeuronDevice:
    """Loads the model and puts it on the device. Raises ConfigError.

    Args:
        config: checked, its environment set.
        cache: where graphs are kept.
        ranks: those that share the model with this process, met; None when it has all of it.
    """
    open_runtime()
    model, layers = _load_whole(config) if ranks is None else _load_share(config, ranks)
    num_blocks = _choose_num_blocks(config, model, layers, ranks)
    limits = build_limits(config, max_model_len=model.info.max_model_len, num_blocks=num_blocks)
    check_neuron_limits(limits)
    device = NeuronDevice(model, layers, limits, GraphSettings(torch.device(DEVICE), BACKEND))
    device.compile_cache, device.compiled = cache, cache.counts
    return device


def _load_whole(config: ExecutorConfig) -> tuple[LoadedModel, list[LayerShape]]:
    """Checks the model on the processor, then puts it on the device."""
    model = _load(config)
    layers = find_layers(model)
    check_logits(model, layers)
    model.module.to(DEVICE)
    return model, layers


def _load_share(config: ExecutorConfig, ranks: RankGroup) -> tuple[LoadedModel, list[LayerShape]]:
    """Rank 0 checks the whole model on the processor; then each rank reads its share of the files to its device.

    A model that is cut stays where it was cut, for its collectives are those of that device. So it cannot be checked
    on the processor first, as a whole one is.
    """
    shapes = ranks.tell_layers(_check_whole(config, ranks) if ranks.rank == 0 else None)
    model = _load(config, ranks)
    found = {weight.device.type for weight in model.module.parameters()}
    if found != {DEVICE}:
        raise ConfigError(
            f"device is neuron, but transformers takes {' and '.join(sorted(found))} for the accelerator of this "
            f"machine and cut the model there; allowed: {DEVICE}"
        )
    return model, ranks.plan(model.module.config).share(shapes)


def _check_whole(config: ExecutorConfig, ranks: RankGroup) -> list[LayerShape]:
    model = _load(config)
    ranks.plan(model.module.config)  # what cannot be cut is refused before it is checked
    layers = find_layers(model)
    check_logits(model, layers)
    return layers


def _load(config: ExecutorConfig, ranks: RankGroup | None = None) -> LoadedModel:
    if config.model is None:
        raise ConfigError("model is required by the device neuron")
    return load_model(config.model, config.dtype, config.max_model_len, ranks)


def load_neuron_collectives() -> str:
    """Loads torch-neuronx, without a device yet: its collectives open the runtime, and it must not be open before.

    Returns:
        backends of `torch.distributed`: the device's for what is on it, gloo for what ranks tell each other beside.

    Raises:
        ConfigError: torch-neuronx cannot be loaded.
    """
    if DEVICE == "cpu":
        return GLOO
    _import_runtime()
    return f"cpu:{GLOO},{DEVICE}:{DEVICE}"


def _import_runtime() -> None:
    try:
        importlib.import_module("torch_neuronx")
    except ImportError as error:
        raise ConfigError(f"device is neuron, but torch_neuronx cannot be imported: {error}") from None


def open_runtime() -> None:
    """Loads torch-neuronx, which makes `DEVICE` and `BACKEND` known to torch. Raises ConfigError without a device."""
    if DEVICE == "cpu":
        return
    _import_runtime()
    try:
        num_devices = int(torch.get_device_module(DEVICE).device_count())
    except (AttributeError, RuntimeError, OSError, ValueError) as error:
        raise ConfigError(
            f"device is neuron, but torch_neuronx is not its native form or finds no runtime: {error}"
        ) from None
    if num_devices < 1:
        raise ConfigError("device is neuron, but this machine has no NeuronCore that this process may use")


def measure_memory(config: ExecutorConfig, model: LoadedModel) -> DeviceMemory:
    """Of the NeuronCore, the model on it. Raises ConfigError where its size is not known."""
    weights = model.num_weight_bytes
    if DEVICE == "cpu":
        return DeviceMemory(config.neuron_memory_bytes or 0, weights, weights)
    runtime = torch.get_device_module(DEVICE)
    runtime.synchronize()  # the allocator counts what is done, not what is queued
    total = config.neuron_memory_bytes or int(runtime.get_device_properties().total_memory)
    if total < 1:
        raise ConfigError("neuron_memory_bytes is not set, and the Neuron runtime reports no size of its memory")
    used = max(int(runtime.memory_allocated()), int(runtime.memory_reserved()))
    return DeviceMemory(total, max(used, weights), weights)


def _choose_num_blocks(
    config: ExecutorConfig, model: LoadedModel, layers: Sequence[LayerShape], ranks: RankGroup | None
) -> int:
    """By the memory of this core; of ranks, as many as fit the core where fewest fit."""
    bytes_per_block = block_bytes(layers, config.block_size, model.module.dtype)
    shape = KVShape(bytes_per_block, config.block_size, model.info.max_model_len)
    settings = _memory_settings(config, 1 if ranks is None else ranks.size)
    num_blocks = choose_num_blocks(shape, settings, measure_memory(config, model))
    return num_blocks if ranks is None else ranks.smallest(num_blocks)


def _memory_settings(config: ExecutorConfig, num_cores: int) -> KVMemorySettings:
    """Of one core; `kv_cache_bytes` counts all of them together."""
    has_size = config.num_blocks is not None or config.kv_cache_bytes is not None
    fraction = config.kv_memory_fraction or DEFAULT_FRACTION
    min_bytes = DEFAULT_MIN_BYTES if config.kv_memory_min_bytes is None else config.kv_memory_min_bytes
    return KVMemorySettings(
        num_blocks=config.num_blocks,
        kv_cache_bytes=None if config.kv_cache_bytes is None else config.kv_cache_bytes // num_cores,
        fraction=None if has_size else fraction,
        cap_fraction=config.kv_memory_cap_fraction,
        min_bytes=min_bytes,
    )
