"""Declared graphs: which one runs a step, and how long each takes.

Every graph is built and timed before the executor is ready. What is not declared is refused afterwards, because a
compilation in the middle of serving is a pause of minutes for everybody.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Iterable
from functools import partial

import numpy as np
import structlog

from executor_svc.devices.base import Device, GraphKey, SamplingInputs, StepInputs
from executor_svc.progress import ProgressBar
from executor_svc.requests import refuse
from holdback.buckets import blocks_for
from holdback.errors import ErrorReason, UnavailableError
from holdback.types import GraphLatency, Phase, SamplingParams

log = structlog.get_logger(__name__)


class DeclaredGraphs:
    """The graphs of a device, for choosing."""

    def __init__(self, graphs: Iterable[GraphKey]) -> None:
        self._contexts: dict[tuple[Phase, int], list[int]] = {}
        for key in graphs:
            bisect.insort(self._contexts.setdefault((key.phase, key.size), []), key.context)

    def choose(self, phase: Phase, size: int, context: int) -> GraphKey:
        """The graph of this size with the smallest context bucket that holds `context`.

        Raises:
            InternalError: no graph is declared for that.
        """
        contexts = self._contexts.get((phase, size))
        if contexts is None:
            sizes = sorted(declared for of_phase, declared in self._contexts if of_phase is phase)
            raise refuse(f"{phase.value} shape", size, f"the declared buckets {sizes}")
        index = bisect.bisect_left(contexts, context)
        if index == len(contexts):
            raise refuse(f"context of a {phase.value} of shape {size}", context, f"at most {contexts[-1]}")
        return GraphKey(phase, size, contexts[index])


def warm_up(
    device: Device,
    stop: threading.Event | None = None,
    *,
    is_timed: bool = True,
    build_s: dict[GraphKey, float] | None = None,
) -> tuple[GraphLatency, ...]:
    """Builds and times every declared graph, then resets the device. One log line for each graph, and one for all.

    The first run of a graph builds it and is not among its times. A graph whose context is data is timed at its
    smallest and its largest context.

    Args:
        device: nothing may run on it. The runs write to the sink and to the padding row of `last_token` alone.
        stop: ends the warm-up between two graphs when it is set.
        is_timed: False builds the graphs and returns no times.
        build_s: gets the seconds that building each graph took, as it is built.

    Raises:
        ConfigError: a graph must be in the compile cache and is not, or it cannot be compiled.
        UnavailableError: `stop` was set.
    """
    graphs = device.declared_graphs()
    latencies: list[GraphLatency] = []
    started_s = time.perf_counter()
    with ProgressBar(len(graphs), "graph") as bar:
        for number, key in enumerate(graphs, start=1):
            if stop is not None and stop.is_set():
                raise UnavailableError("warm-up was stopped", reason=ErrorReason.SHUTTING_DOWN)
            contexts = _contexts_to_time(device, key)
            is_hit, took_s = build_graph(device, graph_inputs(device, key, contexts[0]))
            if build_s is not None:
                build_s[key] = took_s
            timed = [GraphLatency(key.phase, key.size, at, _run(device, key, at)) for at in contexts if is_timed]
            latencies += timed
            latency_us = {latency.context: latency.latency_us for latency in timed}
            line = {"phase": key.phase.value, "size": key.size, "context": key.context, "latency_us": latency_us}
            build = {"is_hit": is_hit, "build_s": round(took_s, 3), "number": number, "of": len(graphs)}
            bar.advance(partial(log.info, "graph_ready", **line, **build))
    device.reset()
    _log_summary(device, len(graphs), time.perf_counter() - started_s)
    return tuple(latencies)


def build_graph(device: Device, inputs: StepInputs) -> tuple[bool | None, float]:
    """The first run of a graph. Whether its compile cache had it, None without one, and the seconds that it took.

    Raises:
        ConfigError: the graph must be in the compile cache and is not, or it cannot be compiled.
    """
    cache = device.compile_cache
    is_hit = None if cache is None else cache.graph(inputs.key, device.limits).is_hit
    started_s = time.perf_counter()
    device.collect(device.launch(inputs))
    build_s = time.perf_counter() - started_s
    if cache is not None:
        cache.record(inputs.key, device.limits, build_s)
    return is_hit, build_s


def _log_summary(device: Device, num_graphs: int, seconds: float) -> None:
    counts = device.compiled
    log.info(
        "graphs_ready",
        device=device.kind,
        num_graphs=num_graphs,
        num_hits=None if counts is None else counts.num_hits,
        num_misses=None if counts is None else counts.num_misses,
        seconds=round(seconds, 3),
    )


def _contexts_to_time(device: Device, key: GraphKey) -> list[int]:
    if device.limits.decode_context_length_buckets:
        return [key.context]
    if key.phase is Phase.DECODE:
        return sorted({1, device.model.max_model_len})
    return sorted({0, device.model.max_model_len - key.size})


def _run(device: Device, key: GraphKey, context: int) -> int:
    """Runs a graph once, full of real rows that touch nobody's memory; its time in microseconds, >= 1."""
    return max(1, device.collect(device.launch(graph_inputs(device, key, context))).device_us)


def graph_inputs(device: Device, key: GraphKey, context: int) -> StepInputs:
    """A step of a graph full of real rows, at a context of so many tokens, that touches nobody's memory."""
    limits, max_model_len = device.limits, device.model.max_model_len
    is_prefill = key.phase is Phase.PREFILL
    num_rows = 1 if is_prefill else key.size
    start = min(context, max_model_len - key.size) if is_prefill else context - 1
    positions = np.arange(start, start + key.size) if is_prefill else np.full(key.size, start)
    visible = start + key.size if is_prefill else context
    return StepInputs(
        key=key,
        input_ids=np.zeros(key.size, np.int32) if is_prefill else None,
        positions=positions.astype(np.int32),
        slot_mapping=np.full(key.size, -1, np.int32),
        block_tables=np.zeros((num_rows, blocks_for(max_model_len, limits.block_size)), np.int32),
        context_lens=np.full(num_rows, visible, np.int32),
        num_tokens=key.size,
        slots=np.full(num_rows, limits.max_num_seqs, np.int32),
        sampling=SamplingInputs(
            [SamplingParams()] * num_rows, np.zeros(num_rows, np.int32), np.full(num_rows, 0.5, np.float32)
        ),
    )
