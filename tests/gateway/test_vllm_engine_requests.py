"""The parameters of the engine protocol of vLLM: each arrives, or is refused by the name that it was sent by."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb

from tests.gateway.scripted_scheduler import ScriptedScheduler
from tests.gateway.vllm_calls import EOS, PROMPT, answers, failure, ids_of, request, violated_field

pytestmark = pytest.mark.loopback


async def test_every_parameter_arrives(stub: Any, scheduler: ScriptedScheduler) -> None:
    scheduler.answer = [EOS]
    await answers(
        stub,
        request(
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            min_p=0.125,
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            repetition_penalty=1.5,
            max_tokens=9,
            min_tokens=1,
            stop_token_ids=[5],
            ignore_eos=True,
            seed=-3,
            logit_bias={4: 1.5},
        ),
    )
    sampling = (await scheduler.next_add()).spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 7, 0.125)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.5)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.ignore_eos, sampling.seed) == (9, 1, True, -3)
    assert list(sampling.stop_token_ids) == [5]
    assert [(entry.token_id, entry.bias) for entry in sampling.logit_bias] == [(4, 1.5)]
    assert not sampling.HasField("num_logprobs")


async def test_zero_is_unset_as_with_vllm_except_in_temperature(stub: Any, scheduler: ScriptedScheduler) -> None:
    scheduler.answer = [EOS]
    bare = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=PROMPT))
    await answers(stub, bare)
    sampling = (await scheduler.next_add()).spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (1.0, 1.0, 1.0)
    assert sampling.top_k in (0, -1)
    assert sampling.max_tokens == scheduler.default_max_tokens
    bare.sampling_params.temperature = 0.0
    await answers(stub, bare)
    assert (await scheduler.next_add()).spec.sampling.temperature == 0.0


async def test_what_only_text_needs_changes_nothing(stub: Any, scheduler: ScriptedScheduler) -> None:
    scheduler.answer = [*ids_of("abc"), EOS]
    params: dict[str, Any] = {"spaces_between_special_tokens": True, "include_stop_str_in_output": True, "stop": ["b"]}
    (response,) = await answers(stub, request(**params))
    assert list(response.complete.output_ids) == ids_of("ab")


UNSUPPORTED = [
    ("sampling_params.prompt_logprobs", {"prompt_logprobs": 1}),
    ("sampling_params.truncate_prompt_tokens", {"truncate_prompt_tokens": -1}),
    ("sampling_params.json_schema", {"json_schema": "{}"}),
    ("sampling_params.regex", {"regex": "a"}),
    ("sampling_params.grammar", {"grammar": "a"}),
    ("sampling_params.structural_tag", {"structural_tag": "a"}),
    ("sampling_params.json_object", {"json_object": True}),
    ("sampling_params.choice", {"choice": pb.ChoiceConstraint(choices=["a"])}),
]
UNSUPPORTED_BESIDE = [
    ("kv_transfer_params", {"kv_transfer_params": pb.KvTransferParams(remote_host="x")}),
    ("kv_transfer_params_json", {"kv_transfer_params_json": "{}"}),
    ("mm_inputs", {"mm_inputs": pb.MultimodalInputs()}),
    ("extra_mm_inputs", {"extra_mm_inputs": [pb.MultimodalInputs()]}),
    ("media_refs", {"media_refs": pb.MediaRefs(items=[pb.MediaRef(url="http://169.254.169.254/")])}),
    ("data_parallel_rank", {"data_parallel_rank": 1}),
]


@pytest.mark.case("B74", "B75")
@pytest.mark.parametrize(("field", "params"), UNSUPPORTED)
async def test_a_parameter_that_is_not_supported_is_refused_by_name(
    stub: Any, scheduler: ScriptedScheduler, field: str, params: dict[str, Any]
) -> None:
    error = await failure(stub.Generate(request(**params), timeout=60))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in (error.details() or "")
    assert violated_field(error) == field
    assert scheduler.adds.empty()


@pytest.mark.case("B74")
@pytest.mark.parametrize(("field", "fields"), UNSUPPORTED_BESIDE)
async def test_an_input_that_is_not_supported_is_refused_by_name(
    stub: Any, scheduler: ScriptedScheduler, field: str, fields: dict[str, Any]
) -> None:
    message = request()
    message.MergeFrom(pb.GenerateRequest(**fields))
    error = await failure(stub.Generate(message, timeout=60))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_field(error) == field
    assert scheduler.adds.empty()


async def test_rank_zero_is_the_only_one(stub: Any, scheduler: ScriptedScheduler) -> None:
    scheduler.answer = [EOS]
    message = request()
    message.data_parallel_rank = 0
    (response,) = await answers(stub, message)
    assert response.complete.finish_reason == "stop"


@pytest.mark.case("B30", "B35", "B70")
@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": -1.0}, "sampling_params.temperature"),
        ({"top_p": 1.5}, "sampling_params.top_p"),
        ({"logprobs": 21}, "sampling_params.logprobs"),
        ({"logprobs": -1}, "sampling_params.logprobs"),
        ({"max_tokens": 0}, "sampling_params.max_tokens"),
        ({"n": 129}, "sampling_params.n"),
        ({"stop": [""]}, "sampling_params.stop[0]"),
        ({"stop": ["x"] * 17}, "sampling_params.stop"),
        ({"stop_token_ids": [1, 512]}, "sampling_params.stop_token_ids[1]"),
        ({"logit_bias": {-1: 1.0}}, "sampling_params.logit_bias"),
        ({"logit_bias": {1: 101.0}}, "sampling_params.logit_bias[0].bias"),
    ],
)
async def test_a_value_out_of_range_is_refused_under_the_name_it_was_sent_by(
    stub: Any, params: dict[str, Any], field: str
) -> None:
    error = await failure(stub.Generate(request(**params), timeout=60))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_field(error) == field
    assert (error.details() or "").startswith(field)


async def test_biases_are_counted_before_they_are_looked_at(stub: Any) -> None:
    error = await failure(stub.Generate(request(logit_bias=dict.fromkeys(range(-1, 1024), 1.0)), timeout=60))
    assert error.details() == "sampling_params.logit_bias has 1025 entries; allowed: [0, 1024]"


async def test_token_ids_are_named_as_they_were_sent(stub: Any) -> None:
    message = request()
    message.tokenized.input_ids.append(512)
    error = await failure(stub.Generate(message, timeout=60))
    assert violated_field(error) == "tokenized.input_ids[3]"
    error = await failure(stub.Generate(pb.GenerateRequest(), timeout=60))
    assert (error.code(), violated_field(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "input")
    assert error.details() == "input is not set; allowed: text or tokenized"


async def test_a_huge_top_k_keeps_all_tokens(stub: Any, scheduler: ScriptedScheduler) -> None:
    scheduler.answer = [EOS]
    await answers(stub, request(top_k=2**32 - 1))
    assert (await scheduler.next_add()).spec.sampling.top_k == 2**31 - 1
