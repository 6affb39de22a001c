"""Ranks of the neuron device on this machine's processor: what stands in for torch-neuronx, in each of them.

As a program it is `executor_svc.parallel.rank` with the stand-ins in place, which a rank that was started as in
production would not have. When it has ended in order, a file says what it found and did:

    python -m tests.executor.neuron_ranks REPORT --rank 1 --size 2 --socket 5
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from executor_svc.config import ExecutorConfig
    from executor_svc.models import LoadedModel

ENVIRONMENT = dict(os.environ)
"""As the process was started, before torch is loaded."""

MEMORY_BYTES = 4 << 30


def command(report: pathlib.Path) -> Callable[[int, int, int], tuple[str, ...]]:
    """What takes the place of `processes._command`."""

    def build(number: int, size: int, descriptor: int) -> tuple[str, ...]:
        numbers = ("--rank", str(number), "--size", str(size), "--socket", str(descriptor))
        return (sys.executable, "-m", "tests.executor.neuron_ranks", f"{report}", *numbers)

    return build


@contextmanager
def stand_ins(report: pathlib.Path, environment: dict[str, str] | None = None) -> Iterator[pytest.MonkeyPatch]:
    """Rank 0's, which is this process: device, backend, environment, and how it starts the others."""
    from executor_svc.devices import neuron
    from executor_svc.parallel import processes
    from tests.executor.compiled_models import CountingBackend

    own = {name: value for name, value in os.environ.items() if not name.startswith(("NEURON_", "TORCH_NEURONX_"))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neuron, "DEVICE", "cpu")
        patch.setattr(neuron, "BACKEND", CountingBackend())
        patch.setattr(os, "environ", own | (environment or {}))
        patch.setattr(processes, "_command", command(report))
        yield patch


def main() -> int:
    from executor_svc.devices import neuron
    from executor_svc.kv_budget import DeviceMemory
    from executor_svc.parallel import rank
    from tests.executor.compiled_models import CountingBackend

    def measure_memory(config: ExecutorConfig, model: LoadedModel) -> DeviceMemory:
        return DeviceMemory(MEMORY_BYTES // 2, 0, model.num_weight_bytes)

    backend = CountingBackend()
    neuron.DEVICE, neuron.BACKEND = "cpu", backend
    neuron.measure_memory = measure_memory
    status = rank.main(sys.argv[2:])
    found = {"environment": ENVIRONMENT, "num_graphs": len(backend.graphs), "status": status}
    pathlib.Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
    return status


if __name__ == "__main__":
    ended_with = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended_with)
