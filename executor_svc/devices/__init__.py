"""Devices behind one interface: cpu, neuron, simulated. Nothing outside this package asks which one it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from executor_svc.compile_cache import check_directory
from holdback.errors import ConfigError

if TYPE_CHECKING:
    from executor_svc.config import ExecutorConfig
    from executor_svc.devices.base import Device
    from executor_svc.parallel.group import RankGroup
    from holdback.types import ModelInfo


def create_device(config: ExecutorConfig) -> Device:
    """The device of a configuration, its model loaded. Only what that device needs is imported.

    Raises:
        ConfigError: the model cannot be run, K1 or K2 refuse the configuration, or a compile cache that is named cannot
            be used.
    """
    if config.compile_cache is not None:
        check_directory(config.compile_cache, is_read_only=config.require_cached)
    if config.tensor_parallel_size > 1:
        from executor_svc.devices.parallel import create_parallel_device

        return create_parallel_device(config)
    return create_local_device(config)


def create_local_device(config: ExecutorConfig, ranks: RankGroup | None = None) -> Device:
    """As `create_device`, of this process alone: the whole model, or the share of one of `ranks`."""
    if config.device == "simulated":
        from executor_svc.devices.simulated_config import create_simulated_device

        return create_simulated_device(config)
    if config.device == "neuron":
        from executor_svc.devices.neuron_config import create_neuron_device

        return create_neuron_device(config, ranks)
    from executor_svc.devices.cpu_config import create_cpu_device

    return create_cpu_device(config, ranks)


def prepare_ranks(config: ExecutorConfig) -> list[dict[str, str]]:
    """What each rank's environment must have before torch is loaded. Raises ConfigError for what cannot be shared."""
    if config.device == "neuron":
        from executor_svc.devices.neuron_config import prepare_neuron_ranks

        return prepare_neuron_ranks(config)
    if config.device == "simulated":
        raise ConfigError(f"tensor_parallel_size is {config.tensor_parallel_size}; allowed on the device simulated: 1")
    return [{} for _ in range(config.tensor_parallel_size)]


def load_collectives(config: ExecutorConfig) -> str:
    """Loads what ranks talk over; backends of `torch.distributed`, for `RankGroup`. Raises ConfigError."""
    if config.device == "neuron":
        from executor_svc.devices.neuron import load_neuron_collectives

        return load_neuron_collectives()
    from executor_svc.parallel.group import GLOO

    return GLOO


def loads_model(config: ExecutorConfig) -> bool:
    """Whether the device of a configuration loads a model, which takes its time."""
    return config.device != "simulated"


def expected_model(config: ExecutorConfig) -> ModelInfo | None:
    """What `create_device` will load, told by its files; None where they do not say enough. Raises ConfigError."""
    from executor_svc.model_description import describe_model

    if config.model is None or not loads_model(config):
        return None
    return describe_model(config.model, config.dtype, config.max_model_len)
