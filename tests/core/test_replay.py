"""`holdback replay`: what it prints, and what it says about files that are no traces."""

import json

import pytest

from holdback.cli import main
from holdback.errors import InvalidArgumentError
from scheduler_svc.replay import fnv1a_32, load_trace, replay_trace

CONFIG = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "max_model_len": 16,
    "block_size": 4,
    "num_blocks": 9,
    "num_batched_tokens_buckets": None,
    "enable_prefix_caching": False,
    "async_scheduling": False,
}
ADD = {"id": "a", "prompt_token_ids": [5, 6, 7], "max_tokens": 2, "ignore_eos": False}


def build_trace(*events, **changes):
    return {"config": {**CONFIG, **changes}, "events": list(events)}


def write(tmp_path, content):
    path = tmp_path / "trace.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def test_the_command_prints_the_result_as_json(tmp_path, capsys):
    path = write(tmp_path, {"name": "n", "trace": build_trace({"add": ADD}, {"step": {"n": 2}}, {"step": {}})})
    assert main(["replay", path]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["init"] == {"num_batched_tokens_buckets": [16], "max_kv_concurrent": 2, "num_free_blocks": 8}
    assert (result["error"], result["unfinished"]) == (None, [])
    token_id = 16 + fnv1a_32(b"a:0") % 31984
    assert result["steps"][0] == {
        "index": 0,
        "state": "ACTIVE_PREFILL",
        "scheduled_new_reqs": [{"id": "a", "num_computed_tokens": 0, "block_ids": [1]}],
        "scheduled_cached_reqs": {"req_ids": [], "num_computed_tokens": [], "new_block_ids": []},
        "num_scheduled_tokens": {"a": 3},
        "num_scheduled_tokens_padded": {"a": 16},
        "finished_req_ids": [],
        "num_free_blocks_after_schedule": 7,
        "outputs": [{"id": "a", "new_token_ids": [token_id], "finish_reason": None, "stop_reason": None}],
        "waiting": [],
        "running": ["a"],
        "num_free_blocks": 7,
        "total_padding_tokens": 13,
    }  # fmt: skip
    assert [step["state"] for step in result["steps"]] == ["ACTIVE_PREFILL", "ACTIVE_DECODE", "IDLE"]
    assert result["steps"][1]["outputs"][0]["finish_reason"] == "length"


def test_a_trace_that_is_not_wrapped_is_run_too(tmp_path):
    assert load_trace(write(tmp_path, build_trace())) == build_trace()


@pytest.mark.parametrize(("data", "expected"), [(b"", 0x811C9DC5), (b"a", 0xE40C292C), (b"foobar", 0xBF9CF968)])
def test_the_hash_is_fnv_1a(data, expected):
    assert fnv1a_32(data) == expected


def test_planned_endings_come_at_their_output():
    eos = {**ADD, "id": "eos", "max_tokens": 9, "eos_at": 2}
    stop = {**ADD, "id": "stop", "max_tokens": 9, "stop_token_ids": [7], "stop_at": 1}
    result = replay_trace(build_trace({"add": eos}, {"add": stop}, {"step": {"n": 4}}))
    outputs = [output for step in result["steps"] for output in step["outputs"]]
    assert outputs[1:3] == [
        {"id": "stop", "new_token_ids": [7], "finish_reason": "stop", "stop_reason": 7},
        {"id": "eos", "new_token_ids": [2], "finish_reason": "stop", "stop_reason": None},
    ]


def test_what_runs_or_waits_at_the_end_is_unfinished():
    adds = [{"add": {**ADD, "id": req_id, "prompt_token_ids": [ord(req_id)]}} for req_id in "abc"]
    result = replay_trace(build_trace(*adds, {"step": {"n": 2}}, max_num_seqs=2))
    assert result["unfinished"] == ["b", "a", "c"]


def test_a_refused_configuration_is_a_result_and_not_a_failure(tmp_path, capsys):
    assert main(["replay", write(tmp_path, build_trace(num_blocks=4))]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["init"], result["steps"]) == (None, [])
    assert "num_blocks is 4" in result["error"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "a JSON document"),
        ("[" * 100_000, "a JSON document"),
        ("[1]", "an object with `config` and `events`"),
        ({"config": CONFIG}, "an object with `config` and `events`"),
        ({"config": 1, "events": []}, "an object with `config` and `events`"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path, content, message):
    path = write(tmp_path, content)
    with pytest.raises(InvalidArgumentError, match=message) as info:
        load_trace(path)
    assert info.value.value.strip("'") in path


def test_a_missing_file_is_one_sentence_and_a_failure(tmp_path, capsys):
    assert main(["replay", str(tmp_path / "none.json")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("holdback replay: TRACE is ")
    assert "No such file" in error


@pytest.mark.parametrize(
    "event",
    [
        {},
        1,
        {"step": None},
        {"step": {"n": "x"}},
        {"add": {}},
        {"add": {**ADD, "prompt_token_ids": None}},
        {"add": {**ADD, "stop_at": 1}},
        {"add": {"id": "a", "max_tokens": 1, "prompt_ranges": [[1]]}},
    ],
    ids=str,
)
def test_an_event_that_is_none_is_refused_by_its_place(event):
    with pytest.raises(InvalidArgumentError, match=r"events\[1\] is .*an event of a trace"):
        replay_trace(build_trace({"step": {}}, event))


@pytest.mark.parametrize(
    "config", [{}, {**CONFIG, "surprise": 1}, {**CONFIG, "max_num_seqs": "2"}], ids=["empty", "more", "kind"]
)
def test_a_configuration_that_is_none_is_refused(config):
    with pytest.raises(InvalidArgumentError, match=r"config is .*the fields of a trace"):
        replay_trace({"config": config, "events": []})


def test_a_prompt_of_any_length_is_refused_without_being_made():
    huge = {**ADD, "prompt_ranges": [[0, 10**15]]}
    del huge["prompt_token_ids"]
    with pytest.raises(InvalidArgumentError, match=r"16 tokens.*allowed: \[1, 16\)"):
        replay_trace(build_trace({"add": huge}))
