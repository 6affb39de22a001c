"""The compiled step: model, attention and sampling of one declared graph as one function of tensors.

A function is made for each `GraphKey` and compiled by its first call, whole (`fullgraph`), with static shapes, and
never again: another shape is an error, not a compilation. What changes from step to step comes as four small tensors,
packed so that a step costs as many transfers; what stays on the device (`StepState`) is changed in the graph. A prefill
chunk that leaves tokens to compute runs the same graph as the last one: its token goes to the padding row of
`last_token`, where nobody looks.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from executor_svc.devices.base import GraphKey
from executor_svc.models import LoadedModel
from executor_svc.step_attention import StaticContext
from executor_svc.step_sampling import SampledRows, SamplingRows, SamplingTables, sample_rows
from holdback.buckets import blocks_for
from holdback.types import Phase

EXPERTS = "batched_mm"
"""Experts as products over the chosen ones of each token: static, and of core operations. `grouped_mm` sorts tokens by
expert, on which Neuron's compiler fails."""

NUM_ROW_INTS = 4
NUM_ROW_FLOATS = 8


class StepState(NamedTuple):
    """What a device keeps from step to step.

    Attributes:
        keys: KV memory by layer, [num_blocks + 1, block_size, num_kv_heads, head_dim].
        values: the same.
        last_token: int32 [max_num_seqs + 1].
        tables: of sampling.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    last_token: torch.Tensor
    tables: SamplingTables


class StepTensors(NamedTuple):
    """One step on its way into its graph. T and B are those of `StepInputs`.

    Attributes:
        tokens: int32 [2, T]: positions, `slot_mapping`; in a prefill [3, T], with `input_ids` last.
        block_tables: int32 [B, blocks], cut to the context bucket; of no use where that is 0, but there.
        row_ints: int32 [B, 4]: slot; visible tokens of the context, those of a prefill chunk itself not counted; index
            of the token whose logits are wanted, 0 in a decode; whether ending tokens are banned.
        row_floats: float32 [B, 8], the numbers of `SamplingRows` in its order.
    """

    tokens: torch.Tensor
    block_tables: torch.Tensor
    row_ints: torch.Tensor
    row_floats: torch.Tensor


Step = Callable[[StepState, StepTensors], SampledRows]


def use_static_experts(model: LoadedModel) -> None:
    """Chooses `EXPERTS` in a model that has experts; in any other it changes nothing."""
    if model.module._can_set_experts_implementation():
        model.module.set_experts_implementation(EXPERTS)


def num_context_blocks(key: GraphKey, block_size: int) -> int:
    """Width of `StepTensors.block_tables`; at least 1, for a tensor of no elements is trouble to some compilers."""
    return max(1, blocks_for(key.context, block_size))


def make_step(model: LoadedModel, key: GraphKey, num_top: int) -> Step:
    """The step of one graph, not compiled.

    Args:
        model: with its attention as `attention.register` makes it known.
        key: which graph.
        num_top: most likely tokens that it returns.
    """
    is_prefill = key.phase is Phase.PREFILL

    def step(state: StepState, inputs: StepTensors) -> SampledRows:
        positions, slot_mapping = inputs.tokens[0].long(), inputs.tokens[1].long()
        slots, visible, wanted, bans = inputs.row_ints.long().unbind(1)
        # The last block is the sink.
        sink = state.keys[0].shape[0] * state.keys[0].shape[1] - state.keys[0].shape[1]
        context = StaticContext(
            key.phase,
            state.keys,
            state.values,
            torch.where(slot_mapping < 0, sink, slot_mapping),
            None if key.context == 0 else inputs.block_tables,
            visible,
        )
        if is_prefill:
            logits = model.logits(inputs.tokens[2].long()[None], positions[None], context, wanted)
        else:
            input_ids = state.last_token.index_select(0, slots).long()
            logits = model.logits(input_ids[:, None], positions[:, None], context)
        rows = SamplingRows._make([*inputs.row_floats.unbind(1), bans > 0])
        sampled = sample_rows(logits, rows, state.tables, slots, num_top)
        state.last_token.index_copy_(0, slots, sampled.token_ids)
        return sampled

    return step


def compile_step(step: Step, key: GraphKey, backend: str | Callable[..., Any]) -> Step:
    """Compiles on the first call. `forbidding_compilation` is for those after it.

    Args:
        step: of `make_step`.
        key: which graph, for the name that the backend shows.
        backend: of `torch.compile`.
    """
    compiled: Step = torch.compile(
        _named(step, f"{key.phase.value}_{key.size}_context_{key.context}"),
        backend=backend,
        fullgraph=True,
        dynamic=False,
    )
    return compiled


def forbidding_compilation() -> AbstractContextManager[None]:
    """Within it, and in every thread, a call that would compile raises RuntimeError, with what differs."""
    stance: AbstractContextManager[None] = torch.compiler.set_stance("fail_on_recompile")
    return stance


def _named(step: Step, name: str) -> Step:
    """The same function with code of its own: what was compiled is kept, found and counted by code object."""
    assert isinstance(step, types.FunctionType)  # noqa: S101 - `make_step` makes nothing else
    code = step.__code__.replace(co_name=name, co_qualname=name)
    return types.FunctionType(code, step.__globals__, name, step.__defaults__, step.__closure__)
