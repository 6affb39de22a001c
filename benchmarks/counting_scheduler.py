"""The scheduler's process with a note of every message of its `Execute` streams: `FILE`, then what the command takes.

    python benchmarks/counting_scheduler.py FILE [flags of holdback scheduler]

Nothing of the scheduler is changed: what gRPC calls to turn a message into bytes and back is wrapped. FILE gets, once
the process is asked to stop, `{"sent": [...], "received": [...]}`, in order:

- of each step sent: when, its size in bytes, its size without new blocks, how many requests it tells as rows or in full
  (0 where it says only that the rows are those of the last decode).
- of each result received: when, its size in bytes, its tokens, and the executor's queue, device and host microseconds.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from typing import Any
from unittest import mock

from holdback import rpc
from holdback.v1 import executor_pb2
from scheduler_svc.cli import scheduler

EXECUTE = "/holdback.v1.ExecutorService/Execute"


class Wiretap:
    """Bytes and times of all `Execute` streams that are opened while it is on; what they mean is worked out later."""

    def __init__(self) -> None:
        self._sent: list[tuple[int, bytes]] = []
        self._received: list[tuple[int, bytes]] = []
        self._create_channel = rpc.create_channel

    def create_channel(self, *args: Any, **options: Any) -> Any:
        channel: Any = self._create_channel(*args, **options)
        open_stream = channel.stream_stream

        def stream_stream(path: str, request_serializer: Any, response_deserializer: Any, **options: Any) -> Any:
            if path != EXECUTE:
                return open_stream(path, request_serializer, response_deserializer, **options)

            def serialize(message: Any) -> bytes:
                data: bytes = request_serializer(message)
                self._sent.append((time.perf_counter_ns(), data))
                return data

            def deserialize(data: bytes) -> Any:
                self._received.append((time.perf_counter_ns(), data))
                return response_deserializer(data)

            return open_stream(path, serialize, deserialize, **options)

        channel.stream_stream = stream_stream
        return channel

    def to_json(self) -> dict[str, list[list[int]]]:
        sent = [(at, executor_pb2.ExecuteRequest.FromString(data)) for at, data in self._sent]
        received = [(at, len(data), executor_pb2.ExecuteResponse.FromString(data)) for at, data in self._received]
        return {
            "sent": [_describe_step(at, message) for at, message in sent if message.HasField("step")],
            "received": [_describe_result(*entry) for entry in received if entry[2].HasField("output")],
        }


def _describe_step(at: int, message: executor_pb2.ExecuteRequest) -> list[int]:
    size, cached = message.ByteSize(), message.step.cached_requests
    num_told = len(cached.handles) + len(message.step.new_requests)
    cached.ClearField("new_block_rows")
    cached.ClearField("new_block_ids")
    return [at, size, message.ByteSize(), num_told]


def _describe_result(at: int, size: int, message: executor_pb2.ExecuteResponse) -> list[int]:
    output = message.output
    timings = output.timings
    return [at, size, len(output.sampled_token_ids), timings.queue_us, timings.device_us, timings.host_us]


def main() -> int:
    path, *flags = sys.argv[1:]
    tap = Wiretap()
    with mock.patch.object(rpc, "create_channel", tap.create_channel):
        status = scheduler(flags)
    pathlib.Path(path).write_text(json.dumps(tap.to_json()), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
