"""Faults that other serving systems shipped, by their numbers, where the scheduling core must rule them out."""

import pytest

from holdback.errors import ErrorReason
from holdback.types import FinishReason, SchedulerState, Usage
from tests.core.builders import EOS, SCHEDULERS, AdmitAll, build_drive, force_eviction, ids, num_computed_tokens

both_schedulers = pytest.mark.parametrize("scheduler_class", SCHEDULERS)


@pytest.mark.case("B01")
@pytest.mark.parametrize("is_refused_by", ["kv_admission", "K3"])
@both_schedulers
def test_a_prefill_that_cannot_be_placed_hides_no_decode(scheduler_class, is_refused_by):
    drive = build_drive(
        scheduler_class, block_size=16, num_blocks=10, max_model_len=128, max_num_batched_tokens=128,
        enable_prefix_caching=False,
    )  # fmt: skip
    if is_refused_by == "K3":
        drive.scheduler.admission = AdmitAll()
    drive.add("A", prompt=100, max_tokens=20)
    drive.step()
    drive.add("B", prompt=48, max_tokens=3)
    steps = drive.run_until_idle(max_steps=200)
    decodes = [step for step in steps if step.num_scheduled_tokens == {"A": 1}]
    assert len(decodes) == 19
    assert len(drive.outputs["A"]) == 20
    first_of_b = next(step for step in steps if "B" in step.num_scheduled_tokens)
    assert first_of_b.num_scheduled_tokens == {"B": 48}
    assert steps.index(first_of_b) > steps.index(decodes[-1])
    assert len(drive.outputs["B"]) == 3


@pytest.mark.case("B04")
@both_schedulers
def test_a_prompt_longer_than_a_step_is_prefilled_in_chunks(scheduler_class):
    drive = build_drive(
        scheduler_class, max_model_len=4096, max_num_batched_tokens=1024, block_size=16, num_blocks=257,
        num_batched_tokens_buckets=(128, 256, 512, 1024),
    )  # fmt: skip
    drive.add(prompt=3000, max_tokens=2)
    steps = drive.run(4)
    assert [step.num_scheduled_tokens["r"] for step in steps] == [1024, 1024, 952, 1]
    assert [step.num_scheduled_tokens_padded["r"] for step in steps] == [1024, 1024, 1024, 1]
    assert [num_computed_tokens(step)["r"] for step in steps] == [0, 1024, 2048, 3000]


def drive_a_prefill_beside_a_decode(scheduler_class):
    """B decodes with 4 tokens left, A has 1,300 prompt tokens; two chunks of A are scheduled."""
    drive = build_drive(
        scheduler_class, max_model_len=2048, max_num_batched_tokens=512, block_size=16, num_blocks=513,
        num_batched_tokens_buckets=(128, 256, 512), enable_prefix_caching=False,
    )  # fmt: skip
    drive.add("B", prompt=20, max_tokens=5)
    drive.step()
    free = drive.scheduler.num_free_blocks
    drive.add("A", prompt=1300, max_tokens=4)
    steps = drive.run(2)
    assert [step.num_scheduled_tokens for step in steps] == [{"A": 512}, {"A": 512}]
    return drive, free


@pytest.mark.case("B07")
@both_schedulers
def test_after_the_last_chunk_everybody_decodes(scheduler_class):
    drive, _ = drive_a_prefill_beside_a_decode(scheduler_class)
    assert drive.step().num_scheduled_tokens == {"A": 276}
    assert drive.step().num_scheduled_tokens == {"A": 1, "B": 1}
    assert drive.scheduler.state is SchedulerState.ACTIVE_DECODE


@pytest.mark.case("B07")
@both_schedulers
def test_an_abort_between_chunks_lets_the_decode_go_on_at_once(scheduler_class):
    drive, free = drive_a_prefill_beside_a_decode(scheduler_class)
    drive.scheduler.finish_request("A", FinishReason.ABORT)
    assert drive.scheduler.num_free_blocks == free
    assert drive.step().num_scheduled_tokens == {"B": 1}
    assert drive.scheduler.state is SchedulerState.ACTIVE_DECODE


