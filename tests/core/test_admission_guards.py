"""What admission over time rests on: what a simpler rule lets in, and faults that are seen before they do harm."""

from typing import Any

import pytest

from holdback.errors import InternalError
from scheduler_svc.core.admission import AdmissionPolicy, ReservedAdmission
from scheduler_svc.core.async_scheduling import NeuronAsyncScheduler
from scheduler_svc.core.config import KvAdmission
from scheduler_svc.core.neuron_scheduler import NeuronScheduler
from scheduler_svc.core.phased import PhasedAdmission
from tests.core.builders import build_drive, build_phased, build_request, ids
from tests.core.reference import Fault, ReferenceAdmission, needed_blocks
from tests.core.tiny_worlds import Kind, Setup, World

# ---- three requests that a simpler rule lets in ----

BETWEEN = Setup(3, may_decode_between=True)
LATE = Setup(2, depth=2)


@pytest.mark.parametrize("fault", [None, Fault.NO_DECODES_BETWEEN])
def test_a_decode_step_between_two_chunks_makes_the_others_larger(fault):
    world = World(BETWEEN.build())
    scheduler = world.scheduler
    if fault is not None:
        scheduler.admission = ReferenceAdmission(scheduler, fault)
    world.schedule(Kind(1, 3))
    world.update()
    candidate = world.offer(Kind(3, 2))
    assert needed_blocks(scheduler, candidate) == [3, 3, 4]
    assert needed_blocks(scheduler, candidate, Fault.NO_DECODES_BETWEEN) == [3, 3, 2]
    if fault is None:
        assert "up to 4 blocks may be needed" in str(scheduler.why_not(candidate))
        return
    world.schedule(Kind(3, 2))
    world.update()
    world.schedule(decode_first=True)
    world.update()
    world.schedule()
    world.update()
    with pytest.raises(InternalError, match="no block is free; all 3 are held"):
        world.schedule()


@pytest.mark.parametrize("fault", [None, Fault.NO_LATE_STEPS])
def test_blocks_are_held_until_the_result_of_the_last_step_is_there(fault):
    world = World(LATE.build())
    scheduler = world.scheduler
    if fault is not None:
        scheduler.admission = ReferenceAdmission(scheduler, fault)
    world.schedule(Kind(1, 2))
    candidate = world.offer(Kind(1, 3))
    assert needed_blocks(scheduler, candidate) == [2, 2, 3, 2]
    assert needed_blocks(scheduler, candidate, Fault.NO_LATE_STEPS) == [2, 2, 2]
    if fault is None:
        assert "up to 3 blocks may be needed" in str(scheduler.why_not(candidate))
        return
    world.schedule(Kind(1, 3))
    world.update()
    world.schedule()
    world.update()
    with pytest.raises(InternalError, match="no block is free; all 2 are held"):
        world.schedule()


def test_a_yes_becomes_a_no_with_the_next_decode_step():
    world = World(LATE.build())
    world.schedule(Kind(1, 3))
    candidate = world.offer(Kind(1, 1))
    assert world.scheduler.why_not(candidate) is None
    world.schedule()
    assert "up to 3 blocks may be needed" in str(world.scheduler.why_not(candidate))


def test_a_request_bound_on_a_check_of_the_step_before_is_not_bound():
    class BindsLate(NeuronAsyncScheduler):
        """Lets through who was let in by any earlier check."""

        let_in: tuple[str, ...] = ()

        def why_not(self, request):
            return None if request.req_id in self.let_in else super().why_not(request)

    class Unchecked(AdmissionPolicy):
        def why_not(self, request, running):
            return None

    scheduler: Any
    for admission, message in ((None, "is bound without having been let in"), (Unchecked(), "no block is free")):
        world = World(LATE.build(BindsLate))
        scheduler = world.scheduler
        if admission is not None:
            scheduler.admission = admission
        world.schedule(Kind(1, 3))
        assert scheduler.why_not(world.offer(Kind(1, 1))) is None
        world.schedule()
        scheduler.let_in = ("r1",)
        world.update()
        scheduler.add_request(world.offer(Kind(1, 1)))
        with pytest.raises(InternalError, match=message):
            run_two_steps(world)
        if admission is None:
            assert (ids(scheduler.waiting), ids(scheduler.running)) == (["r1"], ["r0"])


