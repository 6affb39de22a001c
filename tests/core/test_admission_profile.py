"""Blocks in use at the end of each curve, kept as requests come and go."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.profile import Curve, Overflow, Profile
from scheduler_svc.core.request import Request
from tests.core.builders import build_request

BLOCK_SIZE = 4


def build_curve(num_computed, num_left, num_late=0, now=0):
    """Of a request with that many tokens computed at step `now`."""
    last = now + num_left
    return Curve(num_computed - now + BLOCK_SIZE - 1, last, last + num_late)


def build_profile(*curves):
    profile = Profile(BLOCK_SIZE)
    for number, curve in enumerate(curves):
        profile.add(build_request(f"r{number}"), curve)
    return profile


def test_a_curve_grows_by_a_block_when_a_token_needs_one():
    profile, curve = build_profile(), build_curve(3, 6, num_late=1)
    assert [profile.blocks_at(curve, step) for step in range(8)] == [1, 1, 2, 2, 2, 2, 3, 3]


def test_the_sums_are_those_at_the_ends():
    # 8 tokens after 5 steps, 5 after 2: 2 + 1 blocks at step 1, 2 + 2 at step 2.
    profile = build_profile(build_curve(3, 5), build_curve(3, 2))
    assert (profile.ends, profile.used) == ([2, 5], [2 + 2, 2])


def test_curves_that_end_together_have_one_end_until_the_last_is_gone():
    first, second = build_request("a"), build_request("b")
    profile = build_profile()
    profile.add(first, build_curve(4, 3))
    profile.add(second, build_curve(1, 3))
    assert (profile.ends, profile.used) == ([3], [3])
    assert profile.remove(first) == build_curve(4, 3)
    assert (profile.ends, profile.used) == ([3], [1])
    profile.remove(second)
    assert (profile.ends, profile.used) == ([], [])


def test_a_shared_block_counts_once_until_its_last_holder_ends():
    profile = build_profile(build_curve(8, 2))
    # Two blocks are shared: up to step 2 they count for the other one.
    request = build_request("sharer")
    profile.add(request, build_curve(8, 5), shared_until=[2, 2])
    assert (profile.ends, profile.used) == ([2, 5], [3 + 3 - 2, 4])
    profile.remove(request, shared_until=[2, 2])
    assert (profile.ends, profile.used) == ([2], [3])


@pytest.mark.parametrize(
    ("curve", "limit", "overflow"),
    [
        (build_curve(4, 9), 9, None),
        (build_curve(4, 9), 8, Overflow(6, 9, 6)),
        (build_curve(4, 6), 8, Overflow(6, 9, 6)),
        (build_curve(4, 2), 6, None),
        (build_curve(4, 2), 5, Overflow(2, 6, 6)),
    ],
)
def test_the_step_with_the_most_blocks_is_found(curve, limit, overflow):
    # 13 and 6 tokens after 6 steps: 4 + 2 blocks. At step 2 it is 9 and 3: 3 + 1 blocks.
    profile = build_profile(build_curve(7, 6), build_curve(1, 5, num_late=1))
    assert profile.used == [6]
    assert profile.find_overflow(curve, (), limit) == overflow


curves = st.builds(build_curve, st.integers(1, 20), st.integers(1, 20), st.integers(0, 1))


def total_at(curves, step):
    """Straight from what a curve says of itself."""
    return sum((curve.offset + min(step, curve.last)) // BLOCK_SIZE for curve in curves if step <= curve.end)


@settings(deadline=None)
@given(st.lists(st.tuples(curves, st.integers(0, 3))), curves, st.integers(1, 40))
def test_any_coming_and_going_leaves_the_right_sums(operations, candidate, limit):
    profile = Profile(BLOCK_SIZE)
    present: dict[Request, Curve] = {}
    for curve, number in operations:
        if number == 0 and present:
            request = next(iter(present))
            assert profile.remove(request) == present.pop(request)
        else:
            request = build_request("r")
            present[request] = curve
            profile.add(request, curve)
        assert profile.ends == sorted({curve.end for curve in present.values()})
        assert profile.used == [total_at(present.values(), step) for step in profile.ends]
    together = [*present.values(), candidate]
    most = max(total_at(together, step) for step in range(1, candidate.end + 1))
    alone = (candidate.offset + candidate.last) // BLOCK_SIZE
    overflow = profile.find_overflow(candidate, (), max(limit, alone))
    assert (overflow is None) == (most <= max(limit, alone))
    if overflow is not None:
        assert overflow.num_blocks == total_at(together, overflow.step)
