"""What rank 0 tells the other ranks, and they it, as bytes: a kind, a few plain fields, arrays as they lie in memory.

Nothing is pickled. A frame is two lengths (of the header and of the whole, 4 bytes each, little endian), a header in
JSON, and the arrays that it describes, one after the other. A step's block tables are cut to what its contexts use, so
a frame is a few kilobytes where the table of `max_model_len` would be many times that.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from executor_svc.devices.base import GraphKey, SamplingInputs, StepInputs
from holdback.request_codec import decode_sampling, decode_spec, encode_sampling, encode_spec
from holdback.types import Phase, RequestSpec, SamplingParams
from holdback.v1 import types_pb2

MAX_FRAME_BYTES = 1 << 30
DTYPES = frozenset({"int32", "float32", "uint8"})

_LENGTHS = struct.Struct("<II")
_NO_PARAMS, _SLOTS_PARAMS = -1, -2
_STEP_ARRAYS = ("positions", "slot_mapping", "block_tables", "context_lens", "slots", "input_ids")

Array = npt.NDArray[Any]


@dataclass(slots=True)
class Frame:
    """One message.

    Attributes:
        kind: what it is, for example "step".
        fields: plain JSON.
        arrays: of `DTYPES`, by name.
    """

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)


def encode_frame(frame: Frame) -> bytes:
    described = [[name, array.dtype.name, array.shape] for name, array in frame.arrays.items()]
    header = json.dumps([frame.kind, frame.fields, described], separators=(",", ":")).encode()
    data = [np.ascontiguousarray(array).tobytes() for array in frame.arrays.values()]
    return b"".join([_LENGTHS.pack(len(header), len(header) + sum(map(len, data))), header, *data])


def decode_frame(header: bytes, data: memoryview) -> Frame:
    """The arrays are views into `data`. Raises ValueError for what `encode_frame` does not make."""
    kind, fields, described = json.loads(header)
    frame, start = Frame(kind, fields), 0
    for name, dtype, shape in described:
        if dtype not in DTYPES:
            raise ValueError(f"dtype of {name} is {dtype!r}; allowed: {', '.join(sorted(DTYPES))}")
        count = math.prod(shape)
        frame.arrays[name] = np.frombuffer(data, dtype, count, start).reshape(shape)
        start += count * np.dtype(dtype).itemsize
    if start != len(data):
        raise ValueError(f"a frame has {len(data)} bytes of arrays; allowed: {start}, as its header says")
    return frame


class FrameSocket:
    """Frames over one socket. One thread may send while another receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, frame: Frame) -> None:
        """Raises OSError when nobody is there any more."""
        self._connection.sendall(encode_frame(frame))

    def receive(self) -> Frame | None:
        """The next frame, or None when the other side is gone. Raises ValueError for bytes that are none."""
        lengths = self._read(_LENGTHS.size)
        if lengths is None:
            return None
        header_bytes, total_bytes = _LENGTHS.unpack(lengths)
        if not header_bytes <= total_bytes <= MAX_FRAME_BYTES:
            raise ValueError(f"a frame has {total_bytes} bytes; allowed: [{header_bytes}, {MAX_FRAME_BYTES}]")
        body = self._read(total_bytes)
        return None if body is None else decode_frame(body[:header_bytes].tobytes(), body[header_bytes:])

    def finish(self) -> None:
        """Nothing more will be sent; the other side receives None after what was."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._connection.close()

    def _read(self, count: int) -> memoryview | None:
        whole = view = memoryview(bytearray(count))
        while view:
            try:
                received = self._connection.recv_into(view)
            except OSError:  # closed on this side, or the other side went with bytes unread
                return None
            if received == 0:
                return None
            view = view[received:]
        return whole


class RequestTable:
    """The parameters of the request in each slot, which a step then names by the slot alone. One on each side."""

    def __init__(self) -> None:
        self._params: dict[int, SamplingParams] = {}

    def clear(self) -> None:
        self._params.clear()

    def encode_start(self, slot: int, spec: RequestSpec) -> Frame:
        self._params[slot] = spec.sampling
        return Frame("start", {"slot": slot}, {"spec": _bytes_of(encode_spec(spec).SerializeToString())})

    def decode_start(self, frame: Frame) -> tuple[int, RequestSpec]:
        slot, spec = frame.fields["slot"], decode_spec(types_pb2.RequestSpec.FromString(frame.arrays["spec"].tobytes()))
        self._params[slot] = spec.sampling
        return slot, spec

    def encode_step(self, inputs: StepInputs, block_size: int) -> Frame:
        """The frame holds copies, so the arrays of the step may change as soon as this returns."""
        frame = Frame("step", {"key": [inputs.key.phase.value, inputs.key.size, inputs.key.context]})
        frame.fields |= {"num_tokens": inputs.num_tokens, "table_width": inputs.block_tables.shape[1]}
        for name in _STEP_ARRAYS:
            if (array := getattr(inputs, name)) is not None:
                frame.arrays[name] = array
        used = -(-int(inputs.context_lens.max(initial=0)) // block_size)
        frame.arrays["block_tables"] = inputs.block_tables[:, :used]
        if inputs.sampling is not None:
            self._encode_sampling(frame, inputs.sampling, inputs.slots.tolist())
        return frame

    def decode_step(self, frame: Frame) -> StepInputs:
        arrays, fields = frame.arrays, frame.fields
        phase, size, context = fields["key"]
        tables = np.zeros((len(arrays["block_tables"]), fields["table_width"]), np.int32)
        tables[:, : arrays["block_tables"].shape[1]] = arrays["block_tables"]
        inputs = StepInputs(
            key=GraphKey(Phase(phase), size, context),
            positions=arrays["positions"],
            slot_mapping=arrays["slot_mapping"],
            block_tables=tables,
            context_lens=arrays["context_lens"],
            num_tokens=fields["num_tokens"],
            slots=arrays["slots"],
            input_ids=arrays.get("input_ids"),
        )
        if "params" in fields:
            inputs.sampling = self._decode_sampling(frame, inputs.slots.tolist())
        return inputs

    def _encode_sampling(self, frame: Frame, sampling: SamplingInputs, slots: Sequence[int]) -> None:
        """Parameters of a row that are not its slot's request's, as in a warm-up, are told in full, once."""
        told: dict[int, int] = {}
        rows = []
        for params, slot in zip(sampling.params, slots, strict=True):
            if params is None:
                rows.append(_NO_PARAMS)
            elif params is self._params.get(slot):
                rows.append(_SLOTS_PARAMS)
            else:
                if id(params) not in told:
                    frame.arrays[f"params {len(told)}"] = _bytes_of(encode_sampling(params).SerializeToString())
                    told[id(params)] = len(told)
                rows.append(told[id(params)])
        frame.fields["params"] = rows
        frame.arrays |= {"num_outputs": sampling.num_outputs, "uniform": sampling.uniform}

    def _decode_sampling(self, frame: Frame, slots: Sequence[int]) -> SamplingInputs:
        told = _told_params(frame.arrays)
        params = [
            None if number == _NO_PARAMS else self._params[slot] if number == _SLOTS_PARAMS else told[number]
            for number, slot in zip(frame.fields["params"], slots, strict=True)
        ]
        return SamplingInputs(params, frame.arrays["num_outputs"], frame.arrays["uniform"])


def _told_params(arrays: Mapping[str, Array]) -> dict[int, SamplingParams]:
    return {
        int(name.removeprefix("params ")): decode_sampling(types_pb2.SamplingParams.FromString(array.tobytes()))
        for name, array in arrays.items()
        if name.startswith("params ")
    }


def _bytes_of(content: bytes) -> Array:
    return np.frombuffer(content, np.uint8)
