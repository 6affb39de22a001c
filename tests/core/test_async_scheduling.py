"""Two steps in flight (K8)."""

import pytest

from holdback.types import FinishReason, SchedulerState
from scheduler_svc.core.async_scheduling import NeuronAsyncScheduler
from scheduler_svc.core.neuron_scheduler import NeuronScheduler
from tests.core.builders import EOS, build_drive, ids, num_computed_tokens


def build_async_drive(planned=None, **changes):
    return build_drive(NeuronAsyncScheduler, planned, **changes)


def test_a_step_is_scheduled_before_the_tokens_of_the_one_before_are_known():
    drive = build_async_drive()
    request = drive.add(prompt=5)
    drive.schedule()
    assert request.num_output_placeholders == 1
    step = drive.schedule()
    assert num_computed_tokens(step) == {"r": 5}
    assert request.num_output_placeholders == 2
    assert request.output_token_ids == []
    drive.update()
    assert (request.output_token_ids, request.num_output_placeholders) == ([50], 1)


def test_a_third_step_is_refused():
    drive = build_async_drive()
    drive.add()
    drive.schedule()
    drive.schedule()
    with pytest.raises(RuntimeError, match="with 2 in flight; allowed: 1"):
        drive.scheduler.schedule()


def test_up_to_its_last_token_a_request_is_scheduled_once_and_keeps_slot_and_blocks_until_then():
    drive = build_async_drive(max_num_seqs=1)
    request = drive.add("r", prompt=4, max_tokens=2)
    drive.add("next", prompt=[1, 2])
    free = drive.scheduler.num_free_blocks
    drive.schedule()
    drive.schedule()
    drive.update()
    # Both outputs are on their way: nothing to schedule, nobody else fits, the state stays.
    assert drive.schedule().num_scheduled_tokens == {}
    assert drive.scheduler.state is SchedulerState.ACTIVE_DECODE
    assert (request.slot, request.num_output_placeholders) == (0, 1)
    assert drive.scheduler.num_free_blocks == free - 2
    drive.update()
    assert drive.finished == {"r": FinishReason.LENGTH}
    assert drive.scheduler.num_free_blocks == free
    step = drive.schedule()
    assert (step.num_scheduled_tokens, step.scheduled_new_reqs[0].slot) == ({"next": 2}, 0)
    assert step.finished_req_ids == ["r"]


def test_the_token_after_an_eos_is_thrown_away_and_its_blocks_are_free_at_once():
    drive = build_async_drive(planned={("r", 1): EOS})
    drive.add(prompt=4)
    drive.schedule()
    drive.schedule()
    drive.update()
    drive.schedule()
    (update,) = drive.update()
    assert (update.new_token_ids, update.finish_reason) == ([EOS], FinishReason.STOP)
    assert drive.scheduler.num_free_blocks == 64
    assert drive.update() == []
    assert drive.outputs == {"r": [50, EOS]}


def test_a_late_row_of_an_id_that_is_in_use_again_is_not_taken_for_the_new_request():
    drive = build_async_drive()
    drive.add("r", prompt=4)
    drive.schedule()
    drive.scheduler.finish_request("r", FinishReason.ABORT)
    drive.add("r", prompt=[1, 2, 3])
    drive.schedule()
    assert drive.update() == []
    (update,) = drive.update()
    assert update.new_token_ids == [50]


@pytest.mark.case("B13")
def test_a_late_result_of_an_aborted_request_changes_nothing():
    prompts = {"R1": [1] * 6, "R2": [2] * 6, "R3": [3] * 6, "R4": [4] * 6}
    sync = build_drive(NeuronScheduler)
    for req_id, prompt in prompts.items():
        sync.add(req_id, prompt, max_tokens=10)
    sync.run_until_idle()

    drive = build_async_drive()
    requests = {req_id: drive.add(req_id, prompt, max_tokens=10) for req_id, prompt in prompts.items()}
    drive.run(6)
    step = drive.schedule()
    assert "R2" in step.num_scheduled_tokens
    blocks = list(requests["R2"].block_ids)
    drive.scheduler.finish_request("R2", FinishReason.ABORT)
    drive.add("R5", [5] * 6, max_tokens=10)
    drive.update()
    assert drive.schedule().scheduled_new_reqs[0].block_ids == list(reversed(blocks))[:2]
    drive.run_until_idle()
    assert {req_id: drive.outputs[req_id] for req_id in ("R1", "R3", "R4")} == {
        req_id: sync.outputs[req_id] for req_id in ("R1", "R3", "R4")
    }
    assert drive.outputs["R5"] == [50 + i for i in range(10)]
    assert min(request.num_output_placeholders for request in requests.values()) >= 0


@pytest.mark.case("B47")
@pytest.mark.parametrize("max_tokens", [1, 5, 20])
def test_usage_counts_exactly_what_was_asked_for(max_tokens):
    drive = build_async_drive()
    request = drive.add(max_tokens=max_tokens, ignore_eos=True)
    drive.run_until_idle()
    assert request.usage().completion_tokens == len(drive.outputs["r"]) == max_tokens


def test_an_output_block_is_offered_with_the_result_that_computed_its_last_token():
    drive = build_async_drive()
    drive.add("r", prompt=4, max_tokens=12)
    drive.run(5)
    # Prompt and outputs 0 to 3 fill two blocks; the step that computes output 3 is the sixth.
    follower = drive.add("probe", [100, 101, 102, 103, 50, 51, 52, 53, 1], max_tokens=1)
    drive.scheduler.finish_request("probe", FinishReason.ABORT)
    assert drive.scheduler.num_hit_tokens(follower) == 4
    drive.schedule()
    assert drive.scheduler.num_hit_tokens(follower) == 4
    drive.update()
    assert drive.scheduler.num_hit_tokens(follower) == 8


def test_numbers_that_fail_throw_away_the_later_step_too():
    drive = build_async_drive()
    drive.add("bad", prompt=9, max_tokens=8)
    drive.run(2)
    drive.add("reader", prompt=13, max_tokens=4)
    drive.schedule()
    assert ids(drive.scheduler.running) == ["reader", "bad"]
    updates = drive.update(failed_rows=[0])
    assert [update.req_id for update in updates] == ["bad"]
    assert ids(drive.scheduler.waiting) == ["reader"]
    drive.run_until_idle()
    assert drive.outputs == {"bad": [50], "reader": [50, 51, 52, 53]}


def test_with_equal_steps_async_brings_the_tokens_of_sync():
    outputs = []
    for scheduler_class in (NeuronScheduler, NeuronAsyncScheduler):
        drive = build_drive(scheduler_class, {("r1", 4): EOS, ("r2", 0): EOS}, num_blocks=81)
        for number in range(6):
            drive.add(f"r{number}", prompt=3 + 5 * number, max_tokens=3 + 2 * number)
        drive.run_until_idle()
        outputs.append(drive.outputs)
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 6
