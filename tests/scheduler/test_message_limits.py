"""The largest messages that legal sizes allow fit the one limit; what does not fit is refused before it is sent."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from holdback import codec, rpc
from holdback.errors import InvalidArgumentError
from holdback.types import (
    ExecutorInfo,
    ModelRunnerOutput,
    NewRequestData,
    Phase,
    RequestSpec,
    SamplingParams,
    SchedulerOutput,
    TokenLogprobs,
)
from holdback.v1 import executor_pb2
from scheduler_svc import limits, outbox, registration_check
from scheduler_svc.limits import check_counts, check_sizes
from scheduler_svc.registration_check import check_info
from scheduler_svc.server import SchedulerServer
from tests.scheduler.parts import answer_of, build_info, build_spec
from tests.scheduler.stubs import StubExecutor, StubGateway

pytestmark = pytest.mark.case("B54")

Serve = Callable[..., Awaitable[SchedulerServer]]
LARGEST_TOKEN = 2**31 - 1


def is_accepted(info: ExecutorInfo) -> bool:
    with contextlib.suppress(InvalidArgumentError):
        check_info(info)
        return True
    return False


def with_sizes(max_model_len: int, vocab_size: int, block_size: int, num_blocks: int) -> ExecutorInfo:
    info = build_info(block_size=block_size, num_blocks=num_blocks)
    return replace(info, model=replace(info.model, max_model_len=max_model_len, vocab_size=vocab_size))


def message_of(output: SchedulerOutput) -> executor_pb2.ExecuteRequest:
    return executor_pb2.ExecuteRequest(step=codec.StepEncoder().encode(output))


@pytest.mark.parametrize("vocab_size", [2**14, 2**14 + 1, 2**31])
@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 2**22), (16, 2**14), (16, 2**20), (4096, 1000)])
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
    most = limits.MAX_LIST_ENTRIES
    token_ids = tuple(range(LARGEST_TOKEN - most, LARGEST_TOKEN))
    sampling = SamplingParams(
        stop_token_ids=token_ids,
        allowed_token_ids=token_ids,
        logit_bias=dict.fromkeys(token_ids, -1.5),
        num_logprobs=limits.MAX_NUM_LOGPROBS,
    )
    spec = RequestSpec("r" * 256, [LARGEST_TOKEN], sampling, cache_salt="s" * 256)
    check_sizes(spec)
    check_counts(codec.encode_spec(spec), None)
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


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_longer_lists_are_refused(name: str) -> None:
    sampling = replace(SamplingParams(), **{name: (1,) * (limits.MAX_LIST_ENTRIES + 1)})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=f"sampling.{name} is '65537 entries'; allowed: at most 65536"):
        check_counts(codec.encode_spec(RequestSpec("r", [1], sampling)), None)


def test_more_log_probabilities_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="num_logprobs is 65"):
        check_sizes(RequestSpec("r", [1], SamplingParams(num_logprobs=65)))


def largest_logprobs(count: int) -> TokenLogprobs:
    return TokenLogprobs(LARGEST_TOKEN, -1.5, (LARGEST_TOKEN,) * count, (-1.5,) * count)


def test_a_result_with_the_most_rows_and_log_probabilities_fits() -> None:
    # 64 rows of the longest kind, and as many times as there may be rows.
    rows = 64
    output = ModelRunnerOutput(2**40, [LARGEST_TOKEN] * rows, [largest_logprobs(limits.MAX_NUM_LOGPROBS)] * rows)
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
    bytes_of_token = 3 * 5 + 8 + len(codec.encode_logprobs(largest_logprobs(64)).SerializeToString())
    bytes_of_start, bytes_of_end = 256, 2048
    most = outbox.MAX_TOKENS_PER_MESSAGE * bytes_of_token
    most += outbox.MAX_REQUESTS_PER_MESSAGE * (bytes_of_start + bytes_of_end)
    assert most < rpc.MAX_MESSAGE_BYTES


def test_a_registration_that_could_not_be_served_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match=r"model.max_model_len is '16777216, with .* bytes of token and"):
        check_info(with_sizes(2**24, 2**31, 16, 2**21))


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
