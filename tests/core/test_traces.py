"""The scheduler decides what vLLM's own scheduler decided under the same rules, step by step.

`traces/` holds recorded traces: a configuration, events, and what was decided. Fields that are empty or unchanged since
the step before are left out there. Compared twice: what an implementation must decide, and then the block ids as well.
"""

import json
from pathlib import Path

import pytest

from scheduler_svc.replay import replay_trace

TRACES = sorted((Path(__file__).parent / "traces").glob("*.json"))
DECIDED = [json.loads(path.read_text(encoding="utf-8")) for path in TRACES]
REFUSED = [trace for trace in DECIDED if trace["expected"]["error"]]
ACCEPTED = [trace for trace in DECIDED if not trace["expected"]["error"]]


def each_of(traces):
    return pytest.mark.parametrize("trace", traces, ids=[trace["name"] for trace in traces])


def expected_steps(recorded):
    """The recorded steps in full, in the comparable form of `comparable`."""
    waiting: list[str] = []
    running: list[str] = []
    padding = 0
    for step in recorded["steps"]:
        waiting = step.get("waiting", waiting)
        running = step.get("running", running)
        padding = step.get("pad_total", padding)
        cached = step.get("scheduled_cached_reqs") or {"req_ids": [], "num_computed_tokens": []}
        new = step.get("scheduled_new_reqs", [])
        one_each = dict.fromkeys([*cached["req_ids"], *(request["id"] for request in new)], 1)
        scheduled = step.get("num_scheduled_tokens", one_each)
        new_blocks = cached.get("new_block_ids") or [None] * len(cached["req_ids"])
        yield {
            "state": step["state"],
            "new": [(request["id"], request["num_computed_tokens"], request["block_ids"]) for request in new],
            "cached": list(
                zip(
                    cached["req_ids"],
                    cached["num_computed_tokens"],
                    [blocks or [] for blocks in new_blocks],
                    strict=True,
                )
            ),
            "scheduled": scheduled,
            "padded": step.get("num_scheduled_tokens_padded", scheduled),
            "finished": sorted(step.get("finished_req_ids", [])),
            "free_after_schedule": step["free_after_schedule"],
            "outputs": [unpack_output(output) for output in step.get("outputs", [])],
            "waiting": waiting,
            "running": running,
            "free": step.get("free", step["free_after_schedule"]),
            "padding": padding,
        }


def unpack_output(packed):
    if len(packed) == 2:
        return (packed[0], [packed[1]], None, None)
    return tuple(packed)


def comparable(step):
    cached = step["scheduled_cached_reqs"]
    return {
        "state": step["state"],
        "new": [(new["id"], new["num_computed_tokens"], new["block_ids"]) for new in step["scheduled_new_reqs"]],
        "cached": list(
            zip(
                cached["req_ids"],
                cached["num_computed_tokens"],
                [blocks or [] for blocks in cached["new_block_ids"]],
                strict=True,
            )
        ),
        "scheduled": step["num_scheduled_tokens"],
        "padded": step["num_scheduled_tokens_padded"],
        "finished": sorted(step["finished_req_ids"]),
        "free_after_schedule": step["num_free_blocks_after_schedule"],
        "outputs": [(o["id"], o["new_token_ids"], o["finish_reason"], o["stop_reason"]) for o in step["outputs"]],
        "waiting": step["waiting"],
        "running": step["running"],
        "free": step["num_free_blocks"],
        "padding": step["total_padding_tokens"],
    }


def without_block_ids(step):
    return {
        **step,
        "new": [(req_id, num_computed, len(blocks)) for req_id, num_computed, blocks in step["new"]],
        "cached": [(req_id, num_computed, len(blocks)) for req_id, num_computed, blocks in step["cached"]],
    }


def test_there_are_traces_of_both_schedulers_and_of_refusals():
    modes = [trace["trace"]["config"]["async_scheduling"] for trace in ACCEPTED]
    assert (modes.count(False), modes.count(True), len(REFUSED)) == (40, 20, 4)


@each_of(REFUSED)
def test_a_configuration_that_was_refused_is_refused(trace):
    result = replay_trace(trace["trace"])
    assert result["error"]
    assert (result["init"], result["steps"]) == (None, [])


@each_of(ACCEPTED)
def test_every_step_is_decided_as_recorded(trace):
    result = replay_trace(trace["trace"])
    assert result["error"] is None
    assert result["init"] == trace["expected"]["init"]
    expected = list(expected_steps(trace["expected"]))
    assert len(result["steps"]) == len(expected)
    for index, (step, want) in enumerate(zip(result["steps"], expected, strict=True)):
        got = json.loads(json.dumps(without_block_ids(comparable(step))))
        assert got == json.loads(json.dumps(without_block_ids(want))), f"step {index}"
    assert sorted(result["unfinished"]) == sorted(trace["expected"]["unfinished"])


@each_of(ACCEPTED)
def test_the_recorded_blocks_are_handed_out(trace):
    """Stricter than it must be: which free block is taken is free, but the documented order gives these."""
    result = replay_trace(trace["trace"])
    for index, (step, want) in enumerate(zip(result["steps"], expected_steps(trace["expected"]), strict=True)):
        got = comparable(step)
        assert (got["new"], got["cached"]) == (want["new"], want["cached"]), f"step {index}"


@each_of([trace for trace in ACCEPTED if not trace["trace"]["config"]["enable_prefix_caching"]])
def test_without_prefix_caching_no_block_is_in_two_block_tables(trace):
    """Told by the outputs alone, as an executor would see it."""
    num_blocks = trace["trace"]["config"]["num_blocks"]
    block_tables: dict[str, list[int]] = {}
    for step in map(comparable, replay_trace(trace["trace"])["steps"]):
        for req_id in step["finished"]:
            block_tables.pop(req_id, None)
        for req_id, _, block_ids in [*step["new"], *step["cached"]]:
            block_tables[req_id] = block_tables.get(req_id, []) + block_ids
        held = [block_id for block_ids in block_tables.values() for block_id in block_ids]
        assert len(held) == len(set(held))
        assert all(0 < block_id < num_blocks for block_id in held)