@pytest.mark.case("B07")
def test_numbers_that_fail_in_a_chunk_let_the_decode_go_on_at_once():
    drive = build_drive(max_num_batched_tokens=8, num_batched_tokens_buckets=(8,))
    drive.add("B", [1, 2])
    drive.step()
    free = drive.scheduler.num_free_blocks
    drive.add("A", prompt=20)
    drive.step()
    drive.schedule()
    (update,) = drive.update(failed_rows=[0])
    assert (update.req_id, update.error) == ("A", ErrorReason.NUMERIC_ERROR)
    assert drive.scheduler.num_free_blocks == free
    assert drive.step().num_scheduled_tokens == {"B": 1}
    assert drive.scheduler.state is SchedulerState.ACTIVE_DECODE


@pytest.mark.case("B09")
@both_schedulers
def test_requests_are_first_scheduled_in_order_of_arrival_also_around_an_abort(scheduler_class):
    drive = build_drive(scheduler_class, max_num_seqs=2)
    for number in range(1, 6):
        drive.add(f"R{number}", prompt=20, max_tokens=3)
    drive.scheduler.finish_request("R3", FinishReason.ABORT)
    steps = drive.run_until_idle()
    assert [new.req_id for step in steps for new in step.scheduled_new_reqs] == ["R1", "R2", "R4", "R5"]
    assert all(len(tokens) == 3 for tokens in drive.outputs.values())


@pytest.mark.case("B09")
@both_schedulers
def test_a_small_request_does_not_overtake_a_head_that_does_not_fit(scheduler_class):
    drive = build_drive(scheduler_class, max_model_len=40, num_blocks=11, max_num_batched_tokens=32)
    drive.add("R0", [1] * 24, max_tokens=3)
    drive.step()
    drive.add("head", [2] * 24, max_tokens=2)
    drive.add("small", [3] * 3, max_tokens=2)
    assert drive.scheduler.num_free_blocks == 4
    seen = []
    while drive.scheduler.running or drive.scheduler.waiting:
        step = drive.step()
        seen += [new.req_id for new in step.scheduled_new_reqs]
        waiting = ids(drive.scheduler.waiting)
        assert waiting == ["head", "small"][len(seen) :]
    assert seen == ["head", "small"]


@pytest.mark.case("B11")
@both_schedulers
@pytest.mark.parametrize("when", ["waiting", "between", "twice", "unknown", "with-eos"])
def test_an_abort_at_any_time_ends_one_request_once(scheduler_class, when):
    drive = build_drive(scheduler_class, planned={("gone", 2): EOS} if when == "with-eos" else {}, max_num_seqs=2)
    scheduler = drive.scheduler
    free = scheduler.num_free_blocks
    drive.add("stays", [1, 2, 3], max_tokens=6)
    drive.add("gone", max_tokens=6)
    if when != "waiting":
        drive.run(3)
        drive.schedule()
    aborted = scheduler.finish_request("nobody" if when == "unknown" else "gone", FinishReason.ABORT)
    assert (aborted is None) == (when == "unknown")
    if when == "twice":
        assert scheduler.finish_request("gone", FinishReason.ABORT) is None
    while drive.in_flight:
        drive.update()
    steps = drive.run_until_idle()
    steps.append(drive.step())
    assert drive.outputs["stays"] == [50 + i for i in range(6)]
    assert drive.finished.get("stays") is FinishReason.LENGTH
    assert ("gone" in drive.finished) == (when == "unknown")
    assert [req_id for step in steps for req_id in step.finished_req_ids].count("gone") == 1
    assert scheduler.num_free_blocks == free
    assert scheduler.finish_request("gone", FinishReason.ABORT) is None


@pytest.mark.case("B18")
@both_schedulers
@pytest.mark.parametrize(("length", "hit", "scheduled"), [(64, 48, 16), (65, 64, 1), (16, 0, 16), (15, 0, 15)])
def test_a_full_hit_leaves_the_last_block_or_token_to_compute(scheduler_class, length, hit, scheduled):
    drive = build_drive(
        scheduler_class, block_size=16, num_blocks=65, max_model_len=256, max_num_batched_tokens=128,
        num_batched_tokens_buckets=(128,),
    )  # fmt: skip
    drive.add("first", prompt=length, max_tokens=5)
    drive.run_until_idle()
    request = drive.add("second", prompt=length, max_tokens=5)
    step = drive.step()
    assert num_computed_tokens(step) == {"second": hit}
    assert step.num_scheduled_tokens == {"second": scheduled}
    assert step.num_scheduled_tokens_padded == {"second": 128}
    drive.run_until_idle()
    assert drive.outputs["second"] == drive.outputs["first"]
    assert request.usage() == Usage(prompt_tokens=length, completion_tokens=5, cached_tokens=hit)


