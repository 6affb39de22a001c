"""What an executor counts as it happens, in plain numbers; `metrics` shows them to Prometheus."""

from __future__ import annotations

from dataclasses import dataclass, field

from executor_svc.devices.base import GraphKey
from holdback.types import Phase


@dataclass(slots=True)
class StartTimes:
    """What the start took, seconds; None for what has not happened.

    Attributes:
        load_s: until the model was loaded, checked and on its device.
        build_s: each graph, those included that the compile cache had.
        whole_s: until the executor was ready to register.
    """

    load_s: float | None = None
    build_s: dict[GraphKey, float] = field(default_factory=dict)
    whole_s: float | None = None


@dataclass(slots=True)
class DeviceTimes:
    """What the device did, and for how long. The launching thread adds to `idle_ns`, the collecting one to the rest.

    Attributes:
        num_runs: steps by graph.
        busy_us: device time by phase.
        idle_ns: without a step in flight, from the start of this on; what runs now is not in it.
    """

    num_runs: dict[GraphKey, int] = field(default_factory=dict)
    busy_us: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(Phase, 0))
    idle_ns: int = 0

    def add(self, key: GraphKey, device_us: int) -> None:
        """A step was collected."""
        self.num_runs[key] = self.num_runs.get(key, 0) + 1
        self.busy_us[key.phase] += device_us
