"""The base scheduler: blocks, prefix hits, chunks, and the life of a request."""

import dataclasses

import pytest

from holdback.errors import AlreadyExistsError, ErrorReason, InternalError, InvalidArgumentError
from holdback.types import FinishReason, ModelRunnerOutput, Phase, TokenLogprobs, Usage
from scheduler_svc.core.scheduler import Scheduler
from tests.core.builders import EOS, build_config, build_drive, build_request, ids, num_computed_tokens


def test_blocks_are_taken_chunk_by_chunk_and_then_one_for_every_four_tokens():
    drive = build_drive(max_num_batched_tokens=8, num_batched_tokens_buckets=(8,))
    drive.add(prompt=10, max_tokens=8)
    first, second, *decodes = drive.run_until_idle()
    assert first.scheduled_new_reqs[0].block_ids == [1, 2]
    assert second.scheduled_cached_reqs.new_block_ids == [[3]]
    # 10 prompt tokens fill 2 of the third block; tokens 12 and 16 start a new one.
    assert [step.scheduled_cached_reqs.new_block_ids for step in decodes] == [
        [None], [None], [[4]], [None], [None], [None], [[5]],
    ]  # fmt: skip
    assert [num_computed_tokens(step)["r"] for step in decodes] == [10, 11, 12, 13, 14, 15, 16]


def test_an_executor_is_told_a_request_in_full_once():
    drive = build_drive(max_num_batched_tokens=8, num_batched_tokens_buckets=(8,))
    request = drive.add(prompt=10, max_tokens=2)
    first, second, third = drive.run(3)
    new = first.scheduled_new_reqs[0]
    assert (new.req_id, new.spec, new.slot, new.num_computed_tokens) == ("r", request.spec, 0, 0)
    assert second.scheduled_new_reqs == third.scheduled_new_reqs == []
    assert second.scheduled_cached_reqs.req_ids == third.scheduled_cached_reqs.req_ids == ["r"]


def test_slots_are_unique_and_come_back():
    drive = build_drive(max_num_seqs=2)
    for req_id in "abc":
        drive.add(req_id, max_tokens=2)
    steps = drive.run_until_idle()
    slots = {new.req_id: new.slot for step in steps for new in step.scheduled_new_reqs}
    assert slots["a"] != slots["b"]
    assert slots["c"] in (0, 1)


def test_steps_are_numbered_without_gaps_among_those_that_must_be_sent():
    drive = build_drive()
    assert [drive.step().step for _ in range(2)] == [0, 0]
    drive.add(max_tokens=2)
    assert [drive.step().step for _ in range(2)] == [0, 1]
    tells_the_end = drive.step()
    assert (tells_the_end.step, tells_the_end.finished_req_ids) == (2, ["r"])
    # A request that never ran is nothing to send.
    drive.add("never-ran")
    drive.scheduler.finish_request("never-ran", FinishReason.ABORT)
    assert (drive.step().step, drive.step().step) == (3, 3)


def test_an_id_is_in_use_while_it_waits_or_runs():
    drive = build_drive()
    drive.add("a")
    with pytest.raises(AlreadyExistsError, match="req_id is 'a'"):
        drive.add("a")
    drive.step()
    with pytest.raises(AlreadyExistsError, match="req_id is 'a'"):
        drive.add("a")
    drive.run_until_idle()
    drive.add("a")


@pytest.mark.case("B10")
@pytest.mark.parametrize("prompt", [0, 64, 65])
def test_a_prompt_that_can_never_be_scheduled_is_not_queued(prompt):
    drive = build_drive()
    with pytest.raises(InvalidArgumentError, match=rf"{prompt} tokens.*allowed: \[1, 64\)"):
        drive.add(prompt=prompt)
    assert not drive.scheduler.waiting


@pytest.mark.case("B10")
@pytest.mark.parametrize(("num_prompt", "max_tokens", "num_outputs"), [(255, 4096, 1), (250, 100, 6), (250, 5, 5)])
def test_output_ends_where_max_model_len_does(num_prompt, max_tokens, num_outputs):
    drive = build_drive(max_model_len=256, block_size=16, num_blocks=17)
    drive.add(prompt=num_prompt, max_tokens=max_tokens)
    drive.run_until_idle()
    assert len(drive.outputs["r"]) == num_outputs
    assert drive.finished == {"r": FinishReason.LENGTH}


@pytest.mark.case("B47")
@pytest.mark.parametrize("max_tokens", [1, 5, 20])
def test_usage_counts_exactly_what_was_asked_for(max_tokens):
    drive = build_drive()
    request = drive.add(prompt=7, max_tokens=max_tokens, ignore_eos=True)
    drive.run_until_idle()
    assert drive.outputs["r"] == [50 + i for i in range(max_tokens)]
    assert drive.finished == {"r": FinishReason.LENGTH}
    assert request.usage() == Usage(prompt_tokens=7, completion_tokens=max_tokens)
    assert request.usage().total_tokens == 7 + max_tokens


