"""Admission by reserved blocks and by the peak over time: who is let in, and what a head that waits costs."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdback.errors import ConfigError
from holdback.types import FinishReason
from scheduler_svc.core.admission import MaxModelLenAdmission, ReservedAdmission
from scheduler_svc.core.async_scheduling import NeuronAsyncScheduler
from scheduler_svc.core.config import KvAdmission
from scheduler_svc.core.neuron_scheduler import NeuronScheduler
from scheduler_svc.core.phased import PhasedAdmission
from tests.core.builders import AdmitAll, build_config, build_drive, build_phased, build_request, ids
from tests.core.reference import needed_blocks, phased_admits

PHASED, RESERVED = KvAdmission.PHASED, KvAdmission.RESERVED


@pytest.mark.parametrize(
    ("policy", "admission_class"),
    [(KvAdmission.MAX_MODEL_LEN, MaxModelLenAdmission), (RESERVED, ReservedAdmission), (PHASED, PhasedAdmission)],
)
def test_the_configuration_chooses_the_policy(policy, admission_class):
    assert isinstance(NeuronScheduler(build_config(kv_admission=policy)).admission, admission_class)
    assert isinstance(NeuronScheduler(build_config()).admission, MaxModelLenAdmission)


@pytest.mark.parametrize("policy", KvAdmission)
def test_under_every_policy_a_request_of_max_model_len_must_fit(policy):
    with pytest.raises(ConfigError, match="num_blocks is 16"):
        build_config(num_blocks=16, max_model_len=64, kv_admission=policy)


# ---- reserved ----


def test_reserved_lets_in_as_many_as_may_grow_to_their_own_max_tokens():
    # 16 usable blocks of 4. Each may compute 5 + 8 - 1 tokens: 3 blocks. Three more tokens need one more.
    drive = build_drive(num_blocks=17, max_num_seqs=8, kv_admission=RESERVED, enable_prefix_caching=False)
    for req_id in "abcde":
        drive.add(req_id, prompt=5, max_tokens=8)
    drive.run(5)
    assert ids(drive.scheduler.running) == ["e", "d", "c", "b", "a"]
    assert drive.scheduler.why_not(build_request("one-block", prompt=4, max_tokens=1)) is None
    assert drive.scheduler.why_not(build_request("two-blocks", prompt=4, max_tokens=2)) == (
        "the running requests may need 15 blocks and this one 2; 16 are usable"
    )
    drive.scheduler.finish_request("c", FinishReason.ABORT)
    assert drive.scheduler.why_not(build_request("two-blocks", prompt=4, max_tokens=2)) is None


def test_what_goes_on_after_a_loss_reserves_what_it_did_before():
    drive = build_drive(num_blocks=17, max_num_seqs=8, kv_admission=RESERVED)
    scheduler: Any = drive.scheduler
    drive.add("a", prompt=5, max_tokens=8)
    drive.run(4)
    assert scheduler.admission.num_reserved == 3
    (moved,) = drive.lose_lane()
    assert scheduler.admission.num_reserved == 0
    scheduler.add_request(moved)
    drive.step()
    assert (moved.num_prefill_tokens, scheduler.admission.num_reserved) == (9, 3)
    drive.run_until_idle()
    assert scheduler.admission.num_reserved == 0


def test_a_max_tokens_that_does_not_fit_counts_as_what_fits_also_before_it_is_cut():
    drive = build_drive(num_blocks=17, max_model_len=64, kv_admission=RESERVED)
    assert drive.scheduler.why_not(build_request("r", prompt=60, max_tokens=1000)) is None


# ---- phased: what fits beside each other over time ----


def test_phased_lets_in_what_is_large_only_when_others_are_gone():
    # 9 usable blocks of 4. The worst cases are 7 blocks, in 5 steps, and 3. At that time c holds 2.
    drive = build_phased(num_blocks=10, max_model_len=32, enable_prefix_caching=False)
    drive.add("a", prompt=20, max_tokens=6)
    drive.step()
    short = build_request("b", prompt=4, max_tokens=9)
    assert needed_blocks(drive.scheduler, short) == [6, 8, 8, 8, 8, 10, 3, 3, 3]
    assert drive.scheduler.why_not(short) == "with this request up to 10 blocks may be needed at once; 9 are usable"
    shorter = build_request("c", prompt=3, max_tokens=9)
    assert needed_blocks(drive.scheduler, shorter) == [6, 7, 8, 8, 8, 9, 3, 3, 3]
    assert drive.scheduler.why_not(shorter) is None
    assert max(drive.scheduler.admission._profile.used) == 7


def test_the_policies_let_in_more_and_more():
    seen = {}
    for policy in KvAdmission:
        drive = build_drive(num_blocks=17, max_num_seqs=16, kv_admission=policy, enable_prefix_caching=False)
        for number in range(16):
            drive.add(f"r{number}", prompt=5, max_tokens=4 + 2 * number)
        drive.run(20)
        seen[policy] = len(drive.scheduler.running)
        drive.run_until_idle()
        assert len(drive.outputs) == 16
    assert seen == {KvAdmission.MAX_MODEL_LEN: 1, RESERVED: 3, PHASED: 4}


def test_a_shared_beginning_counts_once_as_long_as_any_of_its_holders_counts():
    # 12 usable blocks. The first holds 5 blocks of which 4 are full; those after it hit 4 and need 2 of their own.
    drive = build_phased(num_blocks=13, max_model_len=48)
    prompt = [1] * 18
    drive.add("a", prompt, max_tokens=3)
    drive.step()
    second = build_request("b", prompt, max_tokens=6)
    # While a is there 4 + 1 + 1 blocks; from the third step on 4 + 2.
    assert needed_blocks(drive.scheduler, second) == [6, 6, 6, 6, 6, 6]
    drive.scheduler.add_request(second)
    drive.step()
    assert drive.scheduler.admission._profile.ends == [2, 5]
    assert drive.scheduler.admission._profile.used == [6, 6]
    drive.scheduler.finish_request("b", FinishReason.ABORT)
    assert (drive.scheduler.admission._profile.ends, drive.scheduler.admission._profile.used) == ([2], [5])
    drive.scheduler.check_integrity()


def assert_peak_is(drive, head, num_blocks):
    """With `head` as one more, so many blocks are needed at most, and with one less it is refused."""
    admission, running = drive.scheduler.admission, drive.scheduler.running
    assert max(needed_blocks(drive.scheduler, head)) == num_blocks
    num_usable = admission._pool.num_usable
    for usable in (num_blocks - 1, num_blocks):
        admission._pool.num_usable = usable
        admission._refusal = None
        assert (admission.why_not(head, running) is None) == (usable == num_blocks)
    admission._pool.num_usable = num_usable


@pytest.mark.parametrize("order", ["abc", "cba", "bac"])
def test_of_three_that_share_a_beginning_the_one_that_ends_last_counts_it(order):
    # All hit the same four full blocks of 18 tokens; a has 3 more steps, b 7 and c 11.
    drive = build_phased(num_blocks=65, max_num_seqs=8)
    prompt, lengths = [1] * 18, {"a": 4, "b": 8, "c": 12}
    for req_id in order:
        drive.add(req_id, prompt, max_tokens=lengths[req_id])
        drive.step()
    # After 3 steps each has 2 blocks of its own, after 7 steps 3, after 11 steps 4.
    head = build_request("head", prompt, max_tokens=12)
    assert needed_blocks(drive.scheduler, head) == [8, 8, 8, 12, 10, 10, 10, 13, 10, 10, 10, 12]
    assert_peak_is(drive, head, 13)
    drive.scheduler.finish_request("c", FinishReason.ABORT)
    assert_peak_is(drive, head, 10)
    drive.scheduler.finish_request("b", FinishReason.ABORT)
    drive.scheduler.check_integrity()
    assert_peak_is(drive, head, 8)
    drive.scheduler.finish_request("a", FinishReason.ABORT)
    assert drive.scheduler.admission._latest == {}


# ---- what a head that is refused costs ----


def count_lookups(scheduler):
    """Blocks that are looked up in the prefix cache from now on."""
    lookups: list[bytes] = []
    find = scheduler.prefix_cache.find

    def counted(key):
        lookups.append(key)
        return find(key)

    scheduler.prefix_cache.find = counted
    return lookups


@pytest.mark.parametrize("is_refused_by_policy", [True, False])
def test_a_head_that_is_refused_is_not_looked_up_again_in_each_step(is_refused_by_policy):
    drive = build_phased(num_blocks=17, max_model_len=64)
    if not is_refused_by_policy:
        drive.scheduler.admission = AdmitAll()
    drive.add("runs", [1] * 40, max_tokens=24)
    drive.run(3)
    drive.add("waits", [1] * 12 + [2] * 28, max_tokens=2)
    drive.step()
    lookups = count_lookups(drive.scheduler)
    drive.run(8)
    assert ids(drive.scheduler.running) == ["runs"]
    # Three blocks are hit and the fourth is not there; asked for that one only, in the check of each step.
    assert len(lookups) == 8
    assert len(set(lookups)) == 1


lengths = st.tuples(st.integers(1, 24), st.integers(1, 24))


@settings(deadline=None, max_examples=150)
@given(
    scheduler_class=st.sampled_from([NeuronScheduler, NeuronAsyncScheduler]),
    running=st.lists(lengths, min_size=1, max_size=5),
    head=lengths,
    num_blocks=st.integers(17, 30),
    abort_after=st.integers(0, 30),
)
def test_a_head_that_waits_is_let_in_by_the_first_step_that_the_rule_allows(
    scheduler_class, running, head, num_blocks, abort_after
):
    drive = build_phased(scheduler_class, num_blocks=num_blocks, max_model_len=64, max_num_seqs=8)
    for number, (prompt, max_tokens) in enumerate(running):
        drive.add(f"r{number}", [number] * prompt, max_tokens=max_tokens)
        drive.run(2)
    while drive.scheduler.waiting:
        drive.step()
    waits = drive.add("waits", [7] * head[0], max_tokens=head[1])
    for step in range(100):
        if step == abort_after and drive.scheduler.running and waits.slot is None:
            drive.scheduler.finish_request(drive.scheduler.running[0].req_id, FinishReason.ABORT)
        allowed = not drive.scheduler.has_prefill_in_running and phased_admits(drive.scheduler, waits)
        drive.step()
        assert allowed == (waits.slot is not None or "waits" in drive.finished)
        if allowed:
            return
    raise AssertionError("it still waits")
