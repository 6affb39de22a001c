"""The executor's metrics, read from what it counts when somebody asks; docs/metrics.md has them for people."""

from __future__ import annotations

from collections.abc import Iterator

from executor_svc.config import ExecutorConfig
from executor_svc.counts import StartTimes
from executor_svc.devices.base import Device, GraphKey
from executor_svc.runner import NeuronModelRunner
from holdback.metrics import Kind, Metric, Sample, bucket_name
from holdback.types import CompileCounts

_MODEL = ("model_name",)
_GRAPH = ("model_name", "bucket_name")

RUNS = Metric("vllm_neuron:neff_execution_count_total", Kind.COUNTER, "Steps that ran this graph.", _GRAPH)
BUILD = Metric("vllm_neuron:compilation_time_seconds", Kind.GAUGE, "What building this graph took at start.", _GRAPH)
STARTUP = Metric("vllm_neuron:startup_time_seconds", Kind.GAUGE, "From the start until ready to register.", _MODEL)
LOAD = Metric("vllm_neuron:model_load_time_seconds", Kind.GAUGE, "What loading the model took.", _MODEL)
LOAD_SIZE = Metric("vllm_neuron:model_load_size_bytes", Kind.GAUGE, "Size of its weights in this process.", _MODEL)
CACHE_HITS = Metric(
    "holdback:compile_cache_hits_total", Kind.COUNTER, "What the start found in the compile cache.", _MODEL
)
CACHE_MISSES = Metric("holdback:compile_cache_misses_total", Kind.COUNTER, "What it had to compile.", _MODEL)
BUSY = Metric(
    "holdback:device_busy_seconds_total", Kind.COUNTER, "Device time of steps, by phase.", ("model_name", "phase")
)
IDLE = Metric("holdback:device_idle_seconds_total", Kind.COUNTER, "Time without a step, since it was ready.", _MODEL)
REGISTERED = Metric("holdback:executor_registered", Kind.GAUGE, "1 while a scheduler has accepted it.", _MODEL)

METRICS = (RUNS, BUILD, STARTUP, LOAD, LOAD_SIZE, CACHE_HITS, CACHE_MISSES, BUSY, IDLE, REGISTERED)


class ExecutorMetrics:
    """The source of the executor's samples. Called on the event loop.

    Attributes:
        start: what the start took.
        device: once it is there.
        runner: once it is ready.
        is_registered: a scheduler has accepted this executor.
    """

    def __init__(self, config: ExecutorConfig) -> None:
        self._config = config
        self.start = StartTimes()
        self.device: Device | None = None
        self.runner: NeuronModelRunner | None = None
        self.is_registered = False

    def __call__(self) -> Iterator[Sample]:
        model = (self._model_name,)
        yield Sample(REGISTERED, model, self.is_registered)
        if self.start.whole_s is not None:
            yield Sample(STARTUP, model, self.start.whole_s)
        if self.start.load_s is not None:
            yield Sample(LOAD, model, self.start.load_s)
        if self.device is not None:
            yield from self._device(self.device)
        if self.device is not None and self.runner is not None:
            yield from self._steps(self.device, self.runner)

    @property
    def _model_name(self) -> str:
        if self._config.served_model_name is not None:
            return self._config.served_model_name
        return "" if self.device is None else self.device.model.name

    def _device(self, device: Device) -> Iterator[Sample]:
        model, compiled = (self._model_name,), device.compiled or CompileCounts()
        yield Sample(LOAD_SIZE, model, device.num_weight_bytes)
        yield Sample(CACHE_HITS, model, compiled.num_hits)
        yield Sample(CACHE_MISSES, model, compiled.num_misses)
        for key, seconds in self.start.build_s.copy().items():
            yield Sample(BUILD, (*model, _name(device, key)), seconds)

    def _steps(self, device: Device, runner: NeuronModelRunner) -> Iterator[Sample]:
        model, times = (self._model_name,), runner.times
        for key in device.declared_graphs():
            yield Sample(RUNS, (*model, _name(device, key)), times.num_runs.get(key, 0))
        for phase, us in times.busy_us.items():
            yield Sample(BUSY, (*model, phase.value), us / 1e6)
        yield Sample(IDLE, model, runner.idle_s())


def _name(device: Device, key: GraphKey) -> str:
    has_contexts = bool(device.limits.decode_context_length_buckets)
    return bucket_name(key.phase, key.size, key.context if has_contexts else None)
