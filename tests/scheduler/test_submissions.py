"""What is refused, what an abort, a deadline or a newer generation does, and that nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdback.errors import UnavailableError
from holdback.types import FinishReason, RequestSpec
from scheduler_svc import state
from scheduler_svc.requests import Resubmission, Session, request_id_of
from tests.scheduler.parts import Simulation, answer_of, build_spec, prompt_of, settle

Simulate = Callable[..., Simulation]


# ---- aborts, identity ----


@pytest.mark.case("B11")
async def test_an_abort_ends_a_request_once_wherever_it_is(simulate: Simulate) -> None:
    simulation = simulate()
    lane = simulation.add_lane(is_stepped=True, max_num_seqs=2)
    for handle, name in enumerate(("running", "other", "waiting")):
        simulation.submit(handle, build_spec(name, prompt_of(handle), max_tokens=4))
    await settle()
    await lane.step()
    abort = simulation.dispatcher.abort
    abort(simulation.session, "waiting", 0)
    abort(simulation.session, "waiting", 0)
    abort(simulation.session, "nobody", 0)
    abort(simulation.session, "running", 0)  # between its step and the result
    abort(simulation.session, "running", 0)
    while lane.unanswered:
        await lane.step()
    answers = simulation.read()
    assert [answers[handle].finish_reason for handle in range(3)] == ["abort", "length", "abort"]
    assert answers[1].tokens == answer_of(prompt_of(1), 4)
    assert len(answers[0].tokens) == 1
    assert lane.lane.core.num_free_blocks == 64
    lane.lane.core.check_integrity()


@pytest.mark.case("B11")
async def test_an_abort_that_crosses_the_last_token_changes_nothing(simulate: Simulate) -> None:
    simulation = simulate()
    lane = simulation.add_lane(is_stepped=True)
    simulation.submit(0, build_spec(stop=answer_of([20, 21, 22], 1)))
    await settle()
    await lane.step()
    simulation.dispatcher.abort(simulation.session, "r", 0)
    answer = simulation.read()[0]
    assert answer.finish_reason == "stop"
    assert answer.ended is not None
    assert answer.ended.stop_token_id == 79
    assert simulation.dispatcher.num_finished == {FinishReason.STOP: 1}


@pytest.mark.case("B11")
async def test_slot_and_blocks_of_an_aborted_request_are_free_with_the_next_schedule(simulate: Simulate) -> None:
    simulation = simulate(async_scheduling=False)
    lane = simulation.add_lane(is_stepped=True, max_num_seqs=1)
    simulation.submit(0, build_spec("gone", prompt_of(0)))
    simulation.submit(1, build_spec("next", prompt_of(1), max_tokens=1))
    await settle()
    simulation.dispatcher.abort(simulation.session, "gone", 0)
    await lane.step()
    assert [request_id_of(req_id) for req_id in lane.sent[1].num_scheduled_tokens] == ["next"]
    assert [request_id_of(req_id) for req_id in lane.sent[1].finished_req_ids] == ["gone"]


@pytest.mark.case("B17")
async def test_an_id_that_is_alive_is_refused_on_the_new_handle_only(simulate: Simulate) -> None:
    simulation = simulate()
    simulation.add_lane()
    simulation.submit(0, build_spec("job-7", prompt_of(0), max_tokens=20))
    simulation.submit(1, build_spec("job-7", prompt_of(1), max_tokens=20))
    await simulation.until_ended(0)
    assert simulation.answers[1].error_reason == "REQUEST_ID_IN_USE"
    assert simulation.answers[1].tokens == []
    assert simulation.answers[0].tokens == answer_of(prompt_of(0), 20)
    simulation.submit(2, build_spec("job-7", prompt_of(2), max_tokens=2))
    await simulation.until_ended(2)
    assert simulation.answers[2].tokens == answer_of(prompt_of(2), 2)


async def test_a_higher_generation_replaces_and_an_old_abort_does_not_hit_it(simulate: Simulate) -> None:
    simulation = simulate()
    lane = simulation.add_lane(is_stepped=True)
    simulation.submit(0, build_spec("r", generation=1))
    await settle()
    simulation.submit(1, build_spec("r", generation=2))
    simulation.submit(2, build_spec("r", generation=1))
    simulation.dispatcher.abort(simulation.session, "r", 1)
    while lane.unanswered:
        await lane.step()
    answers = simulation.read()
    assert (answers[0].finish_reason, answers[0].error_reason) == ("abort", "REPLACED_BY_NEWER_GENERATION")
    assert answers[1].finish_reason == "length"
    assert answers[2].error_reason == "REQUEST_ID_IN_USE"


async def test_a_handle_used_twice_names_nothing_and_ends(simulate: Simulate) -> None:
    simulation = simulate()
    lane = simulation.add_lane(is_stepped=True)
    simulation.submit(0, build_spec("a"))
    simulation.submit(1, build_spec("b"))
    await settle()
    simulation.dispatcher.submit(simulation.session, 0, build_spec("c"))
    ended = simulation.read()[0].ended
    assert ended is not None
    assert (ended.error.field, ended.error.value) == ("handle", "0")
    while lane.unanswered:
        await lane.step()
    assert simulation.read()[1].finish_reason == "length"
    assert not simulation.session.by_handle


async def test_sessions_do_not_share_ids(simulate: Simulate) -> None:
    simulation = simulate()
    simulation.add_lane()
    other = Session("other gateway")
    simulation.submit(0, build_spec("same"))
    simulation.dispatcher.submit(other, 0, build_spec("same"))
    simulation.dispatcher.abort(other, "same", 0)
    await simulation.until_ended(0)
    assert simulation.answers[0].finish_reason == "length"


@pytest.mark.case("B67")
async def test_after_a_mass_cancel_the_load_is_zero(simulate: Simulate) -> None:
    simulation = simulate()
    simulation.add_lane(is_stepped=True, max_num_seqs=16, num_blocks=257)
    for handle in range(20):
        simulation.submit(handle, build_spec(f"r{handle}", prompt_of(handle), max_tokens=50))
    await settle()
    assert state.load(simulation.pool, simulation.dispatcher).kv_usage > 0
    simulation.dispatcher.end_session(simulation.session)
    load = state.load(simulation.pool, simulation.dispatcher)
    assert (load.num_running, load.num_waiting, load.num_waiting_tokens, load.kv_usage) == (0, 0, 0, 0)
    assert [(count.finish_reason, count.count) for count in load.finished] == [(3, 20)]  # FINISH_REASON_ABORT


# ---- what is refused ----


@pytest.mark.parametrize(
    ("spec", "reason", "field"),
    [
        (build_spec(prompt=[]), "PROMPT_EMPTY", "prompt_token_ids"),
        (build_spec(prompt=[20] * 64), "PROMPT_TOO_LONG", "prompt_token_ids"),
        (build_spec(prompt=[20, 128]), "TOKEN_OUT_OF_VOCABULARY", "prompt_token_ids[1]"),
        (build_spec(max_tokens=0), "INVALID_FIELD", "sampling.max_tokens"),
        (build_spec(request_id=""), "INVALID_FIELD", "spec.request_id"),
        (build_spec(request_id="x" * 257), "INVALID_FIELD", "spec.request_id"),
        (build_spec(deadline_ms=0), "INVALID_FIELD", "spec.deadline_ms"),
        (build_spec(queued_ms=2**60), "INVALID_FIELD", "spec.queued_ms"),
    ],
)
@pytest.mark.parametrize("model_is_known", [True, False])
async def test_a_bad_request_is_refused_and_others_are_served(
    simulate: Simulate, spec: RequestSpec, reason: str, field: str, model_is_known: bool
) -> None:
    simulation = simulate()
    if model_is_known:
        simulation.add_lane()
    simulation.submit(0, build_spec("good"))
    simulation.submit(1, spec)
    if not model_is_known:
        simulation.add_lane()
    await simulation.until_ended(0)
    answer = simulation.read()[1]
    assert answer.ended is not None
    assert answer.error_reason == reason
    assert answer.ended.error.field == field
    assert answer.ended.error.limit
    assert answer.ended.error.code == 3  # INVALID_ARGUMENT
    assert simulation.answers[0].finish_reason == "length"


async def test_a_full_queue_refuses_with_the_time_that_its_prefill_takes(simulate: Simulate) -> None:
    simulation = simulate(max_num_queued_reqs=2)
    # 16 tokens in 3.2 s: 5 tokens a second.
    lane = simulation.add_lane(is_stepped=True, max_num_seqs=1, prefill_us=3_200_000)
    simulation.submit(0, build_spec("runs", [20] * 16))
    await settle()
    for handle in (1, 2, 3):
        simulation.submit(handle, build_spec(f"r{handle}", [20 + handle] * 10))
    answer = simulation.read()[3]
    assert answer.ended is not None
    assert answer.error_reason == "QUEUE_FULL"
    assert "max_num_queued_reqs is 2 and 2 requests wait" in answer.ended.error.message
    assert answer.ended.error.retry_delay_ms == 4000  # 20 tokens wait
    while lane.unanswered:
        await lane.step()
    assert [simulation.read()[handle].finish_reason for handle in range(4)] == ["length", "length", "length", "error"]


@pytest.mark.parametrize(("prefill_us", "retry_ms"), [(16, 100), (16_000_000, 30_000), (None, 30_000)])
async def test_the_delay_is_within_bounds(simulate: Simulate, prefill_us: int | None, retry_ms: int) -> None:
    simulation = simulate(max_num_queued_reqs=1)
    if prefill_us is not None:
        simulation.add_lane(is_stepped=True, max_num_seqs=1, prefill_us=prefill_us)
    simulation.submit(0, build_spec("r0", [20] * 50))
    await settle()
    for handle in (1, 2):
        simulation.submit(handle, build_spec(f"r{handle}", [20] * 50))
    answer = simulation.read()[2 if prefill_us is not None else 1]
    assert answer.ended is not None
    assert answer.ended.error.retry_delay_ms == retry_ms


async def test_a_queue_full_of_tokens_refuses_what_does_not_fit(simulate: Simulate) -> None:
    simulation = simulate(max_num_queued_tokens=10)
    simulation.submit(0, build_spec("a", [20] * 6))
    simulation.submit(1, build_spec("b", [20] * 5))
    simulation.submit(2, build_spec("c", [20] * 4))
    answers = simulation.read()
    assert answers[1].error_reason == "QUEUE_FULL"
    assert answers[0].ended is None
    assert answers[2].ended is None
    assert simulation.dispatcher.num_waiting_tokens == 10


async def test_what_had_started_elsewhere_is_exempt_from_limits_and_goes_in_front(simulate: Simulate) -> None:
    simulation = simulate(max_num_queued_reqs=1)
    lane = simulation.add_lane(is_stepped=True, max_num_seqs=1)
    simulation.submit(0, build_spec("runs", prompt_of(0)))
    await settle()
    simulation.submit(1, build_spec("fresh", prompt_of(1)))
    earlier = answer_of(prompt_of(2), 2)
    simulation.submit(2, build_spec("again", prompt_of(2), outputs=earlier, max_tokens=4), Resubmission(True, 0.0))
    simulation.submit(3, build_spec("again too", prompt_of(3)), Resubmission(True, 0.0))
    while lane.unanswered:
        await lane.step()
    answers = simulation.read()
    assert answers.started_order == [0, 2, 3, 1]
    assert answers[2].tokens == answer_of(prompt_of(2), 4, start=2)
    ended = answers[2].ended
    assert ended is not None
    assert ended.usage.completion_tokens == 4


async def test_resubmissions_of_several_gateways_keep_the_order_of_their_first_submission(simulate: Simulate) -> None:
    simulation = simulate(max_num_queued_reqs=4)
    lane = simulation.add_lane(is_stepped=True, max_num_seqs=1)
    simulation.submit(0, build_spec("runs", prompt_of(0)))
    await settle()
    ages = {1: (False, 3.0), 2: (True, 1.0), 3: (False, 9.0), 4: (True, 2.0)}  # as one gateway after the other connects
    for handle, (has_started, age_s) in ages.items():
        simulation.submit(handle, build_spec(f"r{handle}", prompt_of(handle)), Resubmission(has_started, age_s))
    simulation.submit(5, build_spec("new", prompt_of(5)))
    assert simulation.read()[5].error_reason == "QUEUE_FULL"
    while lane.unanswered:
        await lane.step()
    assert simulation.read().started_order == [0, 4, 2, 3, 1]


async def test_a_queue_full_of_expired_requests_holds_up_nobody(simulate: Simulate) -> None:
    simulation = simulate()
    lane = simulation.add_lane(is_stepped=True, max_num_seqs=2)
    simulation.submit(0, build_spec("runs", prompt_of(0), max_tokens=9))
    simulation.submit(1, build_spec("waits for its slot", prompt_of(1), max_tokens=2))
    await settle()
    for handle in range(2, 202):
        simulation.submit(handle, build_spec(f"r{handle}", prompt_of(2), deadline_ms=1000))
    simulation.submit(202, build_spec("alive", prompt_of(3), max_tokens=2))
    simulation.clock.stall(2.0)
    await lane.step()
    num_ended = sum(simulation.read()[handle].ended is not None for handle in range(203))
    assert 64 <= num_ended < 200  # the step did not wait for all of them
    while lane.unanswered:
        simulation.clock.advance(0)
        await lane.step()
    answers = simulation.read()
    assert {answers[handle].error_reason for handle in range(2, 202)} == {"DEADLINE_EXCEEDED"}
    assert answers.started_order == [0, 1, 202]
    assert answers[0].tokens == answer_of(prompt_of(0), 9)
    assert answers[202].tokens == answer_of(prompt_of(3), 2)


async def test_a_gateway_that_is_gone_leaves_nothing_behind(simulate: Simulate) -> None:
    simulation = simulate()
    lane = simulation.add_lane(is_stepped=True, max_num_seqs=2)
    for handle in range(200):
        simulation.submit(handle, build_spec(f"r{handle}", prompt_of(handle)))
    await settle()
    simulation.dispatcher.end_session(simulation.session)
    assert not lane.lane.core.running  # what ran makes room at once
    assert simulation.dispatcher.num_waiting > 0
    simulation.clock.advance(0)
    assert simulation.dispatcher.num_waiting == 0
    assert not simulation.session.by_handle


# ---- time ----


async def test_a_deadline_ends_what_waits_and_what_runs(simulate: Simulate) -> None:
    simulation = simulate()
    lane = simulation.add_lane(is_stepped=True, max_num_seqs=1)
    simulation.submit(0, build_spec("runs", prompt_of(0), deadline_ms=500))
    simulation.submit(1, build_spec("waits", prompt_of(1), deadline_ms=400))
    simulation.submit(2, build_spec("patient", prompt_of(2)))
    await settle()
    simulation.clock.advance(0.399)
    assert simulation.read()[1].ended is None
    simulation.clock.advance(0.002)
    assert simulation.read()[1].error_reason == "DEADLINE_EXCEEDED"
    assert simulation.answers[0].ended is None
    simulation.clock.advance(0.1)
    assert simulation.read()[0].error_reason == "DEADLINE_EXCEEDED"
    assert simulation.answers[0].finish_reason == "abort"
    while lane.unanswered:
        await lane.step()
    assert simulation.read()[2].finish_reason == "length"
    assert simulation.answers[2].started[0].queued_ms == 501


async def test_before_the_first_executor_requests_wait_until_their_own_deadline(simulate: Simulate) -> None:
    simulation = simulate(executor_loss_timeout_s=30)
    simulation.submit(0, build_spec("patient", prompt_of(0)))
    simulation.submit(1, build_spec("hurried", prompt_of(1), deadline_ms=60_000))
    simulation.clock.advance(3600)
    answers = simulation.read()
    assert answers[0].ended is None
    assert answers[1].error_reason == "DEADLINE_EXCEEDED"
    simulation.add_lane()
    await simulation.until_ended(0)
    assert answers[0].finish_reason == "length"


async def test_a_pool_that_lost_its_executor_waits_and_then_gives_up(simulate: Simulate) -> None:
    simulation = simulate(executor_loss_timeout_s=30)
    lane = simulation.add_lane()
    simulation.submit(0, build_spec("before", prompt_of(0)))
    await simulation.until_ended(0)
    await lane.lose(UnavailableError("gone"))
    simulation.submit(1, build_spec("during", prompt_of(1)))
    simulation.clock.advance(29)
    assert simulation.pool.is_ready
    assert simulation.read()[1].ended is None
    simulation.clock.advance(2)
    assert not simulation.pool.is_ready
    answer = simulation.read()[1]
    assert answer.ended is not None
    assert (answer.error_reason, answer.ended.error.code) == ("NO_EXECUTOR", 14)  # UNAVAILABLE
    simulation.submit(2, build_spec("after", prompt_of(2)))
    assert simulation.read()[2].error_reason == "NO_EXECUTOR"
    simulation.add_lane("executor-1")
    assert simulation.pool.is_ready
    simulation.submit(3, build_spec("again", prompt_of(3)))
    await simulation.until_ended(3)
    assert simulation.answers[3].finish_reason == "length"


@pytest.mark.case("B27")
async def test_all_blocks_come_back_whatever_ends_a_request(simulate: Simulate) -> None:
    simulation = simulate()
    lane = simulation.add_lane(num_blocks=21, max_model_len=80, prefill_buckets=(64,))
    for handle in range(50):
        prompt = [20 + handle, *range(20, 83)]
        kind = handle % 4
        spec = build_spec(
            f"r{handle}",
            prompt,
            max_tokens=16,
            stop=answer_of(prompt, 6)[5:] if kind == 0 else (),
            deadline_ms=1 if kind == 1 else None,
        )
        simulation.submit(handle, spec)
        await simulation.until_started(handle)
        if kind == 1:
            simulation.clock.advance(1)
        if kind == 2:
            simulation.dispatcher.abort(simulation.session, f"r{handle}", 0)
        await simulation.until_ended(handle)
        await settle()
        assert lane.lane.core.num_free_blocks == 20
        assert simulation.dispatcher.num_waiting == 0
    assert simulation.dispatcher.num_finished == {
        FinishReason.STOP: 13,
        FinishReason.ABORT: 25,
        FinishReason.LENGTH: 12,
    }
