"""The executor's metrics: what the device did, what the start took, and that idle time only grows."""

from __future__ import annotations

import pathlib

from executor_svc.config import ExecutorConfig
from executor_svc.devices.simulated import SimulatedDevice
from executor_svc.graphs import warm_up
from executor_svc.metrics import METRICS, ExecutorMetrics
from executor_svc.runner import NeuronModelRunner
from holdback.metrics import Exposition
from holdback.types import CompileCounts, Phase
from tests.executor import tiny_models
from tests.executor.builders import Steps, build_device
from tests.prometheus import Scrape

PROMPT = [20, 21, 22]
S = 1_000_000_000


class Clock:
    """Nanoseconds, set by hand."""

    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def build_metrics(device: SimulatedDevice, **settings: object) -> ExecutorMetrics:
    config = ExecutorConfig.model_validate({"scheduler": "127.0.0.1:1", "device": "simulated"} | settings)
    metrics = ExecutorMetrics(config)
    metrics.device = device
    return metrics


def read(metrics: ExecutorMetrics) -> Scrape:
    return Scrape(Exposition(METRICS, metrics).text().decode())


def test_idle_time_is_the_time_without_a_step_and_never_shrinks(steps: Steps) -> None:
    clock = Clock()
    metrics = build_metrics(device := build_device())
    metrics.runner = runner = NeuronModelRunner(device, clock_ns=clock)

    def idle_s() -> float:
        return read(metrics).of("holdback:device_idle_seconds_total")

    clock.now_ns = 5 * S
    assert idle_s() == 5
    first = runner.launch(steps.new("a", PROMPT))
    clock.now_ns = 7 * S
    second = runner.launch(steps.decode("a"))
    assert idle_s() == 5
    clock.now_ns = 8 * S
    runner.collect(first)
    clock.now_ns = 9 * S
    assert idle_s() == 5
    runner.collect(second)
    assert idle_s() == 5
    clock.now_ns = 12 * S
    assert idle_s() == 8


def test_steps_are_counted_by_graph_and_their_time_by_phase(steps: Steps) -> None:
    metrics = build_metrics(device := build_device(), served_model_name="served")
    metrics.runner = runner = NeuronModelRunner(device)
    before = read(metrics)
    assert before.of("vllm_neuron:neff_execution_count_total", bucket_name="prefill_s4", model_name="served") == 0
    us = {Phase.PREFILL: 0, Phase.DECODE: 0}
    for step in (steps.new("a", PROMPT, blocks=(1, 2)), steps.decode("a"), steps.decode("a")):
        assert step.phase is not None
        us[step.phase] += runner.execute(step).timings.device_us
    after = read(metrics)
    for bucket, count in (("prefill_s4", 1), ("decode_b1", 2), ("prefill_s8", 0)):
        assert after.of("vllm_neuron:neff_execution_count_total", bucket_name=bucket) == count
    for phase, total in us.items():
        assert after.of("holdback:device_busy_seconds_total", phase=phase.value) == total / 1e6 > 0


def test_graphs_with_context_buckets_have_them_in_their_names() -> None:
    metrics = build_metrics(device := build_device(context_buckets=(16, 32)))
    warm_up(device, build_s=metrics.start.build_s)
    shown = read(metrics)
    named = {dict(labels)["bucket_name"] for name, labels in shown.samples if name.endswith("compilation_time_seconds")}
    assert len(named) == len(device.declared_graphs())
    assert {"prefill_s4_c0", "prefill_s8_c16", "decode_b4_c32"} <= named
    assert all(value > 0 for value in shown.matching("vllm_neuron:compilation_time_seconds", {}))


def test_what_was_compiled_and_what_was_found_are_apart() -> None:
    device = build_device()
    device.compiled = CompileCounts(num_hits=3, num_misses=2)
    shown = read(build_metrics(device))
    assert shown.of("holdback:compile_cache_hits_total") == 3
    assert shown.of("holdback:compile_cache_misses_total") == 2


def test_the_size_of_the_weights_is_that_of_their_dtype(tmp_path: pathlib.Path) -> None:
    tiny_models.save_model(tmp_path)
    sizes = []
    for dtype in ("float32", "bfloat16"):
        device = tiny_models.build_device(tmp_path, dtype=dtype, use_kernels=False, num_threads=1)
        sizes.append(device.num_weight_bytes)
        device.close()
    assert sizes[0] == 2 * sizes[1] > 0
