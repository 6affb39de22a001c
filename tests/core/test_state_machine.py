"""Any sequence of arrivals, steps, aborts, failures and losses leaves everything balanced and every answer right.

Answers are known beforehand: output i is token 50 + i unless an EOS is planned there. The drive checks after every
operation that all counts balance, that a scheduler with work and nothing in flight schedules something (B01), that no
token comes twice or is left out, and on the executor's side that every row finds its own content in its blocks.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdback.types import FinishReason
from scheduler_svc.core.async_scheduling import NeuronAsyncScheduler
from scheduler_svc.core.config import KvAdmission
from scheduler_svc.core.neuron_scheduler import NeuronScheduler
from tests.core.builders import EOS, FIRST_OUTPUT, build_drive, build_request, ids
from tests.core.exploring import RULES

# Three beginnings that differ at once, within the first block, and after it, so that hits are common.
PROMPTS = [[1] * 40, [1, 1, 9] + [1] * 37, [1] * 6 + [8] * 34]


class SchedulerMachine(RuleBasedStateMachine):
    scheduler_class = NeuronScheduler

    @initialize(
        num_blocks=st.integers(9, 30),
        max_num_seqs=st.integers(1, 4),
        max_num_batched_tokens=st.sampled_from([4, 7, 16]),
        enable_prefix_caching=st.booleans(),
        kv_admission=st.sampled_from(KvAdmission),
        max_decode_stall_ms=st.sampled_from([None, 0, 0.008, 0.02]),
        remembered=st.integers(0, 4),
        other=st.integers(0, 4),
    )
    def start(self, remembered, other, **sizes):
        self.drive = build_drive(self.scheduler_class, max_model_len=32, **sizes)
        # Two of these are asked about after each operation, one of them first and last: it is the one that is
        # remembered until the next operation, as the head of a queue is.
        outputs = list(range(FIRST_OUTPUT, FIRST_OUTPUT + 12))
        self.heads = [
            build_request(f"head{number}", prompt, max_tokens=max_tokens)
            for number, (prompt, max_tokens) in enumerate(
                [([7], 6), ([7] * 20, 11), (PROMPTS[0][:24], 2), (PROMPTS[0][:13], 12), (PROMPTS[0][:2] + outputs, 5)]
            )
        ]
        self.heads = [self.heads[remembered], self.heads[other], self.heads[remembered]]
        self.expected = {}
        self.num_requests = 0

    @property
    def scheduler(self):
        return self.drive.scheduler

    @rule(
        prompt=st.sampled_from(PROMPTS),
        num_prompt=st.integers(1, 31),
        max_tokens=st.integers(1, 12),
        eos_at=st.integers(0, 20),
    )
    def add(self, prompt, num_prompt, max_tokens, eos_at):
        req_id = f"r{self.num_requests}"
        self.num_requests += 1
        self.drive.planned[req_id, eos_at] = EOS
        self.drive.add(req_id, prompt[:num_prompt], max_tokens=max_tokens)
        num_outputs = min(max_tokens, 32 - num_prompt)
        tokens = [50 + index for index in range(num_outputs)]
        self.expected[req_id] = tokens if eos_at >= num_outputs else [*tokens[:eos_at], EOS]

    @rule(count=st.integers(1, 4))
    def step(self, count):
        self.drive.run(count)

    @precondition(lambda self: self.scheduler.num_steps_in_flight < self.scheduler.max_steps_in_flight)
    @rule()
    def schedule(self):
        self.drive.schedule()

    @precondition(lambda self: self.drive.in_flight)
    @rule()
    def update(self):
        self.drive.update()

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data):
        req_id = data.draw(st.sampled_from(sorted(self.expected)))
        was_alive = req_id in self.scheduler.requests or req_id in self.scheduler.waiting
        aborted = self.scheduler.finish_request(req_id, FinishReason.ABORT)
        assert (aborted is not None) == was_alive
        assert was_alive == (req_id not in self.drive.finished)
        self.scheduler.check_integrity()
        if was_alive:
            del self.expected[req_id]

    @precondition(lambda self: self.drive.in_flight and self.drive.in_flight[0][0].num_scheduled_tokens)
    @rule(data=st.data())
    def fail_a_row(self, data):
        rows = list(self.drive.in_flight[0][0].num_scheduled_tokens)
        row = data.draw(st.integers(0, len(rows) - 1))
        was_bound = rows[row] in self.expected and rows[row] not in self.drive.finished
        self.drive.update(failed_rows=[row])
        if was_bound and self.drive.finished.get(rows[row]) is FinishReason.ERROR:
            del self.expected[rows[row]]

    @rule()
    def lose_the_lane(self):
        num_running = len(self.scheduler.running)
        order = ids(self.scheduler.running)[::-1] + ids(self.scheduler.waiting)
        released = self.drive.lose_lane()
        assert len(released) == num_running
        for request in released:
            self.scheduler.waiting.appendleft(request)
        assert ids(self.scheduler.waiting) == order
        assert self.scheduler.num_free_blocks == self.scheduler.num_usable_blocks

    @invariant()
    def what_came_is_the_beginning_of_what_is_right(self):
        if not hasattr(self, "drive"):
            return
        for req_id, tokens in self.expected.items():
            came = self.drive.outputs.get(req_id, [])
            assert came == tokens[: len(came)]

    @invariant()
    def admission_answers_as_the_rules_read(self):
        if not hasattr(self, "drive") or self.scheduler.has_prefill_in_running:
            return
        scheduler = self.scheduler
        for head in self.heads:
            is_let_in = (
                scheduler.admission.why_not(head, scheduler.running) or scheduler._why_not_placed(head)
            ) is None
            by_policy = [rule(scheduler, head) for rule in RULES.values()]
            assert is_let_in == RULES[scheduler.config.kv_admission](scheduler, head)
            assert by_policy == sorted(by_policy)

    def teardown(self):
        if not hasattr(self, "drive"):
            return
        self.drive.run_until_idle()
        for req_id, tokens in self.expected.items():
            assert self.drive.outputs[req_id] == tokens
            reason = FinishReason.STOP if tokens[-1] == EOS else FinishReason.LENGTH
            assert self.drive.finished[req_id] is reason
        assert self.scheduler.num_free_blocks == self.scheduler.num_usable_blocks
        assert not self.scheduler.requests


class AsyncSchedulerMachine(SchedulerMachine):
    scheduler_class = NeuronAsyncScheduler


def as_test(machine):
    machine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
    return pytest.mark.case("B01")(machine.TestCase)


TestScheduler = as_test(SchedulerMachine)
TestAsyncScheduler = as_test(AsyncSchedulerMachine)
