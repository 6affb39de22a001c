"""Whatever comes, ends or is aborted at whatever moment: a slice of all states of tiny schedulers.

`python tests/core/enumerate_admission.py` walks all of them.
"""

import copy

import pytest

from scheduler_svc.core.async_scheduling import NeuronAsyncScheduler
from scheduler_svc.core.config import KvAdmission
from scheduler_svc.core.neuron_scheduler import NeuronScheduler
from tests.core.copies import clone
from tests.core.enumerate_admission import ALL_STREAMS, all_setups, search
from tests.core.exploring import Counts, FlawError, Search
from tests.core.reference import Fault, ReferenceAdmission
from tests.core.tiny_worlds import Kind, Setup, World

SETUPS = all_setups()


def setups_of(policy):
    return [setup for setup in SETUPS if setup.kv_admission is policy]


@pytest.mark.parametrize("part", range(8))
def test_no_request_that_phased_lets_in_lacks_a_block_and_it_lets_in_what_reserved_does(part):
    setups = setups_of(KvAdmission.PHASED)[part::8]
    assert len(setups) == 60
    counts = sum((search(setup, num_kinds=4, seed=part, max_states=60) for setup in setups), Counts())
    assert counts.steps > 2500
    assert counts.questions > 500


@pytest.mark.parametrize("policy", [KvAdmission.MAX_MODEL_LEN, KvAdmission.RESERVED])
@pytest.mark.parametrize("part", range(2))
def test_no_request_that_the_others_let_in_lacks_a_block(policy, part):
    setups = setups_of(policy)[part::4]
    assert len(setups) == 120
    counts = sum((search(setup, num_kinds=4, seed=part, max_states=60) for setup in setups), Counts())
    assert counts.steps > 5000
    assert counts.questions > 1000


def test_all_states_of_the_smallest_setups_are_walked():
    setups = [setup for setup in setups_of(KvAdmission.PHASED) if setup.num_usable < 3 and setup.max_num_seqs == 2]
    assert len(setups) == 48
    counts = sum(map(search, setups), Counts())
    assert counts.states > 1500
    assert counts.questions > 2000


# ---- that the search finds what is wrong ----


def search_with_fault(setup, kinds, fault, scheduler_class=None):
    scheduler = setup.build(scheduler_class)
    scheduler.admission = ReferenceAdmission(scheduler, fault)
    return Search(setup, kinds, scheduler).run()


class LeavesOneOut(NeuronScheduler):
    """A decode step has everybody but the request that came last, where there are several."""

    def _schedule_running(self, batch):
        running = self.running
        if len(running) > 1 and not running[0].is_prefill:
            self.running = running[1:]
        super()._schedule_running(batch)
        self.running = running


class LeavesOneOutAsync(LeavesOneOut, NeuronAsyncScheduler):
    """The same with two steps in flight."""


LATE = Setup(2, depth=2)
BETWEEN = Setup(3, may_decode_between=True)
SHARING = Setup(4, max_num_seqs=3, streams=ALL_STREAMS, max_requests=3)


@pytest.mark.parametrize(
    ("setup", "kinds", "fault"),
    [
        pytest.param(LATE, [Kind(1, 2), Kind(1, 3)], Fault.NO_LATE_STEPS, id="late"),
        pytest.param(BETWEEN, [Kind(1, 3), Kind(3, 2)], Fault.NO_DECODES_BETWEEN, id="between"),
        pytest.param(
            SHARING, [Kind(3, most, "shared") for most in (2, 4, 5)], Fault.FIRST_HOLDER_ONLY, id="latest-holder"
        ),
        pytest.param(SHARING, None, Fault.HITS_ARE_FREE, id="hits"),
    ],
)
def test_a_rule_that_leaves_something_out_is_found_to_lack_a_block(setup, kinds, fault):
    with pytest.raises(FlawError, match=r"no block is free|blocks free"):
        search_with_fault(setup, kinds, fault)


@pytest.mark.parametrize("faulty", [LeavesOneOut, LeavesOneOutAsync])
def test_a_decode_step_that_leaves_somebody_out_is_found_to_lack_a_block(faulty):
    setup = Setup(4, depth=faulty.max_steps_in_flight)
    with pytest.raises(FlawError, match="no block is free"):
        search_with_fault(setup, None, None, faulty)
    # The policy itself sees it before it can do harm.
    with pytest.raises(FlawError, match=r"a decode step has 1 rows; 2 requests have tokens left to decode"):
        Search(setup, None, setup.build(faulty)).run()


@pytest.mark.parametrize("setup", [LATE, BETWEEN], ids=["late", "between"])
def test_the_rule_without_a_fault_stands_where_those_fall(setup):
    assert search_with_fault(setup, None, None).states > 100


# ---- that the search looks at what it says ----


def followers(search, world):
    """The states that may come next."""
    keys = set()
    for action in search._actions(world):
        following = clone(world, {})
        action.apply(following)
        keys.add(search._key(following))
    return keys


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("streams", "kinds"),
    [
        (("own",), [Kind(1, 2), Kind(3, 2)]),
        (ALL_STREAMS, [Kind(3, 2, "shared"), Kind(3, 1), Kind(1, 3, "shared")]),
        (ALL_STREAMS, [Kind(1, 2, "shared"), Kind(5, 1, "continued"), Kind(4, 1, "shared")]),
    ],
)
def test_states_that_count_as_one_have_the_same_states_after_them(depth, streams, kinds):
    max_requests = None if len(streams) == 1 else 3
    search = Search(Setup(4, depth=depth, max_num_seqs=3, streams=streams, max_requests=max_requests), kinds)
    next_of = {search._key(search._root): followers(search, search._root)}
    todo, num_again = [search._root], 0
    while todo and num_again < 600:
        world = todo.pop(0)
        for action in search._actions(world):
            following = clone(world, {})
            action.apply(following)
            key, found = search._key(following), followers(search, following)
            num_again += key in next_of
            assert next_of.setdefault(key, found) == found
            if found is next_of[key]:
                todo.append(following)
    assert num_again >= 100


def test_a_copy_goes_on_as_the_original_does_and_changes_nothing_of_it():
    world = World(Setup(8, depth=2, max_num_seqs=3, streams=ALL_STREAMS).build())
    for kind in (Kind(5, 4, "shared"), Kind(5, 6, "shared"), Kind(2, 3)):
        world.schedule(kind)
        world.update()
        while world.scheduler.has_prefill_in_running:
            world.schedule()
            world.update()
    assert len(world.scheduler.running) == 3
    for _ in range(3):
        key = world.key()
        copied, deep = clone(world, {}), copy.deepcopy(world)
        for other in (copied, deep):
            assert other.key() == key
            other.schedule()
            other.update()
            other.scheduler.check_integrity()
        assert copied.key() == deep.key()
        assert world.key() == key
        world.schedule()
        world.update()
        assert world.key() == copied.key()
