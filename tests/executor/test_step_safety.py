"""Steps that a correct scheduler never sends, on a real model: each is refused or harms nobody.

KV memory that no request owns is NaN, and what requests own is known bit by bit. Then comes a step that was right and
has been changed in one or two places. Whatever the executor makes of it, only the places that the step's own requests
compute may differ afterwards, apart from the sink, and none of them belongs to a request that is not in the step.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor_svc.devices.cpu import CpuDevice
from executor_svc.runner import NeuronModelRunner
from holdback.errors import InternalError
from holdback.types import CachedRequestsData, NewRequestData, Phase, RequestSpec, SchedulerOutput
from tests.executor.builders import Steps
from tests.executor.tiny_models import BLOCK_SIZE, VOCAB_SIZE, build_device, save_model

NUM_BLOCKS = 32
BLOCKS = {"decoding": [5, 9], "prefilling": [2, 30, 11], "other": [20, 21]}
PROMPTS = {"decoding": list(range(10, 16)), "prefilling": list(range(20, 31)), "other": list(range(40, 46))}


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> CpuDevice:
    return build_device(save_model(tmp_path_factory.mktemp("models") / "tiny"), num_blocks=NUM_BLOCKS)


class Scene:
    """Three requests that run: one decodes, one is at 8 of 11 prompt tokens, a third one decodes and is left alone."""

    def __init__(self, device: CpuDevice) -> None:
        self.runner = NeuronModelRunner(device)
        self.runner.reset()
        self.steps = Steps()
        self.pages = [*device.kv_cache.keys, *device.kv_cache.values]
        for page in self.pages:
            page.fill_(float("nan"))
        for slot, (req_id, blocks) in enumerate(BLOCKS.items()):
            count = 8 if req_id == "prefilling" else 6
            step = self.steps.new(req_id, PROMPTS[req_id], slot=slot, blocks=blocks, num_tokens=count, padded=8)
            assert self.runner.execute(step).failed_rows == []
        self.before = [page.clone() for page in self.pages]

    def changed_places(self) -> set[tuple[int, int]]:
        """(block, offset) of every place whose keys or values differ from before, by their bits; the sink left out."""
        found: set[tuple[int, int]] = set()
        for page, old in zip(self.pages, self.before, strict=True):
            differs = (page.view(torch.int32) != old.view(torch.int32)).flatten(2).any(dim=2)[:NUM_BLOCKS]
            found |= {(int(block), int(offset)) for block, offset in differs.nonzero()}
        return found

    def good_steps(self) -> dict[str, SchedulerOutput]:
        steps = copy.deepcopy(self.steps)
        return {
            "decode": copy.deepcopy(steps).decode("decoding"),
            "decode two": copy.deepcopy(steps).decode("other", "decoding"),
            "chunk": copy.deepcopy(steps).chunk("prefilling", 3, padded=8),
            "new": copy.deepcopy(steps).new("new", list(range(50, 57)), slot=3, blocks=[7, 8], padded=8),
            "hit": copy.deepcopy(steps).new(
                "new", [*PROMPTS["decoding"][:4], 60, 61], slot=3, blocks=[5, 8], computed=4, padded=8
            ),
        }


# Places that each good step computes, worked out by hand: block tables above, 4 tokens a block.
COMPUTED = {
    "decode": {(9, 2)},
    "decode two": {(9, 2), (21, 2)},
    "chunk": {(11, 0), (11, 1), (11, 2)},
    "new": {(7, 0), (7, 1), (7, 2), (7, 3), (8, 0), (8, 1), (8, 2)},
    "hit": {(8, 0), (8, 1)},
}


@pytest.mark.case("B22", "B26")
@pytest.mark.parametrize("name", list(COMPUTED))
def test_a_good_step_writes_its_own_places_and_reads_nobody_elses(name: str, device: CpuDevice) -> None:
    scene = Scene(device)
    assert scene.runner.execute(scene.good_steps()[name]).failed_rows == []
    assert scene.changed_places() == COMPUTED[name]


# What is changed

COUNTS = st.one_of(st.integers(-2, 20), st.sampled_from([-(2**31), 64, 65, 2**31 - 1, 2**32, 2**63]))
OWNED_OR_FREE = st.lists(st.sampled_from([2, 5, 7, 8, 9, 11, 20, 21, 30]), min_size=2, max_size=3)
BLOCK_LISTS = OWNED_OR_FREE | st.lists(st.integers(0, NUM_BLOCKS) | st.sampled_from([-1, 2**31]), max_size=18)
TOKENS = st.lists(st.integers(-1, VOCAB_SIZE), max_size=70)
REQ_IDS = st.sampled_from([*BLOCKS, "new", "nobody", ""])
Change = Callable[[SchedulerOutput], SchedulerOutput]


def with_new(**changes: Any) -> Change:
    def change(output: SchedulerOutput) -> SchedulerOutput:
        if output.scheduled_new_reqs:
            output.scheduled_new_reqs = [dataclasses.replace(output.scheduled_new_reqs[0], **changes)]
        return output

    return change


def with_step(**changes: Any) -> Change:
    return lambda output: dataclasses.replace(output, **changes)


def with_cached(**changes: Any) -> Change:
    return lambda output: dataclasses.replace(
        output, scheduled_cached_reqs=dataclasses.replace(output.scheduled_cached_reqs, **changes)
    )


def with_counts(field: str, req_id: str, count: int) -> Change:
    return lambda output: dataclasses.replace(output, **{field: getattr(output, field) | {req_id: count}})


def with_another_new(new: NewRequestData) -> Change:
    def change(output: SchedulerOutput) -> SchedulerOutput:
        output.scheduled_new_reqs = [*output.scheduled_new_reqs, new]
        output.num_scheduled_tokens = output.num_scheduled_tokens | {new.req_id: 1}
        return output

    return change


def specs(tokens: list[int]) -> RequestSpec:
    return RequestSpec("new", tokens)


NEW_REQUESTS = st.builds(NewRequestData, REQ_IDS, TOKENS.map(specs), st.integers(-1, 4), BLOCK_LISTS, COUNTS)
CHANGES: st.SearchStrategy[Change] = st.one_of(
    st.builds(lambda slot: with_new(slot=slot), COUNTS),
    st.builds(lambda blocks: with_new(block_ids=blocks), OWNED_OR_FREE),
    st.builds(lambda blocks: with_new(block_ids=blocks), BLOCK_LISTS),
    st.builds(lambda count: with_new(num_computed_tokens=count), COUNTS),
    st.builds(lambda req_id: with_new(req_id=req_id), REQ_IDS),
    st.builds(lambda tokens: with_new(spec=specs(tokens)), TOKENS),
    st.builds(lambda new: with_another_new(new), NEW_REQUESTS),
    st.builds(lambda counts: with_cached(num_computed_tokens=counts), st.lists(COUNTS, max_size=3)),
    st.builds(lambda blocks: with_cached(new_block_ids=blocks), st.lists(st.none() | BLOCK_LISTS, max_size=3)),
    st.builds(lambda req_ids: with_cached(req_ids=req_ids), st.lists(REQ_IDS, max_size=3)),
    st.builds(with_counts, st.just("num_scheduled_tokens"), REQ_IDS, COUNTS),
    st.builds(with_counts, st.just("num_scheduled_tokens_padded"), REQ_IDS, COUNTS),
    st.builds(lambda phase: with_step(phase=phase), st.sampled_from([*Phase, None])),
    st.builds(lambda req_ids: with_step(finished_req_ids=req_ids), st.lists(REQ_IDS, max_size=3)),
    st.builds(lambda: with_step(scheduled_cached_reqs=CachedRequestsData())),
    st.builds(lambda: with_step(scheduled_new_reqs=[])),
)


def places_of(output: SchedulerOutput, tables: dict[str, list[int]]) -> set[tuple[int, int]]:
    """What a step that was run may have written: of each of its requests what comes after what was computed."""
    told = {new.req_id: (new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs}
    known = {req_id: (tables[req_id], 8 if req_id == "prefilling" else 6) for req_id in BLOCKS}
    for req_id, blocks in zip(
        output.scheduled_cached_reqs.req_ids, output.scheduled_cached_reqs.new_block_ids, strict=True
    ):
        known[req_id] = ([*known[req_id][0], *(blocks or [])], known[req_id][1])
    found = set()
    for req_id, count in output.num_scheduled_tokens.items():
        table, start = told.get(req_id) or known[req_id]
        found |= {(table[place // BLOCK_SIZE], place % BLOCK_SIZE) for place in range(start, start + count)}
    return found


@pytest.mark.case("B26", "B35")
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from([*COMPUTED, "new", "hit"]), changes=st.lists(CHANGES, min_size=1, max_size=2))
def test_a_step_changed_anyhow_is_refused_or_computes_for_its_own_requests_alone(
    name: str, changes: list[Change], device: CpuDevice
) -> None:
    scene = Scene(device)
    output = scene.good_steps()[name]
    for change in changes:
        output = change(output)
    own = {block for req_id in BLOCKS if req_id not in output.finished_req_ids for block in BLOCKS[req_id]}
    others = own - {block for req_id in output.num_scheduled_tokens for block in BLOCKS.get(req_id, [])}
    try:
        scene.runner.execute(copy.deepcopy(output))
    except InternalError:
        assert scene.changed_places() == set()
    else:
        changed = scene.changed_places()
        assert changed <= places_of(output, BLOCKS)
        assert not {block for block, _ in changed} & others
    scene.runner.reset()
    assert not any(page.any() for page in [*device.kv_cache.keys, *device.kv_cache.values])


# By name


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("new", with_new(block_ids=[7, 9]), "block to write to is 9; allowed: one that no block table has"),
        ("new", with_new(block_ids=[7, 7]), "block to write to is 7; allowed: one that no block table has"),
        ("hit", with_new(block_ids=[5, 5]), "block to write to is 5; allowed: one that no block table has"),
        ("hit", with_new(block_ids=[5, 30]), "block to write to is 30; allowed: one that no block table has"),
        ("decode", with_cached(new_block_ids=[[20]]), "block to write to is 20; allowed: one that no block table has"),
        ("decode", with_cached(new_block_ids=[[9]]), "block to write to is 9; allowed: one that no block table has"),
        ("decode", with_cached(new_block_ids=[[32]]), r"block is 32; allowed: \[1, 32\)"),
        ("chunk", with_cached(new_block_ids=[[-1]]), r"block is -1; allowed: \[1, 32\)"),
        ("chunk", with_counts("num_scheduled_tokens", "prefilling", 9), r"num_scheduled_tokens of 'prefilling' is 9"),
        ("chunk", with_counts("num_scheduled_tokens", "prefilling", -3), r"num_scheduled_tokens of 'prefilling' is -3"),
        ("chunk", with_counts("num_scheduled_tokens_padded", "prefilling", 3), "prefill shape is 3; allowed: the decl"),
        ("decode", with_counts("num_scheduled_tokens", "decoding", 2), "num_scheduled_tokens of a decode is"),
        ("decode", with_step(phase=Phase.PREFILL), "allowed: decode, for all its tokens are computed"),
        (
            "chunk",
            with_step(
                phase=Phase.DECODE,
                num_scheduled_tokens={"prefilling": 1},
                num_scheduled_tokens_padded={"prefilling": 1},
            ),
            "allowed: prefill, for it has tokens left to prefill",
        ),
        ("new", with_new(spec=specs([50, VOCAB_SIZE])), f"token id is {VOCAB_SIZE}; allowed: "),
        ("new", with_new(spec=specs([50, -1])), "token id is -1; allowed: "),
        ("new", with_new(slot=2), "slot is 2; allowed: one that no running request has"),
        ("new", with_new(slot=-1), r"slot is -1; allowed: \[0, 4\)"),
        ("new", with_step(num_scheduled_tokens={}, num_scheduled_tokens_padded={}, phase=None), "phase is none"),
        ("decode", with_step(num_scheduled_tokens={}, num_scheduled_tokens_padded={}, phase=None), "phase is none"),
    ],
)
def test_a_step_that_would_harm_somebody_is_refused_with_the_reason(
    name: str, change: Change, message: str, device: CpuDevice
) -> None:
    scene = Scene(device)
    with pytest.raises(InternalError, match=message):
        scene.runner.execute(change(scene.good_steps()[name]))
    assert scene.changed_places() == set()


def test_a_block_is_free_again_once_its_last_holder_has_finished(device: CpuDevice) -> None:
    scene = Scene(device)
    scene.runner.execute(scene.good_steps()["hit"])
    holders = scene.runner.requests.num_holders
    assert (holders[5], holders[9], holders[8]) == (2, 1, 1)
    reuse = Steps().new("next", PROMPTS["other"], slot=2, blocks=[20, 9], padded=8, finished=["other", "decoding"])
    scene.runner.execute(reuse)
    assert (holders[5], holders[9], holders[21]) == (1, 1, 0)
    with pytest.raises(InternalError, match="block to write to is 5"):
        scene.runner.execute(Steps().new("late", [50], slot=0, blocks=[5], padded=8))


def test_after_a_refused_step_and_a_reset_every_block_is_free(device: CpuDevice) -> None:
    scene = Scene(device)
    with pytest.raises(InternalError, match="block to write to is 9"):
        scene.runner.execute(with_new(block_ids=[7, 9])(scene.good_steps()["new"]))
    scene.runner.reset()
    assert not scene.runner.requests.num_holders.any()