def test_eos_ends_a_request_and_is_its_last_output():
    drive = build_drive(planned={("r", 2): EOS})
    drive.add(max_tokens=8)
    drive.run_until_idle()
    assert drive.outputs == {"r": [50, 51, EOS]}
    assert drive.finished == {"r": FinishReason.STOP}


def test_a_stop_id_is_named_in_the_update():
    drive = build_drive(planned={("r", 1): 9})
    drive.add(max_tokens=8, stop_token_ids=(9,))
    drive.step()
    drive.schedule()
    (update,) = drive.update()
    assert (update.output_index, update.new_token_ids) == (1, [9])
    assert (update.finish_reason, update.stop_token_id, update.error) == (FinishReason.STOP, 9, None)


def test_logprobs_come_with_the_token_of_their_row():
    drive = build_drive(planned={("a", 1): 7})
    drive.add("a", max_tokens=2)
    drive.add("b", max_tokens=2)
    drive.run(2)
    drive.schedule()
    entry = TokenLogprobs(7, -0.5)
    by_id = {update.req_id: update for update in drive.update(logprobs=[None, entry])}
    assert by_id["a"].logprobs == [entry]
    assert by_id["b"].logprobs is None


# ---- results that do not fit ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 1}, "result of step 1 for step 0; expected step 0"),
        ({"sampled_token_ids": []}, "step 0 has 0 tokens for 1 rows that sample"),
        ({"sampled_token_ids": [1, 2]}, "step 0 has 2 tokens for 1"),
        ({"logprobs": [None, None]}, "and 2 log-probabilities"),
        ({"failed_rows": [1]}, r"failed_rows of step 0 is \[1\]; allowed: \[0, 1\)"),
        ({"failed_rows": [-1]}, r"failed_rows of step 0 is \[-1\]"),
    ],
)
def test_a_result_that_does_not_fit_is_refused_and_changes_nothing(changes, message):
    drive = build_drive()
    request = drive.add()
    output = drive.schedule()
    good = ModelRunnerOutput(step=0, sampled_token_ids=[50])
    with pytest.raises(InternalError, match=message):
        drive.scheduler.update_from_output(output, dataclasses.replace(good, **changes))
    assert request.output_token_ids == []
    assert drive.scheduler.num_steps_in_flight == 1
    assert len(drive.scheduler.update_from_output(output, good)) == 1


def test_a_result_without_a_step_in_flight_is_refused():
    drive = build_drive()
    drive.add()
    output = drive.step()
    with pytest.raises(InternalError, match="result of step 0 with no step in flight"):
        drive.scheduler.update_from_output(output, ModelRunnerOutput(0, [50]))


def test_a_synchronous_scheduler_waits_for_the_result_of_its_step():
    drive = build_drive()
    drive.add()
    drive.schedule()
    with pytest.raises(RuntimeError, match="with 1 in flight; allowed: 0"):
        drive.scheduler.schedule()


def test_an_empty_step_brings_nothing():
    drive = build_drive()
    output = drive.scheduler.schedule()
    assert output.phase is None
    assert list(drive.scheduler.update_from_output(output, ModelRunnerOutput(0))) == []


# ---- numbers that are not finite ----


def test_a_request_whose_numbers_fail_ends_and_the_step_goes_on():
    drive = build_drive()
    for req_id in "ab":
        drive.add(req_id, max_tokens=4)
    drive.run(2)
    output = drive.schedule()
    assert list(output.num_scheduled_tokens) == ["b", "a"]
    failed, good = drive.update(failed_rows=[0], sampled_token_ids=[0, 51], logprobs=[TokenLogprobs(0, 0.0), None])
    assert (failed.req_id, failed.output_index, failed.new_token_ids) == ("b", 1, [])
    assert (failed.finish_reason, failed.error) == (FinishReason.ERROR, ErrorReason.NUMERIC_ERROR)
    assert failed.logprobs is None
    assert (good.req_id, good.new_token_ids) == ("a", [51])
    assert drive.step().finished_req_ids == ["b"]
    drive.run_until_idle()
    assert drive.outputs["a"] == [50, 51, 52, 53]
    assert drive.scheduler.num_free_blocks == 64


def test_blocks_of_a_failed_request_are_not_offered_again():
    drive = build_drive()
    drive.add("bad", prompt=9, max_tokens=4)
    drive.schedule()
    drive.update(failed_rows=[0])
    drive.add("next", prompt=9, max_tokens=1)
    assert drive.step().scheduled_new_reqs[0].num_computed_tokens == 0


