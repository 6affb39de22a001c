"""Results that do not fit what was asked: refused before they cost anything, and before any of them is believed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Awaitable, Callable, Sequence

import pytest

from holdback import codec
from holdback.errors import InternalError
from holdback.request_limits import MAX_NUM_LOGPROBS
from holdback.types import ModelRunnerOutput, TokenLogprobs
from scheduler_svc.core.request import Request
from scheduler_svc.output_check import check_message, max_message_bytes
from scheduler_svc.server import SchedulerServer
from tests.scheduler.parts import EOS, VOCAB_SIZE, answer_of, build_info, build_spec
from tests.scheduler.stubs import StubExecutor, StubGateway

Serve = Callable[..., Awaitable[SchedulerServer]]


def check(logprobs: Sequence[TokenLogprobs | None], *, tokens: Sequence[int] = (7, 8), failed: Sequence[int] = ()):
    """Row 0 asked for two of the most likely tokens, row 1 for none at all."""
    rows = [Request(f"{n}/r", build_spec(num_logprobs=count), (EOS,)) for n, count in enumerate((2, None))]
    output = ModelRunnerOutput(3, list(tokens), list(logprobs), list(failed))
    check_message(codec.encode_runner_output(output), build_info(), rows)


@pytest.mark.parametrize(
    "entry",
    [
        TokenLogprobs(7, -0.5, (7, 9), (-0.5, -1.5)),
        TokenLogprobs(7, -math.inf, (1, 2), (0.0, -math.inf)),  # the others may not be sampled
        TokenLogprobs(7, 0.0),  # fewer than asked for: a vocabulary of one
    ],
)
def test_what_was_asked_for_is_taken(entry: TokenLogprobs) -> None:
    check([entry, None])


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [
        ([None, TokenLogprobs(8, -1.0)], "step 3, row 1, was not asked for"),
        ([TokenLogprobs(7, -1.0, (1, 2, 3), (-1.0,) * 3), None], "has 3 tokens with 3 numbers; allowed: 2 each"),
        ([TokenLogprobs(7, -1.0, (1, 2), (-1.0,)), None], "has 2 tokens with 1 numbers"),
        ([TokenLogprobs(9, -1.0), None], "is of token 9; allowed: 7, the sampled one"),
        ([TokenLogprobs(7, -1.0, (VOCAB_SIZE,), (-1.0,)), None], r"has token 128; allowed: \[0, 128\)"),
        ([TokenLogprobs(7, math.nan), None], "has NaN or inf"),
        ([TokenLogprobs(7, math.inf), None], "has NaN or inf"),
        ([TokenLogprobs(7, -1.0, (1, 2), (-math.inf, math.nan)), None], "has NaN or inf"),
        ([TokenLogprobs(7, -1.0, (1, 2), (-math.inf, math.inf)), None], "has NaN or inf"),
        ([None, None, TokenLogprobs(7, -1.0)], "row 2, has no row"),
    ],
)
def test_log_probabilities_that_nobody_asked_for_or_that_cannot_be_are_refused(
    logprobs: list[TokenLogprobs | None], message: str
) -> None:
    with pytest.raises(InternalError, match=message):
        check(logprobs, tokens=(7, 8, 7)[: len(logprobs)])


def test_more_entries_than_the_executor_has_rows_are_refused() -> None:
    with pytest.raises(InternalError, match="sampled_token_ids of step 3 has 5 entries; allowed: at most 4"):
        check([], tokens=[7] * 5)
    with pytest.raises(InternalError, match="failed_rows of step 3 has 5 entries"):
        check([], failed=[0] * 5)


@pytest.mark.parametrize("max_num_seqs", [1, 256])
def test_the_largest_honest_result_is_below_the_limit_of_a_message(max_num_seqs: int) -> None:
    largest = TokenLogprobs(2**31 - 1, -1.5, (2**31 - 1,) * MAX_NUM_LOGPROBS, (-1.5,) * MAX_NUM_LOGPROBS)
    output = ModelRunnerOutput(2**40, [2**31 - 1] * max_num_seqs, [largest] * max_num_seqs, list(range(max_num_seqs)))
    size = codec.encode_runner_output(output).ByteSize()
    assert size < max_message_bytes(build_info(max_num_seqs=max_num_seqs, max_model_len=512, num_blocks=4097))


@pytest.mark.loopback
@pytest.mark.parametrize(("num_entries", "message"), [(3, "was not asked for"), (20_000, "too long a message")])
async def test_an_executor_that_says_more_than_was_asked_loses_its_lane_and_nobody_hears_of_it(
    serve: Serve, num_entries: int, message: str
) -> None:
    # One step in flight: a write of the next one, while the stream breaks, would lose the reason.
    server = await serve(async_scheduling=False)
    chatter = TokenLogprobs(7, math.nan, (5,) * num_entries, (-1.0,) * num_entries)
    async with StubExecutor(server.port, "liar") as liar, StubGateway(server.port) as gateway:
        await liar.joined()
        liar.tamper = lambda output: dataclasses.replace(output, logprobs=[chatter for _ in output.sampled_token_ids])
        await gateway.add(0, build_spec(prompt=[20], max_tokens=4))
        error = await liar.registration_ended()
        assert isinstance(error, InternalError)
        assert message in error.message
        assert gateway.answers[0].tokens == []
        async with StubExecutor(server.port, "honest"):
            answers = await gateway.until_ended(0)
    assert answers[0].tokens == answer_of([20], 4)
    assert answers[0].logprob_token_ids == []
