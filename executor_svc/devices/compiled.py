"""A device whose steps are compiled graphs with static shapes: what `neuron` is, whatever torch device it names.

One thread of its own puts everything on the device strictly in the order of the calls: rows of requests that start,
steps, resets. A step's results are on their way back to the host before the next step is put there, so that waiting for
the one does not wait for the other; on a device that works asynchronously the next step is there before the one that
runs has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import structlog
import torch
from torch._dynamo.exc import TorchDynamoException

from executor_svc.compile_cache import describe_graph
from executor_svc.devices.base import Device, GraphKey, SamplingInputs, StepInputs, StepResult
from executor_svc.devices.shapes import check_shapes
from executor_svc.devices.worker import OrderedWorker
from executor_svc.kv_cache import KVCache, LayerShape
from executor_svc.model_directory import describe_error
from executor_svc.models import LoadedModel
from executor_svc.sampling_tables import DeviceTables
from executor_svc.step_graph import (
    NUM_ROW_FLOATS,
    NUM_ROW_INTS,
    Step,
    StepState,
    StepTensors,
    compile_step,
    forbidding_compilation,
    make_step,
    num_context_blocks,
    use_static_experts,
)
from executor_svc.step_sampling import MAX_LOGPROBS, SampledRows
from holdback.errors import ConfigError
from holdback.types import ExecutorLimits, Phase, RequestSpec, SamplingParams, TokenLogprobs

log = structlog.get_logger(__name__)

_UNCHANGED = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """How graphs are made.

    Attributes:
        device: where they run.
        backend: of `torch.compile`; a name that it knows, or a function.
        max_logprobs: most likely tokens that they return.
    """

    device: torch.device
    backend: str | Callable[..., Any]
    max_logprobs: int = MAX_LOGPROBS


@dataclass(slots=True)
class _Running:
    """A step on the device.

    Attributes:
        sampled: on the host, once `done` has passed; None for a step that samples nothing.
        sampling: as in `StepInputs`.
        num_rows: real ones.
        started_ns: when the device could have begun it.
        inputs: on the host, which must be there until the device has them.
        done: passed when the results are on the host; None where they are there already.
        ended_ns: when they were; 0 until that is known.
    """

    sampled: SampledRows | None
    sampling: SamplingInputs | None
    num_rows: int
    started_ns: int
    inputs: StepTensors
    done: Any = None
    ended_ns: int = 0


@dataclass(slots=True)
class _Requested:
    """A step on its way to the device: host tensors, and the starts of requests that came before it."""

    key: GraphKey
    tensors: StepTensors
    sampling: SamplingInputs | None
    num_rows: int
    starts: Sequence[Future[None]] = field(default_factory=list)


class CompiledDevice(Device):
    """A model whose every step is one compiled graph. A kind of device that is served is a subclass with its name.

    Args:
        model: checked (`model_probe`), and on the device already; its experts are made static.
        layers: what each layer keeps in KV memory.
        limits: checked, with context buckets.
        settings: how its graphs are made.

    Attributes:
        kv_cache: KV memory, on the device.
    """

    kind = "compiled"

    def __init__(
        self, model: LoadedModel, layers: Sequence[LayerShape], limits: ExecutorLimits, settings: GraphSettings
    ) -> None:
        self.model = model.info
        self.limits = limits
        self._settings = settings
        use_static_experts(model)
        self.num_weight_bytes = model.num_weight_bytes
        num_top = min(settings.max_logprobs, self.model.vocab_size)
        self._steps: dict[GraphKey, Step] = {
            key: compile_step(make_step(model, key, num_top), key, settings.backend) for key in self.declared_graphs()
        }
        self._built: set[GraphKey] = set()
        self.kv_cache = KVCache(layers, limits.num_blocks, limits.block_size, model.module.dtype, settings.device)
        self._tables = DeviceTables(limits.max_num_seqs, self.model, num_top, settings.device)
        last_token = torch.zeros(limits.max_num_seqs + 1, dtype=torch.int32, device=settings.device)
        self._state = StepState(self.kv_cache.keys, self.kv_cache.values, last_token, self._tables.tensors)
        self._worker = OrderedWorker(f"{self.kind}-device")
        self._starts: list[Future[None]] = []
        self._last_ended_ns = 0

    def start_request(self, slot: int, spec: RequestSpec) -> None:
        """As the interface says. What is wrong with the request is raised by `collect` of the next launched step."""
        self._starts.append(self._worker.submit(partial(self._tables.start_request, slot, spec)))

    def launch(self, inputs: StepInputs) -> object:
        check_shapes(inputs, self._steps, self.limits, self.model.max_model_len)
        starts, self._starts = self._starts, []
        is_prefill = inputs.key.phase is Phase.PREFILL
        requested = _Requested(
            inputs.key, self._pack(inputs), inputs.sampling, 1 if is_prefill else inputs.num_tokens, starts
        )
        return self._worker.submit(partial(self._put, requested))

    def collect(self, ticket: object) -> StepResult:
        if not isinstance(ticket, Future):
            raise TypeError(f"ticket is {type(ticket).__name__}; allowed: what launch returned")
        running: _Running = ticket.result()
        if running.done is not None:
            running.done.synchronize()
        ended_ns = running.ended_ns or time.perf_counter_ns()
        result = StepResult(np.zeros(0, np.int32))
        # A step that was put there while another ran began when that one ended.
        result.device_us = max(1, (ended_ns - max(running.started_ns, self._last_ended_ns)) // 1000)
        self._last_ended_ns = ended_ns
        if running.sampled is not None and running.sampling is not None:
            _read(running.sampled, running.sampling.params[: running.num_rows], result)
        return result

    def reset(self) -> None:
        self._starts = []
        self._worker.submit(self._reset).result()

    def close(self) -> None:
        self._worker.close()

    def _pack(self, inputs: StepInputs) -> StepTensors:
        """Copies what the step needs, so that the caller may use its arrays again."""
        key, is_prefill = inputs.key, inputs.key.phase is Phase.PREFILL
        tokens = [inputs.positions, inputs.slot_mapping]
        if inputs.input_ids is not None:
            tokens.append(inputs.input_ids)
        width = num_context_blocks(key, self.limits.block_size)
        row_ints = np.zeros((len(inputs.slots), NUM_ROW_INTS), np.int32)
        row_ints[:, 0] = inputs.slots
        row_ints[:, 1] = inputs.context_lens - (inputs.num_tokens if is_prefill else 0)
        row_ints[:, 2] = inputs.num_tokens - 1 if is_prefill else 0
        row_floats = np.empty((len(inputs.slots), NUM_ROW_FLOATS), np.float32)
        self._pack_sampling(inputs, row_ints, row_floats)
        return StepTensors(
            torch.from_numpy(np.stack(tokens)),
            torch.from_numpy(inputs.block_tables[:, :width].copy()),
            torch.from_numpy(row_ints),
            torch.from_numpy(row_floats),
        )

    def _pack_sampling(
        self, inputs: StepInputs, row_ints: np.ndarray[Any, Any], row_floats: np.ndarray[Any, Any]
    ) -> None:
        sampling, vocab_size = inputs.sampling, self.model.vocab_size
        if sampling is None:
            row_floats[:] = pack_numbers(_UNCHANGED, vocab_size)
            row_floats[:, -1] = 0.0
            return
        for row, params in enumerate(sampling.params):
            params = params or _UNCHANGED
            row_floats[row] = pack_numbers(params, vocab_size)
            row_ints[row, 3] = sampling.num_outputs[row] < params.min_tokens
        row_floats[:, -1] = sampling.uniform

    @torch.no_grad()
    def _put(self, requested: _Requested) -> _Running:
        for start in requested.starts:
            start.result()
        device = self._settings.device
        inputs = StepTensors(*(tensor.to(device, non_blocking=True) for tensor in requested.tensors))
        started_ns = time.perf_counter_ns()
        sampled = self._call(requested.key, inputs)
        running = _Running(None, requested.sampling, requested.num_rows, started_ns, requested.tensors)
        if requested.sampling is not None:
            running.sampled = SampledRows(*(tensor.to("cpu", non_blocking=True) for tensor in sampled))
        if device.type == "cpu":
            running.ended_ns = time.perf_counter_ns()
        else:
            running.done = torch.get_device_module(device).Event()
            running.done.record()
        return running

    def _call(self, key: GraphKey, inputs: StepTensors) -> SampledRows:
        """The first call of a graph compiles it, in a warm-up; a later one that would is an error, not a pause.

        Raises:
            ConfigError: the model's graph cannot be traced whole, or the backend cannot compile it.
        """
        if key in self._built:
            with forbidding_compilation():
                return self._steps[key](self._state, inputs)
        self._built.add(key)
        try:
            return self._steps[key](self._state, inputs)
        except TorchDynamoException as error:
            log.error("graph_not_compiled", graph=describe_graph(key), exc_info=error)
            raise ConfigError(
                f"model is {self.model.name!r}, whose graph {describe_graph(key)} cannot be compiled for the device "
                f"{self.kind}: {describe_error(error)}"
            ) from error

    @torch.no_grad()
    def _reset(self) -> None:
        self.kv_cache.reset()
        self._tables.reset()
        self._state.last_token.zero_()


def pack_numbers(params: SamplingParams, vocab_size: int) -> tuple[float, ...]:
    """A row of `StepTensors.row_floats`, without its random number, for which there is a 0."""
    top_k = vocab_size if params.top_k is None else min(params.top_k, vocab_size)
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    return (params.temperature, top_k, params.top_p, params.min_p, *penalties, 0.0)


def _read(sampled: SampledRows, params: Sequence[SamplingParams | None], result: StepResult) -> None:
    """Fills in what was sampled, of the real rows."""
    num_rows = len(params)
    result.token_ids = sampled.token_ids[:num_rows].numpy().astype(np.int32)
    result.failed_rows = np.flatnonzero(~sampled.is_finite[:num_rows].numpy()).tolist()
    wanted = [None if row is None else row.num_logprobs for row in params]
    if any(number is not None for number in wanted):
        failed = set(result.failed_rows)
        result.logprobs = [
            None if number is None or row in failed else _row_logprobs(sampled, row, number)
            for row, number in enumerate(wanted)
        ]


def _row_logprobs(sampled: SampledRows, row: int, num_top: int) -> TokenLogprobs:
    values, ids = sampled.top_logprobs[row, :num_top].tolist(), sampled.top_token_ids[row, :num_top].tolist()
    top = sorted(zip(values, ids, strict=True), key=lambda pair: (-pair[0], pair[1]))
    return TokenLogprobs(
        token_id=int(sampled.token_ids[row]),
        logprob=float(sampled.logprobs[row]),
        top_token_ids=tuple(token for _, token in top),
        top_logprobs=tuple(value for value, _ in top),
    )
