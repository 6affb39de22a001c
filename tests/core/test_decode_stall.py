"""How long prefills may hide decodes. A prefill is expected to take 1 µs for each token of its bucket."""

import pytest

from holdback.errors import ConfigError
from holdback.types import Phase, SchedulerState, StepTimings
from scheduler_svc.core.async_scheduling import NeuronAsyncScheduler
from scheduler_svc.core.config import KvAdmission
from scheduler_svc.core.neuron_scheduler import NeuronScheduler
from scheduler_svc.core.stall import DecodeStall
from tests.core.builders import SCHEDULERS, build_config, build_drive, build_request, ids

both_schedulers = pytest.mark.parametrize("scheduler_class", SCHEDULERS)


def build_bounded(bound_us, scheduler_class=NeuronScheduler, **changes):
    """Chunks of 8 tokens, so of 8 µs."""
    bound_ms = None if bound_us is None else bound_us / 1000
    return build_drive(scheduler_class, max_num_batched_tokens=8, max_decode_stall_ms=bound_ms, **changes)


def scheduled(steps):
    return [step.num_scheduled_tokens for step in steps]


# ---- prompts keep coming (B06) ----


def drive_a_decode_under_prompts_that_keep_coming(scheduler_class, bound_ms, num_steps):
    """A has 50 tokens to give; before every step one more prompt of 16 tokens arrives. Returns the step of A's end."""
    drive = build_drive(
        scheduler_class, max_num_seqs=8, num_blocks=129, max_num_batched_tokens=16, num_batched_tokens_buckets=(16,),
        kv_admission=KvAdmission.PHASED, max_decode_stall_ms=bound_ms, enable_prefix_caching=False,
    )  # fmt: skip
    drive.add("A", prompt=5, max_tokens=50)
    for number in range(num_steps):
        drive.step()
        if "A" in drive.finished:
            return drive, number
        drive.add(f"r{number}", prompt=16, max_tokens=1)
    return drive, None


@pytest.mark.case("B06")
@pytest.mark.parametrize(("scheduler_class", "num_late"), [(NeuronScheduler, 0), (NeuronAsyncScheduler, 1)])
def test_a_decode_goes_on_under_prompts_that_keep_coming(scheduler_class, num_late):
    drive, last_step = drive_a_decode_under_prompts_that_keep_coming(scheduler_class, 0.1, 1000)
    # Six prefills of 16 µs fit in 100 µs. A's own prefill counts as the first one of the first six.
    assert last_step == 49 * 7 - 1 + num_late
    assert len(drive.outputs["A"]) == 50
    assert drive.scheduler.max_stall_us == 96


@pytest.mark.case("B06")
@both_schedulers
def test_without_a_bound_prompts_that_keep_coming_come_first_and_the_wait_is_told(scheduler_class):
    drive, last_step = drive_a_decode_under_prompts_that_keep_coming(scheduler_class, None, 1000)
    assert last_step is None
    assert drive.outputs["A"] == [50]
    while drive.in_flight:
        drive.update()
    assert drive.scheduler.max_stall_us == 999 * 16


# ---- between the chunks of one prompt ----


@both_schedulers
@pytest.mark.parametrize("kv_admission", KvAdmission)
def test_a_decode_step_comes_between_two_chunks_when_the_next_would_pass_the_bound(scheduler_class, kv_admission):
    drive = build_bounded(20, scheduler_class, kv_admission=kv_admission)
    drive.add("a", [1], max_tokens=30)
    drive.run(2)
    drive.add("long", prompt=40, max_tokens=4)
    assert scheduled(drive.run(8)) == [
        {"long": 8}, {"long": 8}, {"a": 1}, {"long": 8}, {"long": 8}, {"a": 1}, {"long": 8}, {"long": 1, "a": 1},
    ]  # fmt: skip
    drive.run_until_idle()
    assert (len(drive.outputs["a"]), len(drive.outputs["long"])) == (30, 4)
    assert drive.scheduler.max_stall_us == 16


def test_in_that_step_the_prefill_is_the_hidden_one_and_stays_in_front():
    drive = build_bounded(8)
    drive.add("a", [1])
    drive.run(2)
    drive.add("long", prompt=16)
    seen = []
    for _ in range(3):
        step = drive.step()
        seen.append((step.num_scheduled_tokens, step.phase, drive.scheduler.state, ids(drive.scheduler.running)))
    assert seen == [
        ({"long": 8}, Phase.PREFILL, SchedulerState.ACTIVE_PREFILL, ["long", "a"]),
        ({"a": 1}, Phase.DECODE, SchedulerState.ACTIVE_DECODE, ["long", "a"]),
        ({"long": 8}, Phase.PREFILL, SchedulerState.ACTIVE_PREFILL, ["long", "a"]),
    ]


@both_schedulers
def test_a_chunk_that_passes_the_bound_alone_is_followed_by_one_decode_step(scheduler_class):
    drive = build_bounded(0, scheduler_class)
    drive.add("a", [1])
    drive.step()
    drive.add("long", prompt=20)
    assert [[*step] for step in scheduled(drive.run(7))] == [
        ["a"], ["long"], ["a"], ["long"], ["a"], ["long"], ["long", "a"],
    ]  # fmt: skip


