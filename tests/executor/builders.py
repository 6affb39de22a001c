"""Builders for the executor's tests: a tiny device, a runner on it, and steps as a scheduler would send them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from executor_svc.devices.base import Device
from executor_svc.devices.simulated import SimulatedDevice, SimulatedFaults, SimulatedLatencies
from executor_svc.runner import NeuronModelRunner
from holdback.types import (
    CachedRequestsData,
    ExecutorLimits,
    ModelInfo,
    NewRequestData,
    Phase,
    RequestSpec,
    SamplingParams,
    SchedulerOutput,
)

VOCAB_SIZE = 116  # answers are 16 + something modulo 100
FAST = SimulatedLatencies(prefill_us_per_token=0.0, decode_us=1)


def build_device(
    *,
    block_size: int = 4,
    num_blocks: int = 17,
    max_model_len: int = 32,
    prefill_buckets: Sequence[int] = (4, 8),
    seqs_buckets: Sequence[int] = (1, 2, 4),
    context_buckets: Sequence[int] = (),
    vocab_size: int = VOCAB_SIZE,
    latencies: SimulatedLatencies = FAST,
    faults: SimulatedFaults | None = None,
    max_steps_in_flight: int = 2,
) -> SimulatedDevice:
    model = ModelInfo("simulated", "simulated", vocab_size, (2,), max_model_len)
    limits = ExecutorLimits(
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=seqs_buckets[-1],
        max_num_batched_tokens=prefill_buckets[-1],
        num_batched_tokens_buckets=tuple(prefill_buckets),
        num_seqs_buckets=tuple(seqs_buckets),
        decode_context_length_buckets=tuple(context_buckets),
        max_steps_in_flight=max_steps_in_flight,
    )
    return SimulatedDevice(model, limits, latencies, faults)


class Steps:
    """A scheduler by hand. Counts steps and computed tokens; slots, blocks and sizes are the test's to choose."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._computed: dict[str, int] = {}

    def new(
        self,
        req_id: str,
        prompt: Sequence[int],
        *,
        slot: int = 0,
        blocks: Sequence[int] = (1,),
        num_tokens: int | None = None,
        padded: int = 4,
        computed: int = 0,
        outputs: Sequence[int] = (),
        sampling: SamplingParams | None = None,
        finished: Sequence[str] = (),
    ) -> SchedulerOutput:
        """The first chunk of a request; all of it unless `num_tokens` says less."""
        spec = RequestSpec(req_id, prompt, sampling or SamplingParams(), output_token_ids=outputs)
        count = len(prompt) + len(outputs) - computed if num_tokens is None else num_tokens
        self._computed[req_id] = computed + count
        return SchedulerOutput(
            step=self._next_step(),
            scheduled_new_reqs=[NewRequestData(req_id, spec, slot, list(blocks), computed)],
            num_scheduled_tokens={req_id: count},
            num_scheduled_tokens_padded={req_id: padded},
            finished_req_ids=list(finished),
            phase=Phase.PREFILL,
        )

    def chunk(self, req_id: str, num_tokens: int, *, padded: int = 4, blocks: Sequence[int] = ()) -> SchedulerOutput:
        """A later chunk."""
        cached = CachedRequestsData([req_id], [self._computed[req_id]], [list(blocks) or None])
        self._computed[req_id] += num_tokens
        return SchedulerOutput(
            step=self._next_step(),
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={req_id: num_tokens},
            num_scheduled_tokens_padded={req_id: padded},
            phase=Phase.PREFILL,
        )

    def decode(
        self, *req_ids: str, blocks: dict[str, list[int]] | None = None, finished: Sequence[str] = ()
    ) -> SchedulerOutput:
        new_blocks = [(blocks or {}).get(req_id) for req_id in req_ids]
        cached = CachedRequestsData(list(req_ids), [self._computed[req_id] for req_id in req_ids], new_blocks)
        for req_id in req_ids:
            self._computed[req_id] += 1
        return SchedulerOutput(
            step=self._next_step(),
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=dict.fromkeys(req_ids, 1),
            num_scheduled_tokens_padded=dict.fromkeys(req_ids, 1),
            finished_req_ids=list(finished),
            phase=Phase.DECODE,
        )

    def finish(self, *req_ids: str) -> SchedulerOutput:
        return SchedulerOutput(step=self._next_step(), finished_req_ids=list(req_ids))

    def _next_step(self) -> int:
        self._num_steps += 1
        return self._num_steps - 1


def build_runner(**knobs: Any) -> NeuronModelRunner:
    return NeuronModelRunner(build_device(**knobs))


def generate(runner: NeuronModelRunner, steps: Steps, first: SchedulerOutput, num_tokens: int) -> list[int]:
    """Runs a request alone until it has `num_tokens` outputs. `first` is its whole prefill."""
    (req_id,) = first.num_scheduled_tokens
    outputs = runner.execute(first).sampled_token_ids
    while len(outputs) < num_tokens:
        outputs += runner.execute(steps.decode(req_id)).sampled_token_ids
    return outputs


def run_overlapping(device: Device, prompt: list[int], bucket: int, largest: int) -> list[list[int]]:
    """Tokens of three requests: chunks, a prefix hit, drawn tokens, a batch, a slot and blocks that are used again.

    Args:
        device: with blocks of 4 tokens.
        prompt: 11 token ids.
        bucket: prefill bucket, at least 8.
        largest: another, at least 11.
    """
    device.reset()
    runner, steps = NeuronModelRunner(device), Steps()
    drawn = SamplingParams(temperature=1.0, top_p=0.9, seed=5, presence_penalty=0.5)
    found = [
        runner.execute(steps.new("a", prompt, blocks=[1, 2, 3, 4], num_tokens=8, padded=bucket)).sampled_token_ids,
        runner.execute(steps.chunk("a", 3, padded=bucket)).sampled_token_ids,
        runner.execute(
            steps.new("b", [*prompt[:8], 7], slot=1, blocks=[1, 2, 5, 6], computed=8, padded=bucket, sampling=drawn)
        ).sampled_token_ids,
    ]
    found += [runner.execute(steps.decode("a", "b")).sampled_token_ids for _ in range(4)]
    first = steps.new("c", prompt[::-1], blocks=[3, 4, 7, 8], padded=largest, sampling=drawn, finished=["a"])
    return [*found, generate(runner, steps, first, 4), runner.execute(steps.decode("b", "c")).sampled_token_ids]
