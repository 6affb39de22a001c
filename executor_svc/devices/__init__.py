"""Devices behind one interface: cpu, neuron, simulated. Nothing outside this package asks which one it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from executor_svc.config import ExecutorConfig
    from executor_svc.devices.base import Device


def create_device(config: ExecutorConfig) -> Device:
    """The device of a configuration, its model loaded. Only what that device needs is imported.

    Raises:
        ConfigError: the model cannot be run, or K1 or K2 refuse the configuration.
    """
    if config.device == "simulated":
        from executor_svc.devices.simulated_config import create_simulated_device

        return create_simulated_device(config)
    from executor_svc.devices.cpu_config import create_cpu_device

    return create_cpu_device(config)
