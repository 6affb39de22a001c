"""Settings of the scheduler service. What an executor owns (blocks, buckets, latencies) comes with its registration."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, ClassVar

import pydantic
import structlog

from holdback.step_timeouts import StepTimeoutConfig
from scheduler_svc.core.config import KvAdmission, SchedulingPolicy

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def _parse_networks(value: Any) -> Any:
    """A flag or variable names several as `a,b`."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list):
        return value
    return [_parse_network(str(part).strip()) for part in parts if str(part).strip()]


def _parse_network(text: str) -> Network:
    """Raises ValueError, with what was meant where bits of a host are set."""
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        pass
    try:
        meant = f"{ipaddress.ip_network(text, strict=False)}, without bits of a host"
    except ValueError:
        meant = "networks such as 10.0.0.0/8"
    raise ValueError(f"{text[:100]!r} is no network; allowed: {meant}")


class SchedulerServiceConfig(StepTimeoutConfig):
    """One scheduler, and so one pool."""

    process: ClassVar[str] = "scheduler"

    heartbeat_interval_s: float = pydantic.Field(
        1.0, ge=0.01, le=60, description="seconds between heartbeats: both ways with each executor, and to each gateway"
    )
    lease_timeout_s: float = pydantic.Field(
        5.0, ge=0.05, le=600, description="silence after which an executor is lost; more than heartbeat_interval_s"
    )
    executor_loss_timeout_s: float = pydantic.Field(
        30.0, gt=0, le=86400, description="how long requests wait for an executor once the pool has lost its last one"
    )
    gateway_stall_timeout_s: float = pydantic.Field(
        10.0, gt=0, le=600, description="how long a gateway may leave its stream unread before it is closed"
    )
    executor_allowed_cidrs: Annotated[tuple[Network, ...], pydantic.BeforeValidator(_parse_networks)] = pydantic.Field(
        (), description="networks that an executor's advertise_address may lie in, as a,b; none by default"
    )
    max_num_queued_reqs: int = pydantic.Field(
        10_000, ge=1, description="requests that may wait; one more is refused with RESOURCE_EXHAUSTED"
    )
    max_num_queued_tokens: int = pydantic.Field(
        10_000_000, ge=1, description="prompt tokens of all that may wait; more are refused with RESOURCE_EXHAUSTED"
    )
    default_max_tokens: int | None = pydantic.Field(
        4096, ge=1, le=2**31 - 1, description="max_tokens of a request that names none; null: what fits in the context"
    )
    scheduling_policy: SchedulingPolicy = pydantic.Field(
        SchedulingPolicy.FCFS,
        description="fcfs, or priority: lower priorities first, first come, first served within one",
    )
    kv_admission: KvAdmission = pydantic.Field(
        KvAdmission.PHASED,
        description="worst case by which KV memory lets requests in: max_model_len, reserved (their max_tokens) or "
        "phased (its peak over time)",
    )
    max_decode_stall_ms: float | None = pydantic.Field(
        1000.0, ge=0, le=3_600_000, description="how long prefills hide decodes at most; null: as long as they come"
    )
    async_scheduling: bool = pydantic.Field(
        True, description="send a step before the result of the one before is known, where the executor allows it"
    )
    enable_prefix_caching: bool = pydantic.Field(True, description="serve equal prompt starts from cached blocks")
    max_request_moves: int = pydantic.Field(
        2, ge=0, le=100, description="failed steps that a request survives by moving to another executor"
    )
    num_state_steps: int = pydantic.Field(
        256, ge=1, le=65_536, description="last steps that are kept of each executor, for GetState"
    )
    served_model_name: str | None = pydantic.Field(
        None,
        min_length=1,
        max_length=256,
        description="name of the model in metrics; null: that of the first executor's model directory",
    )
    model_fingerprint: str | None = pydantic.Field(
        None,
        min_length=1,
        max_length=256,
        description="the only model that executors may have, by its fingerprint; null: that of the first one",
    )
    max_model_len: int | None = pydantic.Field(
        None, ge=2, description="the only max_model_len that executors may have; null: that of the first one"
    )

    @pydantic.model_validator(mode="after")
    def _heartbeats_fit_the_lease(self) -> SchedulerServiceConfig:
        if self.lease_timeout_s <= self.heartbeat_interval_s:
            raise ValueError(
                f"lease_timeout_s is {self.lease_timeout_s}; allowed: more than heartbeat_interval_s, "
                f"which is {self.heartbeat_interval_s}"
            )
        return self

    def warn(self) -> None:
        """Logs what a legal setting costs (decision K11)."""
        if self.default_max_tokens is None:
            structlog.get_logger(__name__).warning(
                "default_max_tokens_is_unbounded",
                setting="default_max_tokens",
                value=None,
                consequence="a request without max_tokens may grow to max_model_len and counts as such in admission, "
                "so fewer requests run at once",
            )
