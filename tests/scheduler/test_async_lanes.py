"""Two steps in flight (K8): what is sent ahead, and that a late token is seen by nobody, whenever a request ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from holdback.errors import InternalError, UnavailableError
from holdback.types import FinishReason, RequestSpec
from scheduler_svc.requests import request_id_of
from tests.scheduler.paged import PagedExecutor, paged_answer
from tests.scheduler.parts import Answer, SimulatedLane, Simulation, build_spec, settle

Simulate = Callable[..., Simulation]

SMALL = {"max_num_seqs": 2, "max_model_len": 20, "num_blocks": 11, "prefill_buckets": (4, 8)}
"""Two slots and ten usable blocks, so that what one request leaves the next one gets at once."""


def add_paged(simulation: Simulation, executor_id: str = "executor-0", **sizes: object) -> SimulatedLane:
    return simulation.add_lane(executor_id, is_stepped=True, executor=PagedExecutor(), **(SMALL | sizes))


def rows_of(lane: SimulatedLane, first: int = 0) -> list[list[str]]:
    return [[request_id_of(req_id) for req_id in step.num_scheduled_tokens] for step in lane.sent[first:]]


# ---- what is in flight ----


async def test_the_next_step_is_sent_before_the_result_of_the_one_before(simulate: Simulate) -> None:
    simulation = simulate()
    lane = add_paged(simulation)
    simulation.submit(0, build_spec("a", [30] * 3, max_tokens=5))
    await settle()
    assert rows_of(lane) == [["a"], ["a"]]
    await lane.step()
    assert rows_of(lane) == [["a"]] * 3
    assert len(lane.unanswered) == 2


@pytest.mark.parametrize(
    ("setting", "allowed", "depth"), [(True, 2, 2), (True, 1, 1), (False, 2, 1)], ids=["both", "device", "setting"]
)
async def test_depth_is_what_setting_and_executor_allow(
    simulate: Simulate, setting: bool, allowed: int, depth: int
) -> None:
    simulation = simulate(async_scheduling=setting)
    lane = add_paged(simulation, max_steps_in_flight=allowed)
    simulation.submit(0, build_spec(max_tokens=9))
    await settle()
    assert len(lane.sent) == depth


async def test_a_join_and_a_finish_need_no_step_to_be_waited_for(simulate: Simulate) -> None:
    simulation = simulate()
    lane = add_paged(simulation)
    simulation.submit(0, build_spec("a", [30], max_tokens=8))
    await settle()
    simulation.submit(1, build_spec("b", [40], max_tokens=2))
    seen = []
    while lane.unanswered:
        seen.append(len(lane.unanswered))
        await lane.step()
    # b is bound behind the two steps in flight; from its prefill on there are always two, up to a's last token.
    assert rows_of(lane)[:6] == [["a"], ["a"], ["b"], ["b", "a"], ["a"], ["a"]]
    assert seen == [2] * (len(seen) - 2) + [1, 1]
    assert simulation.read()[1].tokens == paged_answer([40], 2)


async def test_what_only_tells_ends_does_not_hold_up_a_step(simulate: Simulate) -> None:
    simulation = simulate()
    lane = add_paged(simulation)
    simulation.submit(0, build_spec("a", [30], max_tokens=1))
    await settle()
    simulation.dispatcher.abort(simulation.session, "a", 0)
    await settle()
    simulation.submit(1, build_spec("b", [40], max_tokens=3))
    await settle()
    assert rows_of(lane) == [["a"], [], ["b"]]


async def test_no_more_steps_wait_than_an_executor_reads_ahead(simulate: Simulate) -> None:
    simulation = simulate()
    lane = add_paged(simulation)
    for handle in range(12):
        simulation.submit(handle, build_spec(f"r{handle}", [30 + handle], max_tokens=1))
        await settle()
        if handle:
            simulation.dispatcher.abort(simulation.session, f"r{handle}", 0)
            await settle()
    assert len(lane.unanswered) <= 8
    while lane.unanswered:
        await lane.step()
    assert simulation.read()[0].tokens == paged_answer([30], 1)


# ---- nobody sees a late token ----


def specs() -> list[RequestSpec]:
    """Four requests of several kinds for two slots: a stop in the middle, chunks, one token, a common prefix."""
    prompts = [[31, 32, 33, 34, 35], [41] * 9, [51], [31, 32, 33, 34, 61, 62]]
    stop = paged_answer(prompts[0], 3)[2:]
    return [
        build_spec("r0", prompts[0], max_tokens=8, stop=stop, num_logprobs=0),
        build_spec("r1", prompts[1], max_tokens=9, num_logprobs=0),
        build_spec("r2", prompts[2], max_tokens=1, num_logprobs=0),
        build_spec("r3", prompts[3], max_tokens=6, num_logprobs=0),
    ]


EXPECTED = [3, 9, 1, 6]
"""Outputs of each when nothing is aborted: r0 stops at its third."""


class Run:
    """Submits the four requests, answers step by step, and does something at one moment."""

    def __init__(self, simulation: Simulation, *, in_bursts: bool) -> None:
        self.simulation = simulation
        self.num_moments = 0
        self.lane = add_paged(simulation)
        self._in_bursts = in_bursts
        self.lanes = [self.lane]

    async def until(self, moment: int | None) -> bool:
        """Answers steps until `moment` answers were given, or all. Returns whether the moment came."""
        await settle(10)
        while self.lane.unanswered:
            if moment is not None and self.num_moments >= moment:
                return True
            self.lane.answer()
            self.num_moments += 1
            # In bursts two answers are there before the lane looks.
            if not self._in_bursts or self.num_moments % 2 == 0 or not self.lane.unanswered:
                await settle(10)
        return False

    def replace_lane(self) -> None:
        self.lane = add_paged(self.simulation, f"executor-{len(self.lanes)}")
        self.lanes.append(self.lane)


async def act(run: Run, action: str) -> None:
    kind, _, number = action.partition(" ")
    simulation = run.simulation
    if kind == "abort":
        simulation.dispatcher.abort(simulation.session, f"r{number}", 0)
    elif kind == "arrive":
        simulation.submit(4, build_spec("r4", [71, 72], max_tokens=3, num_logprobs=0))
    elif kind == "swap":  # what ends gives slot and blocks to what comes, while late steps are in flight
        simulation.dispatcher.abort(simulation.session, "r1", 0)
        simulation.submit(4, build_spec("r4", [71, 72], max_tokens=3, num_logprobs=0))
    elif kind == "lose":
        await run.lane.lose(UnavailableError("gone"))
        run.replace_lane()
    elif kind == "drain":
        run.lane.lane.drain("rollout")
        await run.until(None)
        assert await run.lane.ended() is None
        run.replace_lane()


def check(answers: dict[int, Answer], action: str, handle: int, spec: RequestSpec, num_tokens: int) -> None:
    answer = answers[handle]
    expected = paged_answer(spec.prompt_token_ids, num_tokens)
    assert answer.ended is not None, f"{action}: r{handle} has not ended"
    assert answer.tokens == expected[: len(answer.tokens)]
    assert answer.logprob_token_ids == answer.tokens
    assert answer.ended.usage.completion_tokens == len(answer.tokens)
    is_aborted = answer.finish_reason == "abort"
    assert is_aborted or answer.tokens == expected
    assert not is_aborted or f"abort {handle}" in action or ("swap" in action and handle == 1)


ACTIONS = [
    *(f"abort {number}" for number in range(4)),
    "arrive",
    "swap",
    "lose",
    "drain",
    "abort 0, arrive, lose",
    "abort 1, abort 0, arrive",
    "lose, abort 3, swap",
    "drain, lose, abort 2",
]
"""Each is done at every moment; of several, one at that moment and one after each answer that follows."""


@pytest.mark.case("B11")
@pytest.mark.case("B13")
@pytest.mark.parametrize("in_bursts", [False, True], ids=["one by one", "in bursts"])
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("action", ACTIONS)
async def test_tokens_are_equal_whatever_happens_at_whichever_moment(
    action: str, is_async: bool, in_bursts: bool
) -> None:
    moment, came = 0, True
    while came:
        simulation = Simulation(async_scheduling=is_async, max_request_moves=100)
        run = Run(simulation, in_bursts=in_bursts)
        for handle, spec in enumerate(specs()):
            simulation.submit(handle, spec)
        first, *rest = action.split(", ")
        came = await run.until(moment)
        await act(run, first)
        for offset, part in enumerate(rest, start=1):
            await run.until(moment + offset)
            await act(run, part)
        await run.until(None)
        answers = simulation.read().by_handle
        for handle, spec in enumerate(specs()):
            check(answers, action, handle, spec, EXPECTED[handle])
        if 4 in answers:
            check(answers, action, 4, build_spec("r4", [71, 72]), 3)
        for lane in simulation.dispatcher.lanes:
            lane.core.check_integrity()
            assert lane.core.num_free_blocks == 10
            assert lane.core.num_steps_in_flight == 0
        ends = sum(simulation.dispatcher.num_finished.values())
        assert ends == len(answers)
        await simulation.stop()
        moment += 1
    assert moment > 12


async def test_a_late_token_counts_in_no_metric(simulate: Simulate) -> None:
    simulation = simulate()
    lane = add_paged(simulation)
    answer = paged_answer([30, 31], 2)
    simulation.submit(0, build_spec("r", [30, 31], max_tokens=9, stop=answer[1:]))
    await settle()
    while lane.unanswered:
        await lane.step()
    assert rows_of(lane) == [["r"], ["r"], ["r"], []]  # the third was sent before the second was known to be the last
    ended = simulation.read()[0].ended
    assert simulation.answers[0].tokens == answer
    assert ended is not None
    assert (ended.usage.completion_tokens, ended.stop_token_id) == (2, answer[1])
    assert simulation.dispatcher.num_finished == {FinishReason.STOP: 1}


# ---- a lane that ends with two steps in flight ----


async def fill(simulation: Simulation) -> SimulatedLane:
    """`old` decodes; the oldest step in flight has it alone, the one behind it is the prefill of `new`."""
    lane = add_paged(simulation)
    simulation.submit(0, build_spec("old", [30], max_tokens=9))
    await settle()
    simulation.submit(1, build_spec("new", [40], max_tokens=9))
    await lane.step()
    assert rows_of(lane, -2) == [["old"], ["new"]]
    return lane


def moves_of(simulation: Simulation) -> dict[str, int]:
    return {waiting.spec.request_id: waiting.num_moves for waiting in simulation.dispatcher.queue}


async def test_a_failure_that_the_executor_reports_is_that_of_the_oldest_step(simulate: Simulate) -> None:
    simulation = simulate()
    lane = await fill(simulation)
    await lane.lose(InternalError("step 1: RuntimeError"))
    assert moves_of(simulation) == {"old": 1, "new": 0}


async def test_an_executor_that_is_gone_may_have_died_in_any_step(simulate: Simulate) -> None:
    simulation = simulate()
    lane = await fill(simulation)
    await lane.lose(UnavailableError("connection reset"))
    assert moves_of(simulation) == {"old": 1, "new": 1}


async def test_a_result_that_does_not_fit_is_blamed_on_its_own_step(simulate: Simulate) -> None:
    simulation = simulate()
    lane = await fill(simulation)
    output = lane.executor.execute(lane.unanswered.popleft())
    output.sampled_token_ids.append(20)
    lane.lane.receive(output)
    assert isinstance(await lane.ended(), InternalError)
    assert moves_of(simulation) == {"old": 1, "new": 0}


async def test_a_step_is_given_its_time_from_the_end_of_the_one_before(simulate: Simulate) -> None:
    simulation = simulate(min_step_timeout_s=40)
    lane = await fill(simulation)
    simulation.clock.advance(30)
    await lane.step()
    simulation.clock.advance(30)
    lane.lane.wake()
    await settle()
    assert simulation.dispatcher.lanes == [lane.lane]  # the step behind was sent 60 s ago and runs for 30 s
    simulation.clock.advance(10)
    lane.lane.wake()
    assert isinstance(await lane.ended(), InternalError)
    assert moves_of(simulation)["new"] == 1


async def test_a_stream_that_ends_in_a_drain_has_not_run_the_last_step(simulate: Simulate) -> None:
    simulation = simulate(max_request_moves=0)
    lane = await fill(simulation)
    lane.lane.drain("scale-down")
    await lane.step()
    lane.lane.fail(UnavailableError("the executor ended its Execute stream"))
    assert await lane.ended() is None
    assert moves_of(simulation) == {"old": 0, "new": 0}
    second = add_paged(simulation, "second")
    await settle()
    while second.unanswered:
        await second.step()
    answers: Sequence[Answer] = [simulation.read()[handle] for handle in range(2)]
    assert [answer.tokens for answer in answers] == [paged_answer([30], 9), paged_answer([40], 9)]


async def test_a_step_that_hangs_is_found_while_another_waits_behind_it(simulate: Simulate) -> None:
    simulation = simulate(min_step_timeout_s=40)
    lane = await fill(simulation)
    simulation.clock.advance(40)
    lane.lane.wake()
    assert isinstance(await lane.ended(), InternalError)
    assert moves_of(simulation) == {"old": 1, "new": 0}
