"""How long a step may run: the scheduler ends the lease then, and the executor its process, by one rule."""

from __future__ import annotations

from typing import Self

import pydantic

from holdback.config import ServiceConfig


class StepTimeoutConfig(ServiceConfig):
    """Settings of a process that gives up steps."""

    step_timeout_factor: float = pydantic.Field(
        20.0,
        ge=1,
        le=1000,
        description="a step that takes this many times its expected time is given up: a scheduler ends the lease, an "
        "executor its process, with status 3",
    )
    min_step_timeout_s: float = pydantic.Field(
        10.0, gt=0, le=3600, description="no step is given up before this many seconds"
    )
    max_step_timeout_s: float = pydantic.Field(
        600.0,
        gt=0,
        le=86400,
        description="every step is given up after this many seconds; an executor with a slower graph is refused",
    )

    @pydantic.model_validator(mode="after")
    def _step_timeouts_are_a_range(self) -> Self:
        if self.max_step_timeout_s < self.min_step_timeout_s:
            raise ValueError(
                f"max_step_timeout_s is {self.max_step_timeout_s}; allowed: at least min_step_timeout_s, "
                f"which is {self.min_step_timeout_s}"
            )
        return self

    def step_timeout_s(self, expected_us: float) -> float:
        """Seconds that a step may run which is expected to take `expected_us` microseconds."""
        wanted_s = max(self.min_step_timeout_s, self.step_timeout_factor * expected_us / 1e6)
        return min(wanted_s, self.max_step_timeout_s)
