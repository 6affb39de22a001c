"""The largest messages that legal sizes allow fit the one limit; what does not fit is refused before it is sent."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from holdback import codec, rpc
from holdback.errors import InvalidArgumentError
from holdback.request_limits import (
    MAX_CACHE_SALT_BYTES,
    MAX_NUM_LOGPROBS,
    MAX_REQUEST_ID_BYTES,
    MAX_TOKEN_ID_LIST,
    MAX_TRACE_BYTES,
)
from holdback.types import (
    ExecutorInfo,
    ModelRunnerOutput,
    NewRequestData,
    Phase,
    RequestSpec,
    SamplingParams,
    SchedulerOutput,
    TokenLogprobs,
    TraceContext,
)
from holdback.v1 import executor_pb2
from scheduler_svc import limits, outbox, registration_check
from scheduler_svc.limits import check_message, check_sizes
from scheduler_svc.registration_check import check_info
from scheduler_svc.server import SchedulerServer
from tests.scheduler.parts import answer_of, build_info, build_spec
from tests.scheduler.stubs import StubExecutor, StubGateway

pytestmark = pytest.mark.case("B54")

Serve = Callable[..., Awaitable[SchedulerServer]]
LARGEST_TOKEN = 2**31 - 1
MAX_STEP_TIMEOUT_S = 600


def is_accepted(info: ExecutorInfo) -> bool:
    with contextlib.suppress(InvalidArgumentError):
        check_info(info, MAX_STEP_TIMEOUT_S)
        return True
    return False


def with_sizes(max_model_len: int, vocab_size: int, block_size: int, num_blocks: int) -> ExecutorInfo:
    info = build_info(block_size=block_size, num_blocks=num_blocks)
    return replace(info, model=replace(info.model, max_model_len=max_model_len, vocab_size=vocab_size))


def message_of(output: SchedulerOutput) -> executor_pb2.ExecuteRequest:
    return executor_pb2.ExecuteRequest(step=codec.StepEncoder().encode(output))


@pytest.mark.parametrize("vocab_size", [2**14, 2**14 + 1, 2**31])
@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 2**20), (16, 2**14), (16, 2**20), (4096, 1000)])
def test_the_longest_prompt_that_is_accepted_fits_with_its_block_table(
    vocab_size: int, block_size: int, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The same at a sixty-fourth of the size.
    monkeypatch.setattr(rpc, "MAX_MESSAGE_BYTES", 2**20)
    monkeypatch.setattr(registration_check, "SPARE_MESSAGE_BYTES", 2**10)
    accepted, refused = 2, 2**24
    while refused - accepted > 1:
        middle = (accepted + refused) // 2
        if is_accepted(with_sizes(middle, vocab_size, block_size, num_blocks)):
            accepted = middle
        else:
            refused = middle
    prompt = [vocab_size - 1] * (accepted - 1)
    table = [num_blocks - 1] * -(-accepted // block_size)
    new = NewRequestData("0/r", RequestSpec("r" * 256, prompt), 1, table)
    output = SchedulerOutput(scheduled_new_reqs=[new], num_scheduled_tokens={"0/r": 512}, phase=Phase.PREFILL)
    output.num_scheduled_tokens_padded = {"0/r": 512}
    size = message_of(output).ByteSize()
    assert 0.8 * 2**20 < size <= 2**20


def test_what_a_step_says_beside_that_fits_into_what_is_spared() -> None:
    most = MAX_TOKEN_ID_LIST
    token_ids = tuple(range(LARGEST_TOKEN - most, LARGEST_TOKEN))
    sampling = SamplingParams(
        stop_token_ids=token_ids,
        allowed_token_ids=token_ids,
        logit_bias=dict.fromkeys(token_ids, -1.5),
        seed=-(2**63),
        max_tokens=2**31 - 1,
        min_tokens=2**31 - 1,
        num_logprobs=MAX_NUM_LOGPROBS,
    )
    spec = RequestSpec(
        "r" * MAX_REQUEST_ID_BYTES,
        [LARGEST_TOKEN],
        sampling,
        generation=2**32 - 1,
        priority=-(2**31),
        cache_salt="s" * MAX_CACHE_SALT_BYTES,
        deadline_ms=2**64 - 1,
        queued_ms=limits.MAX_QUEUED_MS,
        trace=TraceContext("p" * MAX_TRACE_BYTES, "s" * MAX_TRACE_BYTES),
    )
    check_sizes(spec)
    check_message(codec.encode_spec(spec), None)
    output = SchedulerOutput(
        scheduled_new_reqs=[NewRequestData("0/r", spec, 1, [1])],
        num_scheduled_tokens={"0/r": 1},
        num_scheduled_tokens_padded={"0/r": 1},
        finished_req_ids=[],
        phase=Phase.PREFILL,
    )
    bytes_of_row = 5 + 5 + 5 + 5 + 5  # handle, count, row and id of a new block, finished handle
    assert (
        message_of(output).ByteSize() + registration_check.MAX_NUM_SEQS * bytes_of_row
        < registration_check.SPARE_MESSAGE_BYTES
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": -5}, "sampling.top_k is -5; allowed: at least 1; 0 or -1 for all"),
        ({"top_p": math.nan}, "sampling.top_p is nan; allowed: [0, 1]"),
        ({"temperature": math.inf}, "sampling.temperature is inf; allowed: [0, 1000]"),
        ({"repetition_penalty": 0.0}, "sampling.repetition_penalty is 0.0; allowed: (0, 10]"),
        ({"num_logprobs": 21}, "sampling.num_logprobs is 21; allowed: [0, 20]"),
        ({"max_tokens": 5, "min_tokens": 9}, "sampling.min_tokens is 9; allowed: at most max_tokens, which is 5"),
        ({"allowed_token_ids": ()}, "sampling.allowed_token_ids has 0 entries; allowed: [1, 1024]"),
        ({"allowed_token_ids": (1,) * 1025}, "sampling.allowed_token_ids has 1025 entries; allowed: [1, 1024]"),
        ({"stop_token_ids": (1,) * 1025}, "sampling.stop_token_ids has 1025 entries; allowed: [0, 1024]"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "sampling.logit_bias has 1025 entries; allowed: [0, 1024]"),
        ({"logit_bias": {5: 1e9}}, "sampling.logit_bias[0].bias is 1000000000.0; allowed: [-100, 100]"),
    ],
)
def test_sampling_that_no_executor_takes_is_refused(fields: dict[str, Any], message: str) -> None:
    spec = RequestSpec("r", [1], SamplingParams(**fields))
    with pytest.raises(InvalidArgumentError) as caught:
        check_message(codec.encode_spec(spec), None)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cache_salt": "s" * 257}, "spec.cache_salt has 257 bytes; allowed: at most 256"),
        ({"cache_salt": "\u00fc" * 129}, "spec.cache_salt has 258 bytes; allowed: at most 256"),
        ({"trace": TraceContext("p" * 513)}, "spec.trace_context.traceparent has 513 bytes; allowed: at most 512"),
        ({"trace": TraceContext("p", "s" * 513)}, "spec.trace_context.tracestate has 513 bytes; allowed: at most 512"),
    ],
)
def test_a_text_that_is_too_long_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        check_message(codec.encode_spec(RequestSpec("r", [1], **fields)), None)
    assert caught.value.message == message


def largest_logprobs(count: int) -> TokenLogprobs:
    return TokenLogprobs(LARGEST_TOKEN, -1.5, (LARGEST_TOKEN,) * count, (-1.5,) * count)


def test_a_result_with_the_most_rows_and_log_probabilities_fits() -> None:
    # 64 rows of the longest kind, and as many times as there may be rows.
    rows = 64
    output = ModelRunnerOutput(2**40, [LARGEST_TOKEN] * rows, [largest_logprobs(MAX_NUM_LOGPROBS)] * rows)
    size = executor_pb2.ExecuteResponse(output=codec.encode_runner_output(output)).ByteSize()
    assert size * registration_check.MAX_NUM_SEQS // rows < rpc.MAX_MESSAGE_BYTES


def test_the_tables_of_the_case_fit() -> None:
    new = [NewRequestData(f"{row}/r", build_spec(), row, [2**22 - 1] * 8192) for row in range(64)]
    counts = {request.req_id: 1 for request in new}
    output = SchedulerOutput(
        scheduled_new_reqs=new, num_scheduled_tokens=counts, num_scheduled_tokens_padded=counts, phase=Phase.PREFILL
    )
    assert message_of(output).ByteSize() < rpc.MAX_MESSAGE_BYTES


def test_a_full_message_to_a_gateway_fits() -> None:
    bytes_of_token = 3 * 5 + 8 + len(codec.encode_logprobs(largest_logprobs(MAX_NUM_LOGPROBS)).SerializeToString())
    bytes_of_start, bytes_of_end = 256, 2048
    most = outbox.MAX_TOKENS_PER_MESSAGE * bytes_of_token
    most += outbox.MAX_REQUESTS_PER_MESSAGE * (bytes_of_start + bytes_of_end)
    assert most < rpc.MAX_MESSAGE_BYTES


def test_a_registration_that_could_not_be_served_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match=r"model.max_model_len is '16777216, with .* bytes of token and"):
        check_info(with_sizes(2**24, 2**31, 16, 2**20), MAX_STEP_TIMEOUT_S)


@pytest.mark.loopback
async def test_a_prompt_beyond_the_usual_message_limit_is_served_and_one_too_long_refused(serve: Serve) -> None:
    server = await serve(max_num_queued_tokens=2**22)
    sizes: dict[str, Any] = {
        "max_model_len": 2**21,
        "num_blocks": 513,
        "block_size": 4096,
        "prefill_buckets": (2**20,),
        "vocab_size": 32_000,
    }
    prompt = [20_000 + i % 1000 for i in range(1_500_000)]  # three bytes each, 4.5 MB together
    async with StubExecutor(server.port, **sizes), StubGateway(server.port) as gateway:
        await gateway.until(lambda answers: bool(answers.pools) and answers.pools[-1].ready)
        await gateway.add(0, build_spec("long", prompt, max_tokens=2))
        await gateway.add(1, build_spec("too long", [20] * 2**21))
        await gateway.add(2, build_spec("short", [20], max_tokens=2))
        answers = await gateway.until_ended(0, 1, 2)
    assert answers[0].tokens == answer_of(prompt, 2)
    assert answers[1].error_reason == "PROMPT_TOO_LONG"
    assert answers[2].tokens == answer_of([20], 2)


@pytest.mark.loopback
async def test_what_no_executor_could_run_fails_alone_and_no_lane_is_reset(serve: Serve) -> None:
    server = await serve()
    sizes: dict[str, Any] = {"max_model_len": 1024, "num_blocks": 257}
    async with StubExecutor(server.port, **sizes) as executor, StubGateway(server.port) as gateway:
        await gateway.add(0, build_spec("innocent", [20], max_tokens=1000))
        await gateway.until(lambda answers: bool(answers[0].started))
        spec = build_spec("salted", [21])
        almost = rpc.MAX_MESSAGE_BYTES - codec.encode_spec(spec).ByteSize() - 64
        await gateway.add(1, replace(spec, cache_salt="s" * almost))
        await gateway.add(2, replace(build_spec("nan", [22]), sampling=SamplingParams(top_p=math.nan)))
        await gateway.add(3, replace(build_spec("none", [23]), sampling=SamplingParams(allowed_token_ids=())))
        answers = await gateway.until_ended(0, 1, 2, 3)
        assert not executor.ended.done()
    assert answers[0].tokens == answer_of([20], 1000)
    fields = {handle: ended.error.field for handle in (1, 2, 3) if (ended := answers[handle].ended) is not None}
    assert fields == {1: "spec.cache_salt", 2: "sampling.top_p", 3: "sampling.allowed_token_ids"}
    assert {answers[handle].error_reason for handle in fields} == {"INVALID_FIELD"}
