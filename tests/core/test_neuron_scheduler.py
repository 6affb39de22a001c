"""Holdback, separation, padding and the state machine."""

import pytest

from holdback.errors import InternalError
from holdback.types import FinishReason, Phase, SchedulerState
from scheduler_svc.core.neuron_scheduler import NeuronScheduler
from scheduler_svc.core.queue import RequestQueue
from scheduler_svc.core.scheduler import Scheduler
from tests.core.builders import AdmitAll, build_config, build_drive, build_request, ids, num_computed_tokens

IDLE, ACTIVE_PREFILL, ACTIVE_DECODE = SchedulerState


def test_a_new_prefill_hides_the_decodes_and_comes_in_front_of_them():
    drive = build_drive()
    drive.add("a")
    drive.add("b")
    drive.run(3)
    assert ids(drive.scheduler.running) == ["b", "a"]
    drive.add("c", [1, 2, 3])
    assert drive.step().num_scheduled_tokens == {"c": 3}
    assert ids(drive.scheduler.running) == ["c", "b", "a"]
    assert drive.step().num_scheduled_tokens == {"c": 1, "b": 1, "a": 1}


def test_decodes_stay_hidden_until_the_last_chunk_and_one_prefill_runs_at_a_time():
    drive = build_drive(max_num_batched_tokens=8, num_batched_tokens_buckets=(8,))
    drive.add("a", prompt=[1, 2])
    drive.step()
    drive.add("long", prompt=20)
    drive.add("next", prompt=[3])
    steps = drive.run(5)
    assert [step.num_scheduled_tokens for step in steps] == [
        {"long": 8}, {"long": 8}, {"long": 4}, {"next": 1}, {"next": 1, "long": 1, "a": 1},
    ]  # fmt: skip
    assert [step.phase for step in steps] == [Phase.PREFILL] * 4 + [Phase.DECODE]


def test_a_last_chunk_of_one_token_is_a_prefill_padded_to_the_smallest_bucket():
    drive = build_drive(max_num_batched_tokens=32)
    drive.scheduler.num_batched_tokens_buckets = (8, 16, 32)
    drive.add(prompt=33)
    first, last = drive.run(2)
    assert first.num_scheduled_tokens_padded == {"r": 32}
    assert (last.num_scheduled_tokens, last.num_scheduled_tokens_padded) == ({"r": 1}, {"r": 8})
    assert last.phase is Phase.PREFILL
    assert drive.scheduler.state is ACTIVE_PREFILL
    assert drive.scheduler.total_padding_tokens == 7


def test_padding_is_apart_from_what_is_computed():
    drive = build_drive()
    drive.add(prompt=9)
    prefill, decode = drive.run(2)
    assert (prefill.num_scheduled_tokens, prefill.num_scheduled_tokens_padded) == ({"r": 9}, {"r": 16})
    assert num_computed_tokens(decode) == {"r": 9}
    assert decode.num_scheduled_tokens_padded == decode.num_scheduled_tokens == {"r": 1}


def test_nothing_is_padded_to_nothing():
    scheduler = NeuronScheduler(build_config())
    assert [scheduler._calculate_padded_count(count) for count in (0, 1, 8, 9, 32)] == [0, 8, 8, 16, 32]


def test_a_mixed_batch_is_refused():
    class Mixing(NeuronScheduler):
        def _separate(self):
            return []

    drive = build_drive()
    drive.scheduler = Mixing(build_config())
    drive.add("a")
    drive.step()
    drive.add("b")
    with pytest.raises(RuntimeError, match="1 prefill rows and 1 decode rows"):
        drive.scheduler.schedule()
    # What was hidden and queued is where it was.
    assert ids(drive.scheduler.running) == ["a", "b"]
    assert not drive.scheduler.holdback_queue


# ---- the state machine ----


def test_the_state_follows_the_last_schedule():
    drive = build_drive(max_num_batched_tokens=8, num_batched_tokens_buckets=(8,))
    scheduler = drive.scheduler
    assert scheduler.state is IDLE
    drive.add(prompt=12, max_tokens=2)
    assert scheduler.state is IDLE
    states = []
    for _ in range(5):
        drive.step()
        states.append(scheduler.state)
    assert states == [ACTIVE_PREFILL, ACTIVE_PREFILL, ACTIVE_DECODE, IDLE, IDLE]


def test_an_ending_changes_the_state_with_the_next_schedule():
    drive = build_drive()
    drive.add(max_tokens=1)
    drive.step()
    assert not drive.scheduler.running
    assert drive.scheduler.state is ACTIVE_PREFILL
    drive.step()
    assert drive.scheduler.state is IDLE