def run_two_steps(world):
    for _ in range(2):
        world.in_flight.append(world.scheduler.schedule())
        world.update()


# ---- what it rests on cannot be broken unseen ----


def test_a_decode_step_that_was_not_expected_between_chunks_is_refused():
    class DecodesBetween(NeuronScheduler):
        def _is_decode_due(self, prefill, num_computed):
            return True

    drive = build_phased(DecodesBetween, max_num_batched_tokens=4)
    drive.add("a", [1])
    drive.step()
    drive.add("b", prompt=8)
    drive.step()
    with pytest.raises(InternalError, match=r"'b', computed 4 of 8\) is prefilling, and this decode step was not"):
        drive.scheduler.schedule()


def test_under_a_stall_bound_one_decode_step_between_two_chunks_is_expected():
    drive = build_phased(max_num_batched_tokens=4, max_decode_stall_ms=0)
    drive.add("a", [1])
    drive.step()
    drive.add("b", prompt=8)
    assert [list(step.num_scheduled_tokens) for step in drive.run(5)] == [["a"], ["b"], ["a"], ["b"], ["b", "a"]]


def test_a_second_prefill_is_refused():
    drive = build_phased(max_num_batched_tokens=4)
    drive.add("a", prompt=8)
    drive.step()
    admission = drive.scheduler.admission
    assert admission.why_not(build_request("b"), drive.scheduler.running) == (
        "1 requests run; admission knows of 0 that decode and 0 at their last token"
    )
    with pytest.raises(InternalError, match=r"'b', computed 0 of 5\) is bound without having been let in"):
        admission.bind(build_request("b"))


def test_who_has_blocks_too_late_after_its_last_token_is_seen():
    class PromisesTooMuch(NeuronAsyncScheduler):
        def _new_admission(self):
            return PhasedAdmission(self.config, self.block_pool, self._hits, num_late_steps=0)

    drive = build_phased(PromisesTooMuch)
    drive.add("a", [1], max_tokens=2)
    drive.add("b", [2], max_tokens=8)
    drive.run(2)
    drive.schedule()
    drive.update()
    with pytest.raises(InternalError, match=r"'a', computed 2 of 2\) still has its blocks"):
        drive.scheduler.schedule()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda admission, request: admission._profile.used.__setitem__(0, 3), "3 blocks are counted at step 7"),
        (lambda admission, request: admission._profile.remove(request), "curves are"),
        (lambda admission, request: setattr(admission, "_now", 3), "curves are"),
        (lambda admission, request: admission._at_last.update({request: 0}), "at their last token; they should be"),
        (lambda admission, request: setattr(admission, "_prefilling", request), "are prefilling; admission knows of"),
        (
            lambda admission, request: setattr(admission._pool, "num_usable", 2),
            "block tables say 3; 2 are usable",
        ),
    ],
)
def test_check_integrity_sees(damage, message):
    drive = build_phased(enable_prefix_caching=False)
    request = drive.add("a", max_tokens=8)
    drive.step()
    if "3 blocks are counted" in message:
        drive.add("b", [1], max_tokens=8)
        drive.step()
    drive.scheduler.check_integrity()
    damage(drive.scheduler.admission, request)
    with pytest.raises(InternalError, match=message):
        drive.scheduler.admission.check_integrity(drive.scheduler.running)


def test_check_integrity_sees_more_reserved_than_may_be_needed():
    drive = build_drive(kv_admission=KvAdmission.RESERVED)
    drive.add("a")
    drive.step()
    assert isinstance(drive.scheduler.admission, ReservedAdmission)
    drive.scheduler.admission.num_reserved += 1
    with pytest.raises(InternalError, match="4 blocks are reserved, 3 may be needed, 64 usable"):
        drive.scheduler.check_integrity()
