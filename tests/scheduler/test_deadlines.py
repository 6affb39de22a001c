"""Requests that run out of time, or would before they are served."""

from __future__ import annotations

from collections.abc import Callable

from holdback.types import StepTimings
from scheduler_svc.deadlines import Deadlines
from scheduler_svc.requests import Resubmission, Session, Submission
from tests.scheduler.parts import ManualClock, Simulation, answer_of, build_spec, prompt_of, settle

Simulate = Callable[..., Simulation]


def build_submission(number: int) -> Submission:
    return Submission(f"{number}/r", number, Session("gateway"), number, build_spec(), 0.0, 0.0, False, 0.0, 0.0)


class Expired:
    """Deadlines on a clock turned by hand, and the numbers of those that passed."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.numbers: list[int] = []
        self.num_caught_up = 0
        self.deadlines = Deadlines(
            self.clock, lambda submission: self.numbers.append(submission.number), self._count_caught_up
        )

    def _count_caught_up(self) -> None:
        self.num_caught_up += 1

    def add(self, number: int, after_s: float) -> Submission:
        submission = build_submission(number)
        self.deadlines.add(submission, self.clock.now() + after_s)
        return submission


async def test_each_expires_once_in_order_of_its_deadline() -> None:
    expired = Expired()
    for number, after_s in enumerate((5.0, 1.0, 3.0, 3.0)):
        expired.add(number, after_s)
    expired.clock.advance(0.9)
    assert expired.numbers == []
    expired.clock.advance(2.1)
    assert expired.numbers == [1, 2, 3]
    expired.clock.advance(10)
    assert expired.numbers == [1, 2, 3, 0]
    assert len(expired.deadlines) == 0


async def test_an_earlier_one_that_comes_later_is_not_missed() -> None:
    expired = Expired()
    expired.add(0, 9.0)
    expired.clock.advance(1)
    expired.add(1, 2.0)
    expired.clock.advance(2.5)
    assert expired.numbers == [1]
    expired.clock.advance(6)
    assert expired.numbers == [1, 0]


async def test_one_that_is_discarded_never_expires() -> None:
    expired = Expired()
    gone, stays = expired.add(0, 1.0), expired.add(1, 2.0)
    expired.deadlines.discard(gone)
    expired.deadlines.discard(gone)
    expired.clock.advance(5)
    assert expired.numbers == [1]
    expired.deadlines.discard(stays)


async def test_many_that_expire_together_let_others_run_between_them() -> None:
    expired = Expired()
    for number in range(150):
        expired.add(number, 1.0)
    expired.clock.stall(2.0)
    assert not expired.deadlines.check()
    assert len(expired.numbers) == 64
    assert not expired.deadlines.check()
    assert expired.num_caught_up == 0
    expired.clock.advance(0)
    assert expired.numbers == list(range(150))
    assert expired.num_caught_up == 1


async def test_a_check_does_not_wait_for_the_timer() -> None:
    expired = Expired()
    expired.add(0, 1.0)
    expired.clock.stall(2.0)
    assert expired.numbers == []
    expired.deadlines.check()
    assert expired.numbers == [0]
    expired.clock.advance(1)
    assert expired.numbers == [0]


async def test_what_ended_long_before_its_deadline_is_not_kept() -> None:
    expired = Expired()
    for number in range(10_000):
        expired.deadlines.discard(expired.add(number, 3600.0))
    assert len(expired.deadlines._heap) < 200
    expired.add(10_000, 1.0)
    expired.clock.advance(7200)
    assert expired.numbers == [10_000]


async def test_nothing_is_placed_whose_deadline_has_passed(simulate: Simulate) -> None:
    simulation = simulate()
    lane = simulation.add_lane(is_stepped=True, max_num_seqs=1)
    simulation.submit(0, build_spec("runs", prompt_of(0), max_tokens=1))
    simulation.submit(1, build_spec("late", prompt_of(1), deadline_ms=100))
    simulation.submit(2, build_spec("next", prompt_of(2), max_tokens=1))
    await settle()
    simulation.clock.stall(0.2)  # the process was busy: no timer has rung
    assert simulation.read()[1].ended is None
    await lane.step()
    assert simulation.read()[1].error_reason == "DEADLINE_EXCEEDED"
    assert [list(step.num_scheduled_tokens) for step in lane.sent] == [["0/runs"], ["2/next"]]


async def test_a_queue_full_of_requests_out_of_time_has_room(simulate: Simulate) -> None:
    simulation = simulate(max_num_queued_reqs=50)
    lane = simulation.add_lane(is_stepped=True, max_num_seqs=1)
    simulation.submit(0, build_spec("runs", prompt_of(0), max_tokens=1))
    await settle()
    for handle in range(1, 51):
        simulation.submit(handle, build_spec(f"r{handle}", prompt_of(handle), deadline_ms=100))
    simulation.clock.stall(0.2)
    simulation.submit(51, build_spec("new", [70], max_tokens=2))
    answers = simulation.read()
    assert {answers[handle].error_reason for handle in range(1, 51)} == {"DEADLINE_EXCEEDED"}
    assert simulation.dispatcher.num_waiting == 1
    while lane.unanswered:
        await lane.step()
    assert simulation.read()[51].tokens == answer_of([70], 2)


async def test_a_request_is_refused_when_the_queue_ahead_alone_takes_longer_than_it_has(simulate: Simulate) -> None:
    simulation = simulate()
    # Two lanes that prefill 16 tokens in 1.6 s each: 20 tokens a second in all.
    for number in range(2):
        simulation.add_lane(f"executor-{number}", is_stepped=True, max_num_seqs=1, prefill_us=1_600_000)
    for handle in range(2):
        simulation.submit(handle, build_spec(f"r{handle}", [20 + handle]))
    await settle()
    simulation.submit(2, build_spec("first", [30] * 40, deadline_ms=1))  # nothing is ahead of it
    simulation.submit(3, build_spec("enough", [31], deadline_ms=2001))  # 40 tokens are ahead: 2 s
    simulation.submit(4, build_spec("short", [32], deadline_ms=2040))  # 41 tokens are ahead: 2.05 s
    simulation.submit(5, build_spec("again", [33], deadline_ms=1, queued_ms=50), Resubmission(True, 0.05))
    answers = simulation.read()
    assert [answers[handle].ended is None for handle in (2, 3, 5)] == [True] * 3
    ended = answers[4].ended
    assert ended is not None
    assert (answers[4].error_reason, ended.error.code) == ("QUEUE_LONGER_THAN_DEADLINE", 4)  # DEADLINE_EXCEEDED
    assert "deadline_ms is 2040; allowed: at least 2050" in ended.error.message


async def test_without_a_lane_nobody_knows_how_long_the_queue_takes(simulate: Simulate) -> None:
    simulation = simulate()
    simulation.submit(0, build_spec("long", [30] * 60))
    simulation.submit(1, build_spec("hurried", [31], deadline_ms=1))
    assert simulation.read()[1].ended is None


async def test_what_is_measured_counts_and_not_what_was_declared(simulate: Simulate) -> None:
    simulation = simulate(async_scheduling=False)
    lane = simulation.add_lane(is_stepped=True, max_num_seqs=1, prefill_us=1_000_000)
    for handle in range(60):  # each prefills 4 tokens in 10 ms: 400 a second
        simulation.submit(handle, build_spec(f"r{handle}", [20 + handle] * 4, max_tokens=1))
        await settle()
        output = lane.executor.execute(lane.unanswered.popleft())
        output.timings = StepTimings(device_us=10_000)
        simulation.clock.advance(0.01)
        lane.lane.receive(output)
        await settle()
        lane.answer()  # the step that tells the end
        await settle()
    rate = lane.lane.prefill_rate.tokens_per_us * 1e6
    assert 300 < rate < 400  # and not 16


async def test_no_step_is_believed_to_have_taken_longer_than_it_was_out(simulate: Simulate) -> None:
    simulation = simulate(async_scheduling=False, max_decode_stall_ms=1000)
    lane = simulation.add_lane(is_stepped=True, prefill_us=10_000)
    for handle in range(2):
        simulation.submit(handle, build_spec(f"r{handle}", [20 + handle] * 4, max_tokens=9))
    for _ in range(2):
        await settle()
        output = lane.executor.execute(lane.unanswered.popleft())
        output.timings = StepTimings(2**32 - 1, 2**32 - 1, 2**32 - 1)
        simulation.clock.advance(0.02)
        lane.lane.receive(output)
    await settle()
    most = StepTimings(20_000, 20_000, 20_000)
    assert [step.timings for step in lane.lane.steps][:2] == [most, most]
    assert lane.lane.core.max_stall_us == 20_000  # what r0 waited for r1
    assert lane.lane.prefill_rate.tokens_per_us * 1e6 > 150  # 200 a second, and not 0


async def test_a_lane_that_drains_does_not_shorten_the_queue(simulate: Simulate) -> None:
    simulation = simulate()
    for number in range(2):
        simulation.add_lane(f"executor-{number}", is_stepped=True, max_num_seqs=1, prefill_us=1_600_000)
    for handle in range(2):
        simulation.submit(handle, build_spec(f"r{handle}", [20 + handle]))
    await settle()
    simulation.lanes[1].lane.drain("scale-down")
    simulation.submit(2, build_spec("first", [30] * 40))
    simulation.submit(3, build_spec("late", [31], deadline_ms=3999))  # 40 tokens at 10 a second
    simulation.submit(4, build_spec("in time", [32], deadline_ms=4001))
    assert simulation.read()[3].error_reason == "QUEUE_LONGER_THAN_DEADLINE"
    assert simulation.answers[4].ended is None