def test_who_hit_a_block_of_a_failed_request_starts_again_and_others_go_on():
    drive = build_drive(num_blocks=81)
    drive.add("writer", prompt=9, max_tokens=8)
    drive.add("reader", prompt=13, max_tokens=8)
    drive.add("other", [1, 2, 3], max_tokens=8)
    drive.add("reader-of-reader", prompt=17, max_tokens=8)
    drive.run(4)
    assert ids(drive.scheduler.running) == ["reader-of-reader", "other", "reader", "writer"]
    drive.step()
    drive.schedule()
    updates = drive.update(failed_rows=[3])
    assert [(update.req_id, update.new_token_ids) for update in updates] == [("writer", []), ("other", [52])]
    assert ids(drive.scheduler.waiting) == ["reader", "reader-of-reader"]
    assert ids(drive.scheduler.running) == ["other"]
    again = drive.step()
    assert sorted(again.finished_req_ids) == ["reader", "reader-of-reader", "writer"]
    # 13 prompt tokens and 2 outputs so far, all of them computed again.
    assert (again.scheduled_new_reqs[0].req_id, again.num_scheduled_tokens) == ("reader", {"reader": 15})
    # Its third block is new as well, though the one that it wrote before has the same key.
    then = drive.step().scheduled_new_reqs[0]
    assert (then.req_id, then.num_computed_tokens) == ("reader-of-reader", 12)
    assert then.block_ids[:3] == again.scheduled_new_reqs[0].block_ids[:3]
    drive.run_until_idle()
    expected = [50 + i for i in range(8)]
    assert drive.outputs == {"writer": [50, 51], "reader": expected, "other": expected, "reader-of-reader": expected}


def test_a_request_that_starts_again_can_be_aborted_while_it_waits():
    drive = build_drive()
    drive.add("writer", prompt=9)
    drive.add("reader", prompt=13)
    drive.run(2)
    drive.schedule()
    drive.update(failed_rows=[1])
    assert drive.scheduler.finish_request("reader", FinishReason.ABORT) is not None
    assert sorted(drive.step().finished_req_ids) == ["reader", "writer"]


# ---- the lane is lost ----


def test_a_lost_lane_gives_back_every_request_and_keeps_nothing():
    drive = build_drive(num_blocks=81)
    for number, req_id in enumerate("abc"):
        drive.add(req_id, prompt=[number, 1, 2, 3, 4], max_tokens=8)
    drive.add("gone", prompt=[9], max_tokens=8)
    drive.run(4)
    drive.schedule()
    scheduler = drive.scheduler
    scheduler.finish_request("gone", FinishReason.ABORT)
    released = scheduler.release_all()
    assert ids(released) == ["c", "b", "a"]
    assert {request.req_id: request.output_token_ids for request in released} == {
        "a": [50], "b": [50], "c": [50],
    }  # fmt: skip
    scheduler.check_integrity()
    assert (scheduler.running, scheduler.requests, scheduler.num_steps_in_flight) == ([], {}, 0)
    assert scheduler.num_free_blocks == scheduler.num_usable_blocks == 80
    for request in released:
        scheduler.waiting.appendleft(request)
    assert ids(scheduler.waiting) == ["a", "b", "c"]
    output = scheduler.schedule()
    assert (output.step, output.finished_req_ids) == (0, [])
    assert output.num_scheduled_tokens == {"a": 6}
    assert output.scheduled_new_reqs[0].num_computed_tokens == 0


def test_a_request_goes_on_elsewhere_where_it_stood():
    here, there = build_drive(), build_drive()
    here.add("r", prompt=6, max_tokens=8)
    here.run(3)
    (moved,) = here.scheduler.release_all()
    there.scheduler.add_request(moved)
    there.outputs["r"] = here.outputs["r"]
    first, *_ = there.run_until_idle()
    assert first.num_scheduled_tokens == {"r": 9}
    assert first.phase is Phase.PREFILL
    assert there.outputs["r"] == [50 + i for i in range(8)]
    assert moved.usage() == Usage(prompt_tokens=6, completion_tokens=8)


# ---- the base on its own ----


def test_the_base_alone_mixes_prefill_and_decode_within_its_budget():
    scheduler = Scheduler(build_config(max_num_batched_tokens=8, num_batched_tokens_buckets=(8,)))
    scheduler.add_request(build_request("a", prompt=4))
    scheduler.add_request(build_request("b", prompt=20))
    first = scheduler.schedule()
    assert first.num_scheduled_tokens == {"a": 4, "b": 4}
    scheduler.update_from_output(first, ModelRunnerOutput(0, [50]))
    second = scheduler.schedule()
    assert second.num_scheduled_tokens == {"a": 1, "b": 7}
    scheduler.update_from_output(second, ModelRunnerOutput(1, [51]))
    scheduler.running.reverse()
    assert scheduler.schedule().num_scheduled_tokens == {"b": 7, "a": 1}
