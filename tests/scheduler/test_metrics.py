"""The scheduler's metrics: exact counters, gauges that follow the state, and series without an executor."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

import pytest

from holdback.errors import UnavailableError
from holdback.metrics import Exposition
from scheduler_svc.core.checks import Check
from scheduler_svc.metrics import METRICS, SchedulerMetrics
from scheduler_svc.server import SchedulerServer
from tests.prometheus import Scrape, scrape
from tests.scheduler.parts import Simulation, build_spec, prompt_of, settle

Simulate = Callable[..., Simulation]
Serve = Callable[..., Awaitable[SchedulerServer]]
MODEL = {"model_name": "tiny", "engine": "0"}


def read(simulation: Simulation) -> Scrape:
    source = SchedulerMetrics(simulation.config, simulation.pool, simulation.dispatcher)
    return Scrape(Exposition(METRICS, source).text().decode())


async def run(simulation: Simulation, handle: int, prompt: list[int], max_tokens: int = 4) -> None:
    simulation.submit(handle, build_spec(f"r{handle}", prompt, max_tokens=max_tokens))
    await simulation.until_ended(handle)


@pytest.mark.case("B24")
async def test_a_prompt_is_looked_up_once_and_hits_only_what_was_there_before(simulate: Simulate) -> None:
    simulation = simulate()
    simulation.add_lane(
        block_size=16, num_blocks=200, max_model_len=1100, prefill_buckets=(256,), vocab_size=2000, max_num_seqs=2
    )
    prompt = [(i * i * 7 + i * 13) % 1900 + 20 for i in range(1024)]
    await run(simulation, 0, prompt)
    first = read(simulation)
    assert first.of("vllm:prefix_cache_queries_total", **MODEL) == 1024
    assert first.of("vllm:prefix_cache_hits_total", **MODEL) == 0
    await run(simulation, 1, prompt)
    second = read(simulation)
    assert second.of("vllm:prefix_cache_queries_total", **MODEL) == 2048
    assert second.of("vllm:prefix_cache_hits_total", **MODEL) == 1008
    ended = simulation.answers[1].ended
    assert ended is not None
    assert ended.usage.cached_tokens == 1008


@pytest.mark.case("B67")
async def test_gauges_are_0_at_once_when_all_requests_are_aborted(simulate: Simulate) -> None:
    simulation = simulate()
    simulation.add_lane(is_stepped=True, max_num_seqs=32, num_blocks=400, prefill_buckets=(8, 32))
    for handle in range(24):
        simulation.submit(handle, build_spec(f"r{handle}", prompt_of(handle), max_tokens=40))
    await settle()
    for _ in range(20):
        await simulation.lanes[0].step()
    before = read(simulation)
    assert before.of("vllm:num_requests_running") == 22  # two more are in flight, bound at their first chunk
    assert before.of("vllm:num_requests_waiting") == 2
    assert before.of("vllm:kv_cache_usage_perc") > 0
    assert before.of("holdback:queued_prefill_tokens") == 6
    for handle in range(24):
        simulation.dispatcher.abort(simulation.session, f"r{handle}", 0)
    after = read(simulation)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert after.of(f"vllm:{name}") == 0
    assert after.of("holdback:queued_prefill_tokens") == after.of("holdback:kv_cache_usage_executors") == 0
    assert all(after.counters[key] >= value for key, value in before.counters.items())


async def test_moves_are_counted_by_what_caused_them_and_nothing_twice(simulate: Simulate) -> None:
    simulation = simulate()
    first = simulation.add_lane("first", is_stepped=True)
    for handle in range(3):
        simulation.submit(handle, build_spec(f"r{handle}", [20 + handle] * 9, max_tokens=6))
    await settle()
    for _ in range(5):
        await first.step()
    before = read(simulation)
    await first.lose(UnavailableError("the pod died"))
    lost = read(simulation)
    assert lost.of("holdback:request_moves_total", cause="loss") == 3
    assert lost.of("holdback:executors_left_total", cause="loss") == 1
    assert lost.of("vllm:num_requests_waiting") == 3
    assert lost.of("holdback:queued_prefill_tokens") == 3 * 9 + 9  # and three outputs of each
    assert not lost.has("holdback:lane_state", executor="first")
    second = simulation.add_lane("second", is_stepped=True)
    await settle()
    second.lane.drain("scaled down")
    while second.unanswered:
        await second.step()
    simulation.add_lane("third")
    for handle in range(3):
        await simulation.until_ended(handle)
    after = read(simulation)
    assert after.of("holdback:request_moves_total", cause="drain") == 2  # two had a step when it began to drain
    assert after.of("holdback:request_moves_total") == 5
    assert after.of("holdback:executors_left_total") == 2
    assert after.of("vllm:prefix_cache_queries_total") == 27  # each prompt once, however often it was prefilled
    of_pool = {key: value for key, value in before.counters.items() if not key[0].startswith("holdback:lane")}
    assert all(after.counters[key] >= value for key, value in of_pool.items())


@pytest.mark.case("B66")
async def test_requests_are_spread_over_all_executors_also_one_that_comes_and_one_that_goes(
    simulate: Simulate,
) -> None:
    simulation = simulate()
    lanes = [simulation.add_lane(f"executor-{number}") for number in range(3)]

    async def run_all(first: int, count: int) -> None:
        for handle in range(first, first + count):
            simulation.submit(handle, build_spec(f"r{handle}", prompt_of(handle % 90), max_tokens=3))
        for handle in range(first, first + count):
            await simulation.until_ended(handle)

    def bound(name: str) -> float:
        return read(simulation).of("holdback:lane_requests_bound_total", executor=name)

    await run_all(0, 300)
    assert all(80 <= bound(f"executor-{number}") <= 120 for number in range(3))
    assert sum(bound(f"executor-{number}") for number in range(3)) == 300
    simulation.add_lane("executor-3")
    await run_all(300, 100)
    assert bound("executor-3") >= 15
    lanes[0].lane.drain("scaled down")
    assert await lanes[0].ended() is None
    before = [bound(f"executor-{number}") for number in (1, 2, 3)]
    await run_all(400, 90)
    after = [bound(f"executor-{number}") for number in (1, 2, 3)]
    assert sum(after) - sum(before) == 90
    assert all(now - then >= 20 for now, then in zip(after, before, strict=True))


async def test_padding_is_counted_for_each_bucket(simulate: Simulate) -> None:
    simulation = simulate(async_scheduling=False)
    simulation.add_lane(prefill_buckets=(8, 16), max_num_seqs=4)
    await run(simulation, 0, [20] * 19, max_tokens=3)  # chunks of 16 and of 3, then two decode steps of one row
    shown = read(simulation)
    tokens, rows = "vllm_neuron:num_batched_tokens_padding", "vllm_neuron:num_seqs_padding"
    assert shown.of(f"{tokens}_count", bucket_name="prefill_s16") == 1
    assert shown.of(f"{tokens}_sum", bucket_name="prefill_s16") == 0
    assert shown.of(f"{tokens}_sum", bucket_name="prefill_s8") == 5
    assert shown.of(f"{tokens}_bucket", bucket_name="prefill_s8", le="32.0") == 1
    assert shown.of(f"{rows}_count", bucket_name="decode_b4") == 2
    assert shown.of(f"{rows}_sum", bucket_name="decode_b4") == 6
    assert shown.of(f"{rows}_bucket", bucket_name="decode_b4", le="2.0") == 0
    assert shown.of(f"{rows}_bucket", bucket_name="decode_b4", le="4.0") == 2
    assert shown.of("vllm:iteration_tokens_total_count") == 4
    assert shown.of("vllm:iteration_tokens_total_sum") == 16 + 3 + 1 + 1


async def test_what_holds_the_head_back_is_counted_by_its_check(simulate: Simulate) -> None:
    simulation = simulate(async_scheduling=False, max_decode_stall_ms=None)
    lane = simulation.add_lane(is_stepped=True, max_num_seqs=2, prefill_buckets=(8,))
    for handle in range(3):
        simulation.submit(handle, build_spec(f"r{handle}", [20 + handle] * 12, max_tokens=3))
    await settle()
    assert read(simulation).of("holdback:lane_state", state="ACTIVE_PREFILL") == 1
    await lane.step()  # the second chunk of the first request comes, the second request has to wait for it
    assert read(simulation).of("holdback:held_back_steps_total", reason="prefill") == 1
    for _ in range(3):
        await lane.step()
    shown = read(simulation)
    # the second chunk of the second request, and a decode step
    assert shown.of("holdback:held_back_steps_total", reason="slots") == 2
    assert shown.of("holdback:lane_state", state="ACTIVE_DECODE") == 1
    assert shown.of("holdback:lane_state") == 1
    assert {dict(labels)["reason"] for name, labels in shown.samples if name == "holdback:held_back_steps_total"} == {
        check.value for check in Check
    }


@pytest.mark.parametrize(
    ("kv_admission", "peak"),
    # 16 usable blocks of 4; 3 tokens of prompt, 7 outputs: the last is never computed, so 9 tokens, 3 blocks
    [("max_model_len", 8), ("reserved", 3), ("phased", 3)],
)
async def test_the_admission_peak_is_the_worst_case_of_the_rule(
    simulate: Simulate, kv_admission: str, peak: int
) -> None:
    simulation = simulate(kv_admission=kv_admission, async_scheduling=False)
    lane = simulation.add_lane(is_stepped=True, num_blocks=17, max_model_len=32)
    simulation.submit(0, build_spec("r0", [20, 21, 22], max_tokens=7))
    await settle()
    await lane.step()
    shown = read(simulation)
    assert shown.of("holdback:lane_admission_peak_blocks") == peak
    assert shown.of("holdback:lane_usable_blocks") == 16
    assert shown.of("holdback:lane_kv_cache_usage") == 1 / 16


async def test_the_decode_stall_is_shown_beside_its_bound(simulate: Simulate) -> None:
    simulation = simulate(async_scheduling=False, max_decode_stall_ms=0.25)
    lane = simulation.add_lane(is_stepped=True, prefill_buckets=(8,), prefill_us=100)
    simulation.submit(0, build_spec("decodes", [20], max_tokens=20))
    await settle()
    await lane.step()
    simulation.submit(1, build_spec("prefills", [21] * 40, max_tokens=2))
    for _ in range(8):
        await lane.step()
    shown = read(simulation)
    assert shown.of("holdback:decode_stall_bound_seconds") == 0.00025
    assert shown.of("holdback:lane_decode_stall_max_seconds") == pytest.approx(0.0002)
    assert read(simulate(max_decode_stall_ms=None)).of("holdback:decode_stall_bound_seconds") == math.inf


@pytest.mark.case("B69")
@pytest.mark.loopback
async def test_what_autoscalers_read_is_there_before_the_first_executor(serve: Serve) -> None:
    server = await serve(metrics_port=0, served_model_name="small")
    assert server.metrics_port is not None
    shown = await asyncio.to_thread(scrape, server.metrics_port)
    for name in (
        *("holdback:queued_prefill_tokens", "holdback:kv_cache_usage_executors", "holdback:num_executors"),
        *("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"),
    ):
        assert shown.of(name, model_name="small") == 0


async def test_the_model_has_no_name_until_an_executor_says_it_or_the_settings_do(simulate: Simulate) -> None:
    simulation = simulate()
    assert read(simulation).has("vllm:num_requests_waiting", model_name="")
    simulation.add_lane()
    assert read(simulation).has("vllm:num_requests_waiting", model_name="tiny")
    named = simulate(served_model_name="served")
    named.add_lane()
    assert read(named).has("vllm:num_requests_waiting", model_name="served")