@pytest.mark.case("B12")
def test_phase_and_state_follow_the_counts_before_the_step():
    drive = build_drive(max_num_batched_tokens=1024, max_model_len=512, block_size=16, num_blocks=33)
    drive.add(prompt=200, max_tokens=5)
    seen = []
    for _ in range(3):
        step = drive.step()
        seen.append(
            (num_computed_tokens(step)["r"], step.num_scheduled_tokens["r"], step.num_scheduled_tokens_padded["r"],
             step.phase, drive.scheduler.state)
        )  # fmt: skip
    assert seen == [
        (0, 200, 256, Phase.PREFILL, ACTIVE_PREFILL),
        (200, 1, 1, Phase.DECODE, ACTIVE_DECODE),
        (201, 1, 1, Phase.DECODE, ACTIVE_DECODE),
    ]


# ---- can_schedule ----


def test_the_checks_refuse_in_order_and_say_why():
    drive = build_drive(max_num_seqs=3, num_blocks=33, max_num_batched_tokens=8, num_batched_tokens_buckets=(8,))
    scheduler, head = drive.scheduler, build_request("head")
    assert scheduler.can_schedule(head)
    assert scheduler.why_not(head) is None
    drive.add("a", prompt=12, max_tokens=40)
    drive.step()
    assert scheduler.why_not(head) == "request 'a' is prefilling, 8 of 12 tokens are computed"
    drive.step()
    drive.add("b", [1], max_tokens=40)
    drive.step()
    assert scheduler.why_not(head) == "2 requests run; KV memory holds 2 of max_model_len"
    assert not scheduler.can_schedule(head)
    scheduler.max_num_seqs = 2
    assert scheduler.why_not(head) == "2 requests run; max_num_seqs is 2"


def test_a_prompt_is_placed_only_if_the_blocks_of_all_of_it_are_free():
    drive = build_drive(num_blocks=17, enable_prefix_caching=False)
    drive.scheduler.admission = AdmitAll()
    drive.add("a", prompt=40, max_tokens=4)
    drive.add("b", prompt=28)
    drive.run(2)
    head = drive.scheduler.waiting.peek()
    assert head is not None
    assert drive.scheduler.why_not(head) == "the prompt needs 7 more blocks; 6 of 16 are free"
    assert [step.num_scheduled_tokens for step in drive.run(3)] == [{"a": 1}, {"a": 1}, {"a": 1}]
    assert drive.step().num_scheduled_tokens == {"b": 28}


def test_a_hit_that_is_held_counts_as_there_and_one_that_is_free_as_taken():
    drive = build_drive(num_blocks=17)
    scheduler = drive.scheduler
    scheduler.admission = AdmitAll()
    drive.add("holder", prompt=20)
    drive.add("full", [1] * 24)
    drive.run(2)
    assert scheduler.num_free_blocks == 5
    assert scheduler.can_schedule(build_request("shares-5-of-9", prompt=36))
    assert not scheduler.can_schedule(build_request("shares-5-of-11", prompt=44))
    scheduler.finish_request("holder", FinishReason.ABORT)
    assert scheduler.num_free_blocks == 10
    assert scheduler.can_schedule(build_request("hits-5-free-of-9", prompt=36))
    assert not scheduler.can_schedule(build_request("hits-5-free-of-11", prompt=44))


def test_a_hit_that_somebody_holds_since_the_last_look_counts_as_there():
    drive = build_drive(num_blocks=17)
    scheduler = drive.scheduler
    scheduler.admission = AdmitAll()
    drive.add("leaves-a-prefix", prompt=13, max_tokens=1)
    drive.step()
    for req_id, prompt in (("eight", [1] * 32), ("two", [2] * 8)):
        drive.add(req_id, prompt)
        drive.step()
    head = build_request("head", prompt=28)
    # 3 of its 7 blocks are cached, and 6 are free with those.
    assert scheduler.why_not(head) == "the prompt needs 7 more blocks; 6 of 16 are free"
    drive.add("holds-the-prefix", prompt=13)
    drive.step()
    assert scheduler.why_not(head) == "the prompt needs 4 more blocks; 2 of 16 are free"
    scheduler.finish_request("two", FinishReason.ABORT)
    assert scheduler.why_not(head) is None


# ---- the holdback queue ----


def test_inside_schedule_the_queue_is_held_back_and_waiting_has_what_was_let_through():
    seen = []

    class Watching(NeuronScheduler):
        def _call_base_schedule(self):
            seen.append((ids(self.waiting), ids(self.holdback_queue), ids(self.running)))
            return Scheduler.schedule(self)

    drive = build_drive(Watching)
    for req_id in "abc":
        drive.add(req_id)
    drive.run(2)
    assert seen == [(["a"], ["b", "c"], []), (["b"], ["c"], [])]
    assert ids(drive.scheduler.waiting) == ["c"]
    assert ids(drive.scheduler.holdback_queue) == []


