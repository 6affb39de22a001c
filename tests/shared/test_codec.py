"""The wire form: what is encoded comes back, a steady step stays small, and what does not fit is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdback import codec
from holdback.errors import (
    ErrorReason,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
)
from holdback.types import (
    CachedRequestsData,
    CompileCounts,
    ExecutorInfo,
    ExecutorLimits,
    FinishReason,
    GraphLatency,
    ModelInfo,
    ModelRunnerOutput,
    NewRequestData,
    Phase,
    RequestSpec,
    SamplingParams,
    SchedulerOutput,
    SchedulerState,
    StepTimings,
    TokenLogprobs,
    TraceContext,
    Usage,
)
from holdback.v1 import executor_pb2, scheduler_pb2, types_pb2


def prefill(req_id, slot=0, num_tokens=3, block_ids=(1,), computed=0):
    spec = RequestSpec(req_id, list(range(num_tokens)))
    return SchedulerOutput(
        scheduled_new_reqs=[NewRequestData(req_id, spec, slot, list(block_ids), computed)],
        num_scheduled_tokens={req_id: num_tokens},
        num_scheduled_tokens_padded={req_id: 128},
        phase=Phase.PREFILL,
    )


def decode(counts, blocks=None, finished=()):
    blocks = blocks or {}
    return SchedulerOutput(
        scheduled_cached_reqs=CachedRequestsData(
            list(counts), list(counts.values()), [blocks.get(req_id) for req_id in counts]
        ),
        num_scheduled_tokens=dict.fromkeys(counts, 1),
        num_scheduled_tokens_padded=dict.fromkeys(counts, 1),
        finished_req_ids=list(finished),
        phase=Phase.DECODE,
    )


class Link:
    """An encoder and a decoder with a real wire between them."""

    def __init__(self):
        self.encoder, self.decoder = codec.StepEncoder(), codec.StepDecoder()
        self.num_bytes = 0

    def send(self, output):
        wire = self.encoder.encode(output).SerializeToString()
        self.num_bytes = len(wire)
        return self.decoder.decode(executor_pb2.SchedulerOutput.FromString(wire))


def test_a_request_is_told_in_full_once_and_by_handle_afterwards():
    link = Link()
    first = link.send(prefill("a", slot=4, num_tokens=3, block_ids=(7, 2)))
    assert first.scheduled_new_reqs[0].req_id == "a#0"
    assert first.scheduled_new_reqs[0].slot == 4
    assert first.scheduled_new_reqs[0].block_ids == [7, 2]
    assert first.num_scheduled_tokens == {"a#0": 3}
    assert first.num_scheduled_tokens_padded == {"a#0": 128}

    second = link.send(decode({"a": 3}, {"a": [9]}))
    assert second.scheduled_new_reqs == []
    assert second.scheduled_cached_reqs == CachedRequestsData(["a#0"], [3], [[9]])
    assert second.num_scheduled_tokens == {"a#0": 1}
    assert second.phase is Phase.DECODE


def test_a_steady_decode_step_stays_below_64_bytes_at_256_rows():
    link = Link()
    ids = [f"request-{i}" for i in range(256)]
    for slot, req_id in enumerate(ids):
        link.send(prefill(req_id, slot))
    link.send(decode(dict.fromkeys(ids, 3)))
    assert link.num_bytes > 256
    for count in range(4, 40):
        got = link.send(decode(dict.fromkeys(ids, count)))
        assert link.num_bytes <= 64
        assert got.scheduled_cached_reqs.num_computed_tokens == [count] * 256


def test_rows_that_change_are_told_again_in_their_new_order():
    link = Link()
    for slot, req_id in enumerate("abc"):
        link.send(prefill(req_id, slot))
    link.send(decode({"a": 3, "b": 3, "c": 3}))
    got = link.send(decode({"c": 4, "a": 4}, finished=["b"]))
    assert got.scheduled_cached_reqs.req_ids == ["c#2", "a#0"]
    assert got.finished_req_ids == ["b#1"]
    got = link.send(decode({"c": 5, "a": 5}))
    assert got.scheduled_cached_reqs.num_computed_tokens == [5, 5]


def test_rows_of_the_decode_before_a_prefill_are_still_known_after_it():
    link = Link()
    link.send(prefill("a", 0))
    link.send(decode({"a": 3}))
    link.send(prefill("b", 1))
    got = link.send(decode({"a": 4}))
    assert got.scheduled_cached_reqs == CachedRequestsData(["a#0"], [4], [None])


def test_an_id_that_comes_back_under_a_new_handle_is_not_the_same_row():
    link = Link()
    link.send(prefill("a", num_tokens=3))
    link.send(decode({"a": 3}))
    again = prefill("a", num_tokens=4)
    again.finished_req_ids = ["a"]
    link.send(again)
    got = link.send(decode({"a": 4}))
    assert got.scheduled_cached_reqs == CachedRequestsData(["a#1"], [4], [None])


def test_a_request_that_finished_before_it_was_told_is_not_mentioned():
    link = Link()
    assert link.send(SchedulerOutput(finished_req_ids=["never-told"])).finished_req_ids == []


def test_a_row_that_gets_two_blocks_gets_both_in_order():
    link = Link()
    link.send(prefill("a", 0))
    got = link.send(
        SchedulerOutput(
            scheduled_cached_reqs=CachedRequestsData(["a"], [128], [[5, 3]]),
            num_scheduled_tokens={"a": 100},
            num_scheduled_tokens_padded={"a": 128},
            phase=Phase.PREFILL,
        )
    )
    assert got.scheduled_cached_reqs.new_block_ids == [[5, 3]]
    assert got.num_scheduled_tokens == {"a#0": 100}


@pytest.mark.parametrize("wrong", [0, 2, 7])
def test_a_step_that_is_not_the_next_one_is_refused(wrong):
    decoder = codec.StepDecoder()
    decoder.decode(executor_pb2.SchedulerOutput(step=0))
    with pytest.raises(FailedPreconditionError, match=f"step is {wrong}; allowed: 1") as caught:
        decoder.decode(executor_pb2.SchedulerOutput(step=wrong))
    assert caught.value.reason is ErrorReason.STEP_OUT_OF_ORDER


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (executor_pb2.SchedulerOutput(finished_handles=[3]), "finished_handles"),
        (
            executor_pb2.SchedulerOutput(new_requests=[executor_pb2.NewRequestData(handle=5)]),
            "new_requests.handle",
        ),
        (
            executor_pb2.SchedulerOutput(
                phase=types_pb2.PHASE_DECODE,
                cached_requests=executor_pb2.CachedRequestsData(handles=[9], num_computed_tokens=[1]),
            ),
            "cached_requests.handles",
        ),
        (
            executor_pb2.SchedulerOutput(
                phase=types_pb2.PHASE_DECODE,
                cached_requests=executor_pb2.CachedRequestsData(same_as_last_decode=True),
            ),
            "cached_requests.same_as_last_decode",
        ),
        (
            executor_pb2.SchedulerOutput(
                phase=types_pb2.PHASE_PREFILL, new_requests=[executor_pb2.NewRequestData(handle=0)]
            ),
            "num_scheduled_tokens",
        ),
        (
            executor_pb2.SchedulerOutput(
                phase=types_pb2.PHASE_DECODE,
                new_requests=[executor_pb2.NewRequestData(handle=0)],
                cached_requests=executor_pb2.CachedRequestsData(
                    handles=[0], num_computed_tokens=[1], new_block_rows=[1], new_block_ids=[4]
                ),
            ),
            "cached_requests.new_block_rows",
        ),
        (
            executor_pb2.SchedulerOutput(
                phase=types_pb2.PHASE_DECODE,
                new_requests=[executor_pb2.NewRequestData(handle=0)],
                cached_requests=executor_pb2.CachedRequestsData(handles=[0], num_computed_tokens=[1, 2]),
            ),
            "cached_requests.num_computed_tokens",
        ),
        (
            executor_pb2.SchedulerOutput(
                phase=types_pb2.PHASE_DECODE,
                new_requests=[executor_pb2.NewRequestData(handle=0)],
                cached_requests=executor_pb2.CachedRequestsData(handles=[0, 0], num_computed_tokens=[1, 1]),
            ),
            "cached_requests.handles",
        ),
        (executor_pb2.SchedulerOutput.FromString(b"\x10\x63"), "phase"),  # phase 99, of a newer peer
    ],
)
def test_a_step_that_does_not_fit_is_refused_and_names_the_field(message, field):
    with pytest.raises(InvalidArgumentError) as caught:
        codec.StepDecoder().decode(message)
    assert caught.value.field == field


token_ids = st.lists(st.integers(0, 2**31), max_size=5)
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_k=st.none() | st.integers(1, 1000),
    top_p=st.sampled_from([0.0, 0.25, 1.0]),
    min_p=st.sampled_from([0.0, 0.5]),
    repetition_penalty=st.sampled_from([0.5, 1.0]),
    presence_penalty=st.sampled_from([-2.0, 0.0]),
    frequency_penalty=st.sampled_from([0.0, 2.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.integers(1, 2**32 - 1),
    min_tokens=st.integers(0, 2**32 - 1),
    ignore_eos=st.booleans(),
    stop_token_ids=token_ids.map(tuple),
    allowed_token_ids=st.none() | token_ids.map(tuple),
    logit_bias=st.dictionaries(st.integers(0, 2**31), st.sampled_from([-100.0, 1.5]), max_size=3),
    num_logprobs=st.none() | st.integers(0, 20),
)
specs = st.builds(
    RequestSpec,
    request_id=st.text(max_size=8),
    prompt_token_ids=token_ids.map(tuple),
    sampling=samplings,
    generation=st.integers(0, 2**32 - 1),
    output_token_ids=token_ids.map(tuple),
    priority=st.integers(-(2**31), 2**31 - 1),
    cache_salt=st.text(max_size=4),
    deadline_ms=st.none() | st.integers(0, 2**63),
    queued_ms=st.integers(0, 2**63),
    trace=st.builds(TraceContext, st.text("0f-", min_size=1), st.text("ab=")),
)


@given(specs)
def test_a_request_comes_back_as_it_was(spec):
    wire = codec.encode_spec(spec).SerializeToString()
    assert codec.decode_spec(types_pb2.RequestSpec.FromString(wire)) == spec


def test_unset_sampling_fields_have_the_documented_defaults():
    assert codec.decode_sampling(types_pb2.SamplingParams()) == SamplingParams()


@pytest.mark.parametrize("top_k", [0, -1])
def test_a_top_k_of_0_or_minus_1_keeps_all_tokens(top_k):
    assert codec.decode_sampling(types_pb2.SamplingParams(top_k=top_k)).top_k is None


@pytest.mark.parametrize("bias", [1.5, -2.0])
def test_a_token_that_has_two_biases_is_refused_even_where_they_are_equal(bias):
    entries = [types_pb2.LogitBias(token_id=token_id, bias=1.5) for token_id in (0, 3)]
    message = types_pb2.SamplingParams(logit_bias=[*entries, types_pb2.LogitBias(token_id=3, bias=bias)])
    with pytest.raises(InvalidArgumentError, match="is 3; allowed: at most one entry per token") as caught:
        codec.decode_sampling(message)
    assert caught.value.field == "sampling.logit_bias[2].token_id"


def test_a_runner_output_comes_back_as_it_was():
    logprobs = TokenLogprobs(5, -0.5, (5, 6), (-0.5, -2.0))
    output = ModelRunnerOutput(7, [5, 9], [logprobs, None], [1], StepTimings(1, 2, 3))
    wire = codec.encode_runner_output(output).SerializeToString()
    assert codec.decode_runner_output(executor_pb2.ModelRunnerOutput.FromString(wire)) == output


def test_a_result_costs_at_most_64_bytes_and_4_per_row():
    output = ModelRunnerOutput(2**40, [49151] * 256, timings=StepTimings(10**6, 10**6, 10**6))
    assert codec.encode_runner_output(output).ByteSize() <= 64 + 4 * 256


def test_logprobs_of_a_row_that_is_not_there_are_refused():
    message = executor_pb2.ModelRunnerOutput(sampled_token_ids=[1])
    message.logprobs.add(row=1)
    with pytest.raises(InvalidArgumentError, match=r"logprobs\.row is 1"):
        codec.decode_runner_output(message)


def test_logprobs_that_come_twice_for_a_row_are_refused():
    message = executor_pb2.ModelRunnerOutput(sampled_token_ids=[1, 2])
    for row in (0, 1, 1):
        message.logprobs.add(row=row)
    with pytest.raises(InvalidArgumentError, match=r"logprobs\.row is 1; allowed: each row once"):
        codec.decode_runner_output(message)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (ErrorReason.STEP_OUT_OF_ORDER, InternalError),
        (ErrorReason.INTERNAL, InternalError),
        (ErrorReason.LEASE_MISMATCH, UnavailableError),
    ],
)
def test_why_an_execution_failed_comes_back_with_its_reason(reason, kind):
    told = codec.encode_execution_failed(FailedPreconditionError("step 3: it broke", reason=reason))
    error = codec.decode_execution_failed(executor_pb2.ExecutionFailed.FromString(told.SerializeToString()))
    assert type(error) is kind
    assert (error.reason, error.message) == (reason, "step 3: it broke")


def test_a_reason_of_a_newer_executor_is_taken_for_a_fault():
    error = codec.decode_execution_failed(executor_pb2.ExecutionFailed.FromString(b"\x08\xe7\x07"))
    assert error.reason is ErrorReason.INTERNAL


def test_executor_info_comes_back_as_it_was():
    info = ExecutorInfo(
        executor_id="executor-0",
        lease="0123456789abcdef",
        port=7001,
        model=ModelInfo("f", "m", 100, (2, 5), 256),
        limits=ExecutorLimits(16, 65, 8, 128, (64, 128), (1, 8), (256,), 2),
        latencies=(GraphLatency(Phase.PREFILL, 128, 0, 900), GraphLatency(Phase.DECODE, 8, 256, 50)),
        advertise_address="127.0.0.2",
        device="simulated",
        kernels="PyTorch; threads: 2",
        compiled=CompileCounts(num_hits=3, num_misses=1, build_s=1.25),
    )
    wire = codec.encode_executor_info(info).SerializeToString()
    assert codec.decode_executor_info(scheduler_pb2.ExecutorInfo.FromString(wire)) == info


def test_a_latency_without_a_phase_is_refused():
    message = scheduler_pb2.ExecutorInfo(latencies=[scheduler_pb2.GraphLatency(size=1, latency_us=1)])
    with pytest.raises(InvalidArgumentError, match=r"latencies\.phase"):
        codec.decode_executor_info(message)


def test_every_enum_goes_there_and_back():
    for reason in FinishReason:
        assert codec.decode_finish_reason(codec.encode_finish_reason(reason)) is reason
    for state in SchedulerState:
        assert codec.decode_state(codec.encode_state(state)) is state
    assert codec.decode_usage(codec.encode_usage(Usage(5, 3, 2))) == Usage(5, 3, 2)


@pytest.mark.parametrize("decode_enum", [codec.decode_finish_reason, codec.decode_state])
@pytest.mark.parametrize("number", [0, 99])
def test_unspecified_and_unknown_enum_values_are_refused(decode_enum, number):
    with pytest.raises(InvalidArgumentError):
        decode_enum(number)