def test_without_a_row_to_decode_chunks_follow_each_other():
    drive = build_bounded(8, NeuronAsyncScheduler)
    drive.add("long", prompt=24)
    assert scheduled(drive.run(3)) == [{"long": 8}] * 3
    drive = build_bounded(8, NeuronAsyncScheduler)
    drive.add("last", [1], max_tokens=1)
    drive.add("long", prompt=24)
    # The one token of the first request is on its way; there is nothing to decode.
    assert scheduled(drive.run(4)) == [{"last": 1}, {"long": 8}, {"long": 8}, {"long": 8}]
    assert drive.scheduler.max_stall_us == 0


def test_without_a_bound_decodes_wait_for_the_whole_prompt():
    drive = build_bounded(None)
    drive.add("a", [1])
    drive.run(2)
    drive.add("long", prompt=40)
    assert scheduled(drive.run(5)) == [{"long": 8}] * 5
    assert drive.scheduler.max_stall_us == 40


# ---- before a new prompt ----


@both_schedulers
def test_a_decode_step_comes_before_a_new_prompt_whose_first_chunk_would_pass_the_bound(scheduler_class):
    drive = build_bounded(20, scheduler_class)
    drive.add("a", [1], max_tokens=20)
    drive.step()
    for req_id, prompt in (("b", [2]), ("c", [3]), ("d", [4])):
        drive.add(req_id, prompt, max_tokens=20)
    assert scheduled(drive.run(1)) == [{"b": 1}]
    assert drive.scheduler.why_not(drive.scheduler.waiting.peek()) == (
        "a decode step comes first, prefills have taken 16 us; max_decode_stall_ms is 0.02"
    )
    assert scheduled(drive.run(4)) == [{"b": 1, "a": 1}, {"c": 1}, {"d": 1}, {"d": 1, "c": 1, "b": 1, "a": 1}]


def test_a_hit_makes_the_first_chunk_of_a_new_prompt_as_short_as_it_is():
    drive = build_drive(
        max_num_batched_tokens=32, num_batched_tokens_buckets=(8, 16, 32), max_decode_stall_ms=0.04, num_blocks=65
    )
    drive.add("a", prompt=25, max_tokens=20)
    drive.step()
    # A prompt of 32 µs would make it 64. Of the 25 tokens 24 are there; the last one takes 8 µs.
    assert drive.scheduler.why_not(build_request("other", [1] * 25)) is not None
    drive.add("same", prompt=25)
    assert scheduled(drive.run(1)) == [{"same": 1}]


# ---- what was measured ----


def test_what_was_measured_replaces_what_was_expected():
    drive = build_bounded(20)
    drive.add("a", [1], max_tokens=30)
    drive.run(2)
    drive.add("long", prompt=40)
    sizes = []
    for device_us in (2, 2, 2, 9, 1, 1):
        sizes.append(drive.schedule().num_scheduled_tokens)
        drive.update(timings=StepTimings(device_us=device_us))
    # 2 + 2 + 2 + 8 fit in 20; then 15 are there and 8 more do not.
    assert sizes == [{"long": 8}, {"long": 8}, {"long": 8}, {"long": 8}, {"a": 1}, {"long": 8}]
    assert drive.scheduler.max_stall_us == 15


def test_a_late_measurement_belongs_to_the_wait_that_it_is_part_of():
    drive = build_bounded(8, NeuronAsyncScheduler)
    drive.add("a", [1], max_tokens=30)
    drive.run(2)
    while drive.in_flight:
        drive.update()
    drive.add("long", prompt=24)
    assert drive.schedule().num_scheduled_tokens == {"long": 8}
    assert drive.schedule().num_scheduled_tokens == {"a": 1}
    drive.update(timings=StepTimings(device_us=500))
    assert drive.scheduler.max_stall_us == 500
    assert drive.schedule().num_scheduled_tokens == {"long": 8}


def test_only_what_hides_somebody_who_could_decode_is_a_wait():
    stall = DecodeStall(max_us=None)
    stall.add_prefill_step(0, 10, hides_decode=False)
    stall.add_prefill_step(1, 10, hides_decode=True)
    stall.measure(0, 30)
    stall.measure(1, 20)
    assert (stall.stall_us, stall.max_stall_us) == (50, 20)
    stall.add_decode_step()
    assert (stall.stall_us, stall.max_stall_us) == (0, 20)


# ---- configuration ----


def test_a_bound_needs_latencies():
    with pytest.raises(ConfigError, match="max_decode_stall_ms is 1000; allowed without latencies: null"):
        NeuronScheduler(build_config(max_decode_stall_ms=1000))


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_a_bound_that_is_none_is_refused(value):
    with pytest.raises(ConfigError, match=f"max_decode_stall_ms is {value}; allowed: at least 0, or null"):
        build_config(max_decode_stall_ms=value)


def test_after_a_lost_lane_the_wait_is_counted_anew():
    drive = build_bounded(20)
    drive.add("a", [1])
    drive.step()
    (moved,) = drive.lose_lane()
    drive.scheduler.add_request(moved)
    assert scheduled(drive.run(2)) == [{"a": 2}, {"a": 1}]
