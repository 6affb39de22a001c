"""Clients of a gateway that cost little: they note when each message comes, and look at nothing else in it.

Requests are token ids over gRPC, and conversations over the OpenAI HTTP API as server-sent events.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from holdback import rpc
from holdback.v1 import inference_pb2, types_pb2

METHOD = "/holdback.v1.InferenceService/GenerateStream"
PROMPT_TOKENS = 16

Open = Callable[[int, int], AsyncIterator[None]]
"""Opens stream number N with so many tokens to come; yields with each message that may hold some."""


@dataclass(slots=True)
class Arrivals:
    """When the messages of one stream came, in seconds of one clock."""

    times: list[float] = field(default_factory=list)

    def gaps_ms(self, since: float = 0.0, until: float = float("inf")) -> list[float]:
        """Times between messages, both within the window."""
        inside = [at for at in self.times if since <= at <= until]
        return [(later - earlier) * 1000 for earlier, later in itertools.pairwise(inside)]


async def read(stream: AsyncIterator[None], pause_s: float = 0.0) -> Arrivals:
    """Reads a stream to its end, with a pause behind each message."""
    arrivals = Arrivals()
    async for _ in stream:
        arrivals.times.append(time.perf_counter())
        if pause_s:
            await asyncio.sleep(pause_s)
    return arrivals


async def read_many(open_stream: Open, num_streams: int, max_tokens: int) -> list[Arrivals]:
    """So many streams at once, started together."""
    return await asyncio.gather(*(read(open_stream(number, max_tokens)) for number in range(num_streams)))


def over_grpc(channel: grpc.aio.Channel) -> Open:
    """Messages are left as bytes."""
    call: Any = channel.unary_stream(
        METHOD, request_serializer=inference_pb2.GenerateStreamRequest.SerializeToString, response_deserializer=None
    )

    async def open_stream(number: int, max_tokens: int) -> AsyncIterator[None]:
        async for _ in call(inference_pb2.GenerateStreamRequest(generation=_generation(number, max_tokens))):
            yield

    return open_stream


def over_http(address: str, model: str) -> Open:
    """A connection for each stream; lines are told apart, and not parsed."""
    host, _, port = address.rpartition(":")

    async def open_stream(number: int, max_tokens: int) -> AsyncIterator[None]:
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.write(_http_request(address, model, number, max_tokens))
        try:
            async for line in reader:
                if line.startswith(b"data: {"):
                    if line.startswith(b'data: {"error"'):
                        raise SystemExit(line.decode())
                    yield
                elif line.startswith((b"data: [DONE]", b"HTTP/1.1 4", b"HTTP/1.1 5")):
                    if b"DONE" not in line:
                        raise SystemExit((line + await reader.read(4096)).decode())
                    return
        finally:
            writer.close()

    return open_stream


async def open_channel(address: str) -> grpc.aio.Channel:
    channel = rpc.create_channel(address)
    await channel.channel_ready()
    return channel


async def first_token(open_stream: Open) -> None:
    """A short answer, so that what is made at the first call is there."""
    await read(open_stream(0, 2))


async def in_turns(runs: Sequence[Callable[[], Awaitable[None]]], rounds: int) -> None:
    """One run after the other, again and again, so that a machine that changes changes for all."""
    for _ in range(rounds):
        for run in runs:
            await run()


def _generation(number: int, max_tokens: int) -> inference_pb2.Generation:
    sampling = types_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    token_ids = [100 + (number * 7 + index) % 400 for index in range(PROMPT_TOKENS)]
    return inference_pb2.Generation(token_ids=inference_pb2.TokenIds(token_ids=token_ids), sampling=sampling)


def _http_request(address: str, model: str, number: int, max_tokens: int) -> bytes:
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": f"Question number {number}"}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
