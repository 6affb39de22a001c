"""Settings of the gateway service: its pools, and how long it waits for what."""

from __future__ import annotations

import pathlib
from typing import Annotated, Any, ClassVar, Self

import pydantic

from holdback.config import ServiceConfig
from holdback.endpoints import Target

MAX_POOLS = 256


def _split(value: Any) -> Any:
    """A flag or variable names several values as `a,b`."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


ModelName = Annotated[str, pydantic.StringConstraints(min_length=1, max_length=256)]
Names = Annotated[tuple[ModelName, ...], pydantic.BeforeValidator(_split)]


class PoolConfig(pydantic.BaseModel):
    """One model: its names, its scheduler, its tokenizer."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    served_model_names: Names = pydantic.Field(
        min_length=1, description="names that select the model; the first is shown, the others are aliases"
    )
    scheduler: Target = pydantic.Field(description="address of the pool's scheduler, host:port")
    tokenizer: pathlib.Path = pydantic.Field(description="directory with tokenizer.json and tokenizer_config.json")


class GatewayConfig(ServiceConfig):
    """One gateway. It serves the pools of `pools`, or the one that the three flags describe."""

    process: ClassVar[str] = "gateway"

    pools: tuple[PoolConfig, ...] = pydantic.Field(
        (), max_length=MAX_POOLS, description="pools to serve, each with served_model_names, scheduler, tokenizer"
    )
    scheduler: Target | None = pydantic.Field(None, description="address of the only pool's scheduler, host:port")
    tokenizer: pathlib.Path | None = pydantic.Field(None, description="the only pool's tokenizer directory")
    served_model_name: Names = pydantic.Field(
        (), description="the only pool's names, as a,b; the first is shown (default: the tokenizer directory's name)"
    )
    vllm_engine_model: str = pydantic.Field(
        "", max_length=256, description="name of the model that VllmEngine serves (default: that of the only pool)"
    )
    reflection: bool = pydantic.Field(
        False, description="tell every client that may call which services, methods and messages there are"
    )
    gateway_id: str = pydantic.Field("gateway", min_length=1, max_length=128, description="name for people and logs")
    http_port: int | None = pydantic.Field(
        None, ge=0, le=65535, description="port of the OpenAI HTTP API; 0 takes a free one, null: no HTTP"
    )
    scheduler_loss_timeout_s: float = pydantic.Field(
        60.0, gt=0, le=86400, description="how long requests wait for a scheduler that cannot be reached"
    )
    scheduler_silence_timeout_s: float = pydantic.Field(
        10.0, gt=0, le=3600, description="silence after which a scheduler counts as one that cannot be reached"
    )
    api_keys: pathlib.Path | None = pydantic.Field(
        None, description="YAML file with the API keys that may call, re-read when it changes; null: everybody may"
    )
    template_timeout_s: float = pydantic.Field(
        2.0, gt=0, le=3600, description="how long a chat template may take; then the request is refused"
    )
    max_connection_age_s: float | None = pydantic.Field(
        300.0,
        gt=0,
        le=1e6,
        description="age, give or take a tenth, at which a connection takes no new calls, so that its client finds new "
        "gateways; calls that run on it go on. null: connections do not end by age",
    )
    drain_timeout_s: float = pydantic.Field(
        120.0, ge=0, le=86400, description="how long running requests may go on once the gateway is told to stop"
    )

    @pydantic.model_validator(mode="after")
    def _one_way_to_name_pools(self) -> Self:
        single = {"scheduler": self.scheduler, "tokenizer": self.tokenizer, "served_model_name": self.served_model_name}
        given = [name for name, value in single.items() if value]
        if self.pools and given:
            raise ValueError(f"pools and {given[0]} are both set; allowed: pools, or scheduler and tokenizer")
        if not self.pools and (self.scheduler is None or self.tokenizer is None):
            missing = "scheduler" if self.scheduler is None else "tokenizer"
            raise ValueError(f"{missing} is not set; allowed: scheduler and tokenizer, or pools")
        return self

    def all_pools(self) -> tuple[PoolConfig, ...]:
        """The pools, however they were given; at least one."""
        if self.pools or self.scheduler is None or self.tokenizer is None:
            return self.pools
        names = self.served_model_name or (self.tokenizer.resolve().name,)
        return (PoolConfig(served_model_names=names, scheduler=self.scheduler, tokenizer=self.tokenizer),)
