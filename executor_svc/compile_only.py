"""`holdback executor --compile-only`: fills the compile cache, so that a start that serves finds everything."""

from __future__ import annotations

import time

from executor_svc.config import ExecutorConfig
from executor_svc.devices import create_device
from executor_svc.graphs import warm_up


def compile_all(config: ExecutorConfig) -> str:
    """Builds whatever the device of this configuration would build at its start; one sentence on what that was.

    Raises:
        ConfigError: the device cannot be made as configured, or the compile cache cannot be used.
    """
    started_s = time.monotonic()
    device = create_device(config)
    try:
        if device.compile_cache is not None:
            warm_up(device, is_timed=False)
        if device.compiled is None:
            return f"the device {device.kind} has nothing to compile, as configured"
        found, made = device.compiled.num_hits, device.compiled.num_misses
        seconds = time.monotonic() - started_s
        return f"compiled for the device {device.kind}: {made}, found in the cache: {found}, in {seconds:.1f} s"
    finally:
        device.close()
