"""Tiny random models for the tests of the `cpu` device, and steps for it written out by hand.

Weights are large enough for the logits to depend on every token of the context. Building a step here, and not with the
runner's input builder, keeps what the device is promised and what the runner makes apart.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers

from executor_svc.config import ExecutorConfig
from executor_svc.devices.base import Device, GraphKey, SamplingInputs, StepInputs
from executor_svc.devices.cpu import CpuDevice
from executor_svc.graphs import DeclaredGraphs
from executor_svc.parallel.group import RankGroup
from holdback.buckets import blocks_for, get_bucket_for_count
from holdback.types import Phase, SamplingParams

VOCAB_SIZE = 128
BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
ALL_LOGPROBS = SamplingParams(temperature=0.0, num_logprobs=VOCAB_SIZE)


def llama_config(**overrides: Any) -> transformers.LlamaConfig:
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    settings = sizes | heads | ids | {"max_position_embeddings": MAX_MODEL_LEN, "initializer_range": 0.4}
    return transformers.LlamaConfig(**(settings | overrides))


def save_model(directory: pathlib.Path, config: Any = None, seed: int = 0) -> pathlib.Path:
    """Writes a random model in Hugging Face layout; the same one for the same seed."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config or llama_config())
    model.save_pretrained(directory)
    return directory


def build_device(directory: pathlib.Path, *, ranks: RankGroup | None = None, **settings: Any) -> CpuDevice:
    """A device of 4 slots and 31 usable blocks of 4, with prefill buckets 8 and 16, in float32."""
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "num_blocks": 32,
        "num_batched_tokens_buckets": (8, 16),
        "num_seqs_buckets": (1, 2, 4),
    }
    config = ExecutorConfig(scheduler="127.0.0.1:1", model=directory, **(defaults | settings))
    return CpuDevice(config, ranks)


def prefill_step(
    device: Device,
    token_ids: Sequence[int],
    table: Sequence[int],
    *,
    start: int = 0,
    slot: int = 0,
    params: SamplingParams | None = ALL_LOGPROBS,
    padding_token_id: int = 0,
) -> StepInputs:
    """The chunk `token_ids` of a sequence, whose first token is at `start`. Without `params` it is not the last one."""
    size = get_bucket_for_count(len(token_ids), device.limits.num_batched_tokens_buckets)
    padding = size - len(token_ids)
    positions = np.arange(start, start + len(token_ids))
    return StepInputs(
        key=GraphKey(Phase.PREFILL, size, device.model.max_model_len),
        input_ids=_int32([*token_ids, *[padding_token_id] * padding]),
        positions=_int32([*positions, *[positions[-1]] * padding]),
        slot_mapping=_int32([*(_kv_slot(device, table, int(place)) for place in positions), *[-1] * padding]),
        block_tables=_int32([_padded_table(device, table)]),
        context_lens=_int32([start + len(token_ids)]),
        num_tokens=len(token_ids),
        slots=_int32([slot if params is not None else device.limits.max_num_seqs]),
        sampling=None if params is None else sampling_inputs([params]),
    )


def decode_step(
    device: Device,
    lengths: Sequence[int],
    tables: Sequence[Sequence[int]],
    slots: Sequence[int],
    params: Sequence[SamplingParams] | None = None,
    *,
    size: int | None = None,
    num_outputs: Sequence[int] | None = None,
    uniform: Sequence[float] | None = None,
) -> StepInputs:
    """One token for each sequence, which has `lengths` tokens computed already."""
    size = size or get_bucket_for_count(len(slots), device.limits.num_seqs_buckets)
    padding = size - len(slots)
    kv_slots = [_kv_slot(device, table, length) for table, length in zip(tables, lengths, strict=True)]
    return StepInputs(
        key=GraphKey(Phase.DECODE, size, device.model.max_model_len),
        positions=_int32([*lengths, *[0] * padding]),
        slot_mapping=_int32([*kv_slots, *[-1] * padding]),
        block_tables=_int32([_padded_table(device, table) for table in [*tables, *[[]] * padding]]),
        context_lens=_int32([*(length + 1 for length in lengths), *[0] * padding]),
        num_tokens=len(slots),
        slots=_int32([*slots, *[device.limits.max_num_seqs] * padding]),
        sampling=sampling_inputs(list(params or [ALL_LOGPROBS] * len(slots)), size, num_outputs, uniform),
    )


def sampling_inputs(
    params: Sequence[SamplingParams],
    size: int | None = None,
    num_outputs: Sequence[int] | None = None,
    uniform: Sequence[float] | None = None,
) -> SamplingInputs:
    size = size or len(params)
    padding = size - len(params)
    return SamplingInputs(
        [*params, *[None] * padding],
        _int32([*(num_outputs or [0] * len(params)), *[0] * padding]),
        np.array([*(uniform or [0.5] * len(params)), *[0.0] * padding], np.float32),
    )


def with_graph(device: Device, inputs: StepInputs) -> StepInputs:
    """The same step for a device with context buckets: with its smallest graph that holds the context."""
    computed = int(inputs.context_lens.max()) - (inputs.num_tokens if inputs.key.phase is Phase.PREFILL else 0)
    key = DeclaredGraphs(device.declared_graphs()).choose(inputs.key.phase, inputs.key.size, computed)
    return dataclasses.replace(inputs, key=key)


def _kv_slot(device: Device, table: Sequence[int], place: int) -> int:
    block_size = device.limits.block_size
    return table[place // block_size] * block_size + place % block_size


def _padded_table(device: Device, table: Sequence[int]) -> list[int]:
    width = blocks_for(device.model.max_model_len, device.limits.block_size)
    return [*table, *[0] * (width - len(table))]


def _int32(values: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)