@pytest.mark.case("B21")
@pytest.mark.parametrize(("evicted", "hit"), [([0], 0), ([2], 32), ([1], 16), ([], 48), ([0, 1, 2], 0)])
def test_a_hit_ends_at_the_first_block_that_is_gone(evicted, hit):
    drive = build_drive(block_size=16, num_blocks=65, max_model_len=256, max_num_batched_tokens=128)
    first = drive.add("first", prompt=49, max_tokens=1)
    drive.run_until_idle()
    for index in evicted:
        force_eviction(drive.scheduler, first, index)
    drive.add("second", prompt=49, max_tokens=1)
    step = drive.step()
    assert num_computed_tokens(step) == {"second": hit}
    assert step.num_scheduled_tokens == {"second": 49 - hit}


@pytest.mark.case("B23")
def test_requests_share_blocks_within_one_salt_only():
    drive = build_drive(num_blocks=81)
    for req_id, salt in (("one", "a"), ("other", "b"), ("plain", ""), ("same", "a")):
        drive.add(req_id, prompt=9, max_tokens=1, salt=salt)
    hits: dict[str, int] = {}
    for step in drive.run_until_idle():
        hits |= num_computed_tokens(step)
    assert hits == {"one": 0, "other": 0, "plain": 0, "same": 8}


@pytest.mark.case("B24")
def test_chunks_of_one_request_are_not_counted_as_hits():
    drive = build_drive(block_size=16, num_blocks=257, max_model_len=2048, max_num_batched_tokens=256)
    drive.add("first", prompt=1024, max_tokens=1)
    drive.run_until_idle()
    assert drive.scheduler.prefix_cache_stats == (1024, 0)
    second = drive.add("second", prompt=1024, max_tokens=1)
    assert drive.scheduler.num_hit_tokens(second) == 1008
    drive.run_until_idle()
    assert drive.scheduler.prefix_cache_stats == (2048, 1008)
    assert second.usage().cached_tokens == 1008


@pytest.mark.case("B24")
def test_tokens_that_are_computed_again_after_a_loss_are_not_counted():
    drive = build_drive()
    drive.add("r", prompt=9, max_tokens=8)
    drive.run(4)
    (moved,) = drive.lose_lane()
    assert drive.scheduler.prefix_cache_stats == (9, 0)
    drive.add("same", prompt=9, max_tokens=1)
    drive.run_until_idle()
    drive.scheduler.add_request(moved)
    drive.step()
    assert moved.num_hit_blocks == 2
    assert drive.scheduler.prefix_cache_stats == (18, 0)
    assert moved.usage().cached_tokens == 0


@pytest.mark.case("B24")
def test_a_prompt_that_starts_again_after_a_loss_is_counted_once():
    drive = build_drive(max_num_batched_tokens=8, num_batched_tokens_buckets=(8,))
    drive.add("r", prompt=20)
    drive.run(2)
    (moved,) = drive.lose_lane()
    drive.scheduler.add_request(moved)
    drive.step()
    assert drive.scheduler.prefix_cache_stats == (20, 0)


@pytest.mark.case("B27")
@both_schedulers
def test_every_ending_gives_all_blocks_back(scheduler_class):
    planned = {(f"r{number}", 3): EOS for number in range(0, 50, 4)}
    drive = build_drive(
        scheduler_class, planned, block_size=16, num_blocks=21, max_model_len=80, max_num_batched_tokens=64
    )
    for number in range(50):
        req_id, prompt = f"r{number}", range(1000 * number + 10, 1000 * number + 74)
        drive.add(req_id, prompt, max_tokens=16)
        drive.step()
        assert not drive.scheduler.waiting
        drive.run(2)
        if number % 4 == 1:
            drive.scheduler.finish_request(req_id, FinishReason.ABORT)
        if number % 4 == 2:
            drive.schedule()
            drive.update(failed_rows=[0])
        drive.run_until_idle()
        while drive.in_flight:
            drive.update()
        assert drive.scheduler.num_free_blocks == 20
        drive.scheduler.check_integrity()
    reasons = list(drive.finished.values())
    assert [reasons.count(reason) for reason in FinishReason] == [13, 12, 0, 12]
