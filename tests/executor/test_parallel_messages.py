"""What ranks are told, as bytes and back."""

from __future__ import annotations

import dataclasses
import socket
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from executor_svc.devices.base import GraphKey, SamplingInputs, StepInputs
from executor_svc.parallel.messages import MAX_FRAME_BYTES, Frame, FrameSocket, RequestTable, encode_frame
from holdback.types import Phase, RequestSpec, SamplingParams

BLOCK_SIZE = 4
ALL_SET = SamplingParams(
    temperature=0.75,
    top_k=5,
    top_p=0.875,
    min_p=0.125,
    repetition_penalty=1.25,
    presence_penalty=0.25,
    frequency_penalty=-0.5,
    seed=2**62,
    max_tokens=9,
    min_tokens=2,
    ignore_eos=True,
    stop_token_ids=(7, 8),
    allowed_token_ids=(1, 2, 3),
    logit_bias={4: -1.5},
    num_logprobs=2,
)


@pytest.fixture
def pair() -> Iterator[tuple[FrameSocket, FrameSocket]]:
    ours, theirs = (FrameSocket(end) for end in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def raw(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<II", len(header), len(header) + len(data)) + header + data


def through(pair: tuple[FrameSocket, FrameSocket], frame: Frame) -> Frame:
    pair[0].send(frame)
    received = pair[1].receive()
    assert received is not None
    return received


def decode_inputs(params: list[SamplingParams | None], *, width: int = 64) -> StepInputs:
    """Two real rows of contexts 6 and 3 in a batch of three."""
    tables = np.zeros((3, width), np.int32)
    tables[0, :2], tables[1, :1] = [5, 9], [7]
    return StepInputs(
        key=GraphKey(Phase.DECODE, 3, 256),
        positions=np.array([5, 2, 0], np.int32),
        slot_mapping=np.array([37, 30, -1], np.int32),
        block_tables=tables,
        context_lens=np.array([6, 3, 0], np.int32),
        num_tokens=2,
        slots=np.array([1, 0, 4], np.int32),
        sampling=SamplingInputs(params, np.array([3, 0, 0], np.int32), np.array([0.25, 0.5, 0], np.float32)),
    )


def assert_equal_inputs(found: StepInputs, expected: StepInputs) -> None:
    for field in dataclasses.fields(StepInputs):
        if field.name != "sampling":
            np.testing.assert_equal(getattr(found, field.name), getattr(expected, field.name), err_msg=field.name)
    assert (found.sampling is None) == (expected.sampling is None)
    if found.sampling is not None and expected.sampling is not None:
        assert found.sampling.params == expected.sampling.params
        np.testing.assert_equal(found.sampling.num_outputs, expected.sampling.num_outputs)
        np.testing.assert_equal(found.sampling.uniform, expected.sampling.uniform)


def test_a_decode_arrives_as_it_was_with_the_parameters_of_its_slots(pair: tuple[FrameSocket, FrameSocket]) -> None:
    here, there = RequestTable(), RequestTable()
    first, second = RequestSpec("a", [1, 2], ALL_SET), RequestSpec("b", [3], SamplingParams(), output_token_ids=(4,))
    for slot, spec in ((0, first), (1, second)):
        assert there.decode_start(through(pair, here.encode_start(slot, spec))) == (
            slot,
            dataclasses.replace(spec, prompt_token_ids=tuple(spec.prompt_token_ids)),
        )
    inputs = decode_inputs([second.sampling, first.sampling, None])
    frame = through(pair, here.encode_step(inputs, BLOCK_SIZE))
    assert [name for name in frame.arrays if name.startswith("params")] == []
    found = there.decode_step(frame)
    assert_equal_inputs(found, inputs)
    # The very objects of the slots, by which a sampler knows them again.
    assert found.sampling is not None
    again = there.decode_step(through(pair, here.encode_step(inputs, BLOCK_SIZE)))
    assert again.sampling is not None
    assert found.sampling.params[1] is again.sampling.params[1]


def test_parameters_of_no_request_are_told_once_for_all_rows(pair: tuple[FrameSocket, FrameSocket]) -> None:
    inputs = decode_inputs([ALL_SET, ALL_SET, ALL_SET])
    frame = through(pair, RequestTable().encode_step(inputs, BLOCK_SIZE))
    assert [name for name in frame.arrays if name.startswith("params")] == ["params 0"]
    assert_equal_inputs(RequestTable().decode_step(frame), inputs)


def test_a_slot_that_went_to_another_request_has_the_parameters_of_that_one(
    pair: tuple[FrameSocket, FrameSocket],
) -> None:
    here, there = RequestTable(), RequestTable()
    for temperature in (0.0, 2.0):
        params = SamplingParams(temperature=temperature)
        there.decode_start(through(pair, here.encode_start(1, RequestSpec("a", [1], params))))
        found = there.decode_step(through(pair, here.encode_step(decode_inputs([params, None, None]), BLOCK_SIZE)))
        assert found.sampling is not None
        assert found.sampling.params == [params, None, None]


def test_a_chunk_that_samples_nothing_arrives_without_sampling(pair: tuple[FrameSocket, FrameSocket]) -> None:
    inputs = StepInputs(
        key=GraphKey(Phase.PREFILL, 4, 256),
        input_ids=np.array([20, 21, 22, 0], np.int32),
        positions=np.array([0, 1, 2, 2], np.int32),
        slot_mapping=np.array([4, 5, 6, -1], np.int32),
        block_tables=np.array([[1, 0, 0]], np.int32),
        context_lens=np.array([3], np.int32),
        num_tokens=3,
        slots=np.array([4], np.int32),
    )
    frame = through(pair, RequestTable().encode_step(inputs, BLOCK_SIZE))
    assert frame.arrays["block_tables"].tolist() == [[1]]
    assert_equal_inputs(RequestTable().decode_step(frame), inputs)


def test_the_bytes_of_a_step_do_not_grow_with_the_longest_context_that_could_be() -> None:
    sizes = [
        len(encode_frame(RequestTable().encode_step(decode_inputs([None] * 3, width=width), BLOCK_SIZE)))
        for width in (64, 8192)
    ]
    assert sizes[1] <= sizes[0] + 2  # the number itself has two digits more
    assert sizes[0] < 1000


def test_arrays_of_a_received_step_can_be_written_to(pair: tuple[FrameSocket, FrameSocket]) -> None:
    frame = through(pair, Frame("step", {}, {"numbers": np.array([1, 2], np.int32)}))
    frame.arrays["numbers"][0] = 7
    assert frame.arrays["numbers"].tolist() == [7, 2]


def test_the_end_of_the_other_side_is_none_also_in_the_middle_of_a_frame() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(encode_frame(Frame("reset"))[:-1])
        ours.shutdown(socket.SHUT_WR)
        assert FrameSocket(theirs).receive() is None


def test_frames_sent_before_the_end_arrive(pair: tuple[FrameSocket, FrameSocket]) -> None:
    pair[0].send(Frame("reset"))
    pair[0].finish()
    assert pair[1].receive() == Frame("reset")
    assert pair[1].receive() is None


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        (struct.pack("<II", 2, MAX_FRAME_BYTES + 1), f"a frame has {MAX_FRAME_BYTES + 1} bytes; allowed: "),
        (struct.pack("<II", 20, 4), "a frame has 4 bytes; allowed: "),
        (raw(b'["a",{},[["x","O",[1]]]]'), "dtype of x is 'O'; allowed: "),
        (raw(b'["a",{},[]]', b"xy"), "a frame has 2 bytes of arrays; allowed: 0, as its header says"),
        (raw(b'["a",{},[["x","int32",[2]]]]', b"wxyz"), "buffer is smaller"),
        (raw(b"{]"), "Expecting"),
    ],
)
def test_bytes_that_are_no_frame_are_refused(sent: bytes, problem: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(sent)
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(ValueError) as caught:
            FrameSocket(theirs).receive()
        assert problem in str(caught.value)
