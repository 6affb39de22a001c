"""Settings of the executor service. What it can hold and run is its own to say; the scheduler checks it and obeys."""

from __future__ import annotations

import ipaddress
import os
import pathlib
import socket
from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic

from holdback.buckets import (
    MAX_NUM_BLOCKS,
    SMALLEST_DEFAULT_PREFILL_BUCKET,
    check_limits,
    get_default_decode_context_length_buckets,
    get_default_num_batched_tokens_buckets,
    get_default_num_seqs_buckets,
)
from holdback.endpoints import Target
from holdback.errors import ConfigError
from holdback.step_timeouts import StepTimeoutConfig
from holdback.types import ExecutorLimits

DEVICES = ("cpu", "neuron", "simulated")
DEFAULT_MAX_NUM_SEQS = 32
DEFAULT_MAX_NUM_BATCHED_TOKENS = 512
NEURON_MAX_NUM_BATCHED_TOKENS = 2048
NEURON_SMALLEST_PREFILL_BUCKET = 512


def _split(value: Any) -> Any:
    """A flag or variable names several numbers as `a,b`."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


Buckets = Annotated[tuple[int, ...], pydantic.BeforeValidator(_split), pydantic.Field(min_length=1, max_length=64)]
TokenIds = Annotated[tuple[int, ...], pydantic.BeforeValidator(_split), pydantic.Field(max_length=64)]


class ExecutorConfig(StepTimeoutConfig):
    """One executor, and so one device group."""

    process: ClassVar[str] = "executor"

    scheduler: Target | None = pydantic.Field(
        None, description="host:port of the scheduler to register with; required, except with compile_only"
    )
    device: str = pydantic.Field("cpu", description=f"what runs the model: {', '.join(DEVICES)}")
    model: pathlib.Path | None = pydantic.Field(
        None, description="model directory; needed by every device but simulated"
    )
    dtype: Literal["bfloat16", "float16", "float32"] = pydantic.Field(
        "bfloat16", description="of weights and KV memory"
    )
    max_model_len: int | None = pydantic.Field(
        None, ge=2, le=2**24, description="most tokens of prompt and output together; null: the model's own limit"
    )
    block_size: int = pydantic.Field(16, ge=1, le=4096, description="tokens per KV block")
    num_blocks: int | None = pydantic.Field(
        None, ge=0, le=MAX_NUM_BLOCKS, description="KV blocks, the unusable block 0 included; null: from kv_cache_bytes"
    )
    kv_cache_bytes: int | None = pydantic.Field(
        None,
        ge=1,
        description="KV memory in bytes; null: from kv_memory_fraction, else 2 GiB, or what one request needs if more",
    )
    kv_memory_fraction: float | None = pydantic.Field(
        None,
        gt=0,
        le=1,
        description="share of the device's memory that may be in use once KV memory has its part, weights and other "
        "programs included; null: kv_cache_bytes on the cpu, else 0.9",
    )
    kv_memory_cap_fraction: float = pydantic.Field(
        0.30, gt=0, le=1, description="with kv_memory_fraction: KV memory is at most this share of the device's memory"
    )
    kv_memory_min_bytes: int | None = pydantic.Field(
        None, ge=0, description="with kv_memory_fraction: KV memory is at least this; null: 0 on the cpu, else 1 GiB"
    )
    max_num_seqs: int | None = pydantic.Field(
        None, ge=1, le=4096, description=f"requests at once; null: the largest decode bucket, {DEFAULT_MAX_NUM_SEQS}"
    )
    max_num_batched_tokens: int | None = pydantic.Field(
        None,
        ge=1,
        le=2**20,
        description=f"tokens of a prefill chunk; null: the largest prefill bucket, {DEFAULT_MAX_NUM_BATCHED_TOKENS} "
        f"({NEURON_MAX_NUM_BATCHED_TOKENS} on neuron)",
    )
    num_batched_tokens_buckets: Buckets | None = pydantic.Field(
        None,
        description=f"prefill shapes in tokens, as a,b; null: powers of two from 128 ({NEURON_SMALLEST_PREFILL_BUCKET} "
        "on neuron)",
    )
    num_seqs_buckets: Buckets | None = pydantic.Field(
        None, description="decode shapes in rows, as a,b; null: powers of two from 1"
    )
    decode_context_length_buckets: Buckets | None = pydantic.Field(
        None,
        description="context shapes in tokens, as a,b, to which max_model_len is added; null: powers of two from 256 "
        "on neuron, none elsewhere; not on the cpu, where the length of the context is data",
    )
    neuron_cores: str | None = pydantic.Field(
        None,
        pattern=r"^\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*$",
        max_length=200,
        description="NeuronCores to use, as 0-3 or 4,5; null: those that NEURON_RT_VISIBLE_CORES names, else all",
    )
    neuron_memory_bytes: int | None = pydantic.Field(
        None, ge=1, description="memory of a NeuronCore; null: as its runtime reports it"
    )
    num_threads: int | None = pydantic.Field(
        None,
        ge=1,
        le=1024,
        description="threads of the cpu device; null: one for each processor that this process may use, up to 16",
    )
    use_kernels: bool = pydantic.Field(
        True, description="cpu in bfloat16: compute with kernels in C++ where they can be built, else with PyTorch"
    )
    kernels_directory: pathlib.Path | None = pydantic.Field(
        None, description="where compiled kernels are kept; null: in compile_cache, else in the user's cache directory"
    )
    compile_cache: pathlib.Path | None = pydantic.Field(
        None, description="directory of what was compiled, shared by executors; null: in the user's cache directory"
    )
    require_cached: bool = pydantic.Field(
        False, description="start only if everything is in the compile cache, else status 2"
    )
    compile_only: bool = pydantic.Field(False, description="fill the compile cache and end, without a scheduler")
    tensor_parallel_size: int = pydantic.Field(
        1,
        ge=1,
        le=256,
        description="processes that share the model, each with a part of every layer; 1: this one alone",
    )
    executor_id: str | None = pydantic.Field(
        None, min_length=1, max_length=128, description="name for people and logs; null: host name and process id"
    )
    served_model_name: str | None = pydantic.Field(
        None,
        min_length=1,
        max_length=256,
        description="name of the model in metrics; null: that of the model directory",
    )
    advertise_address: str = pydantic.Field(
        "", description="literal IP that the scheduler dials instead of the one that this executor registers from"
    )
    drain_timeout_s: float = pydantic.Field(
        5.0, gt=0, le=3600, description="how long a stop waits for the step that runs before the process ends anyway"
    )
    simulated_vocab_size: int | None = pydantic.Field(
        None, ge=17, le=2**20, description="simulated device: vocabulary; null: that of the model directory, else 32000"
    )
    simulated_eos_token_ids: TokenIds | None = pydantic.Field(
        None, description="simulated device: EOS ids, as a,b; null: those of the model directory, else 2"
    )
    simulated_fingerprint: str = pydantic.Field(
        "simulated", min_length=1, max_length=128, description="simulated device: model fingerprint"
    )
    simulated_prefill_us_per_token: float = pydantic.Field(
        1.0, ge=0, le=1e6, description="simulated device: microseconds per token of a prefill bucket"
    )
    simulated_decode_us: int = pydantic.Field(200, ge=0, le=60_000_000, description="simulated device: decode step")
    simulated_nan_token_id: int | None = pydantic.Field(
        None, ge=0, description="simulated device: the numbers of a row that sees this token are not finite"
    )
    simulated_error_token_id: int | None = pydantic.Field(
        None, ge=0, description="simulated device: a step that computes this token fails"
    )
    simulated_hang_token_id: int | None = pydantic.Field(
        None, ge=0, description="simulated device: a step that computes this token never ends"
    )

    @pydantic.field_validator("advertise_address")
    @classmethod
    def _literal_ip(cls, value: str) -> str:
        if value:
            try:
                ipaddress.ip_address(value)
            except ValueError:
                raise ValueError("allowed: a literal IP address") from None
        return value

    @pydantic.field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        if value not in DEVICES:
            raise ValueError(f"allowed: {', '.join(DEVICES)}")
        return value

    @pydantic.model_validator(mode="after")
    def _has_one_purpose(self) -> Self:
        if self.scheduler is None and not self.compile_only:
            raise ValueError("scheduler is required")
        if self.compile_only and self.require_cached:
            raise ValueError("compile_only and require_cached are both set; allowed: one of them")
        return self

    @pydantic.model_validator(mode="after")
    def _device_has_what_it_needs(self) -> Self:
        if self.device != "simulated" and self.model is None:
            raise ValueError(f"model is required by the device {self.device}")
        if self.device == "cpu" and self.decode_context_length_buckets is not None:
            shown = list(self.decode_context_length_buckets)
            raise ValueError(f"decode_context_length_buckets is {shown}; allowed on the device cpu: none")
        if self.device != "neuron" and self.neuron_cores is not None:
            raise ValueError(f"neuron_cores is {self.neuron_cores!r}; allowed on the device {self.device}: none")
        self._check_kv_memory()
        return self

    def _check_kv_memory(self) -> None:
        sizes = {name: getattr(self, name) for name in ("num_blocks", "kv_cache_bytes", "kv_memory_fraction")}
        given = {name: value for name, value in sizes.items() if value is not None}
        if len(given) > 1:
            shown = " and ".join(f"{name} is {value}" for name, value in given.items())
            raise ValueError(f"{shown}; allowed: one of them")
        for name, value in given.items():
            if self.device == "simulated" and name != "num_blocks":
                raise ValueError(f"{name} is {value}; allowed on the device simulated: num_blocks")

        has_budget = self.kv_memory_fraction is not None or (self.device == "neuron" and not given)
        for name in ("kv_memory_cap_fraction", "kv_memory_min_bytes"):
            value = getattr(self, name)
            if name in self.model_fields_set and value is not None and not has_budget:
                raise ValueError(f"{name} is {value}, which nothing goes by; allowed: with kv_memory_fraction")

    @property
    def name(self) -> str:
        """`executor_id`, or host name and process id."""
        return self.executor_id or f"{socket.gethostname()[:100]}-{os.getpid()}"

    @property
    def scheduler_target(self) -> str:
        """`scheduler`. Raises ConfigError where there need be none."""
        if self.scheduler is None:
            raise ConfigError("scheduler is required")
        return self.scheduler

    @property
    def num_seqs(self) -> int:
        """`max_num_seqs`, or what it follows from."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        return self.num_seqs_buckets[-1] if self.num_seqs_buckets else DEFAULT_MAX_NUM_SEQS

    @property
    def num_batched_tokens(self) -> int:
        """`max_num_batched_tokens`, or what it follows from."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        if self.num_batched_tokens_buckets:
            return self.num_batched_tokens_buckets[-1]
        return NEURON_MAX_NUM_BATCHED_TOKENS if self.device == "neuron" else DEFAULT_MAX_NUM_BATCHED_TOKENS


def build_limits(config: ExecutorConfig, *, max_model_len: int, num_blocks: int) -> ExecutorLimits:
    """What the device can hold and run, defaults filled in and checked before anything is loaded.

    Args:
        config: of the executor.
        max_model_len: the configured one, or the model's.
        num_blocks: the configured ones, or what fits the KV memory; block 0 included.

    Raises:
        ConfigError: K1 or K2 refuse it, with both numbers.
    """
    largest = min(config.num_batched_tokens, max_model_len)
    smallest = NEURON_SMALLEST_PREFILL_BUCKET if config.device == "neuron" else SMALLEST_DEFAULT_PREFILL_BUCKET
    limits = ExecutorLimits(
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_num_seqs=config.num_seqs,
        max_num_batched_tokens=config.num_batched_tokens,
        num_batched_tokens_buckets=(
            config.num_batched_tokens_buckets or tuple(get_default_num_batched_tokens_buckets(largest, smallest))
        ),
        num_seqs_buckets=config.num_seqs_buckets or tuple(get_default_num_seqs_buckets(config.num_seqs)),
        decode_context_length_buckets=_context_buckets(config, max_model_len),
    )
    check_limits(limits, max_model_len)
    return limits


def _context_buckets(config: ExecutorConfig, max_model_len: int) -> tuple[int, ...]:
    given = config.decode_context_length_buckets
    if given is not None:
        return given if given[-1] == max_model_len else (*given, max_model_len)
    return tuple(get_default_decode_context_length_buckets(max_model_len)) if config.device == "neuron" else ()