def test_what_the_base_does_not_take_goes_back_to_the_front():
    class Refusing(NeuronScheduler):
        def _why_not_placed(self, request):
            return "never" if self.holdback_queue is not self._let_through and self.waiting else None

    scheduler = Refusing(build_config())
    for req_id in "ab":
        scheduler.add_request(build_request(req_id))
    assert scheduler.schedule().num_scheduled_tokens == {}
    assert ids(scheduler.waiting) == ["a", "b"]
    assert ids(scheduler.holdback_queue) == []
    scheduler.check_integrity()


def test_a_schedule_that_fails_loses_no_request():
    class Failing(NeuronScheduler):
        def _call_base_schedule(self):
            if self.waiting and self.requests:
                raise InternalError("no block is free")
            return Scheduler.schedule(self)

    drive = build_drive(Failing)
    for req_id in "abc":
        drive.add(req_id)
    drive.step()
    with pytest.raises(InternalError, match="no block is free"):
        drive.scheduler.schedule()
    assert (ids(drive.scheduler.running), ids(drive.scheduler.waiting)) == (["a"], ["b", "c"])
    drive.scheduler.check_integrity()
    assert ids(drive.lose_lane()) == ["a"]


class CountingQueue(RequestQueue):
    """Counts what a step asks of its queue."""

    def __init__(self):
        super().__init__()
        self.num_calls = 0

    def __iter__(self):
        raise AssertionError("a step walks the queue")

    def peek(self):
        self.num_calls += 1
        return super().peek()

    def popleft(self):
        self.num_calls += 1
        return super().popleft()

    def appendleft(self, request):
        raise AssertionError("a step moves the queue")


@pytest.mark.parametrize("num_waiting", [1, 10_000])
def test_a_step_asks_the_same_of_a_short_queue_and_of_a_long_one(num_waiting):
    queue = CountingQueue()
    scheduler = NeuronScheduler(build_config(max_num_seqs=1), waiting=queue)
    for number in range(num_waiting + 1):
        scheduler.add_request(build_request(f"r{number}"))
    assert scheduler.schedule().num_scheduled_tokens == {"r0": 5}
    assert queue.num_calls == 3
    assert len(queue) == num_waiting


def test_a_queue_of_somebody_else_is_asked_for_its_head_and_nothing_more():
    queue = RequestQueue()
    lanes = [NeuronScheduler(build_config(), waiting=queue) for _ in range(2)]
    for req_id in "ab":
        queue.append(build_request(req_id))
    assert lanes[0].schedule().num_scheduled_tokens == {"a": 5}
    assert lanes[1].schedule().num_scheduled_tokens == {"b": 5}
    assert not queue


def test_max_tokens_is_cut_also_for_a_request_that_no_add_request_saw():
    queue = RequestQueue()
    drive = build_drive()
    drive.scheduler = NeuronScheduler(build_config(), waiting=queue)
    queue.append(build_request("r", prompt=60, max_tokens=100))
    drive.run_until_idle()
    assert len(drive.outputs["r"]) == 4


# ---- integrity ----


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda scheduler, request: scheduler.block_pool.allocate(1, request), "block tables say"),
        (lambda scheduler, request: scheduler.requests.clear(), "not one place each"),
        (lambda scheduler, request: scheduler.waiting.append(request), "not one place each"),
        (lambda scheduler, request: setattr(request, "slot", 3), "slots"),
        (lambda scheduler, request: setattr(request, "num_computed_tokens", 9), "has 2 blocks of 4"),
        (lambda scheduler, request: setattr(request, "num_computed_tokens", 8), "waits for 3 of 0 steps"),
        (lambda scheduler, request: request.output_token_ids.extend([1, 1]), "waits for -2 of 0 steps"),
        (lambda scheduler, request: setattr(request, "max_tokens", 1), "has all its tokens"),
        (lambda scheduler, request: scheduler.holdback_queue.append(build_request("x")), "held back between steps"),
        (lambda scheduler, request: setattr(request, "num_prefill_tokens", 9), "prefills at position 1"),
    ],
)
def test_check_integrity_sees(damage, message):
    drive = build_drive()
    request = drive.add("a")
    drive.add("b", [1])
    drive.run(2)
    drive.scheduler.check_integrity()
    damage(drive.scheduler, request)
    with pytest.raises(InternalError, match=message):
        drive.scheduler.check_integrity()
