"""Two executors of two ranks each in one pool: one loses a rank, and its streams go on at the other."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from holdback import AsyncClient, rpc
from holdback.cli.local import LocalProcess, LocalStack
from holdback.streaming import GenerationStream
from holdback.types import FinishReason
from holdback.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.system.tiny_model import VOCAB_SIZE, answer_alone, save_tiny_model, stack_arguments

pytestmark = pytest.mark.loopback

NUM_TOKENS = 300
PROMPTS = [[(7 * number + 11 * place) % (VOCAB_SIZE - 20) + 20 for place in range(5 + number)] for number in range(6)]

Line = dict[str, Any]


def read_lines(log: pathlib.Path, event: str) -> list[Line]:
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


def rank_of(log: pathlib.Path, executor: LocalProcess) -> int:
    """The process of its rank 1."""
    (started,) = [line for line in read_lines(log, "ranks_started") if line["pid"] == executor.child.pid]
    return int(started["pids"]["1"])


async def until_executors(stack: LocalStack, count: int) -> None:
    async with rpc.create_channel(stack.scheduler_address) as channel, asyncio.timeout(100):
        stub: scheduler_pb2_grpc.SchedulerServiceAsyncStub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        while (await stub.GetState(scheduler_pb2.GetStateRequest())).pool.num_executors != count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # nobody tells when another one joins


async def rest_of(stream: GenerationStream) -> list[int]:
    tokens: list[int] = []
    async for piece in stream:
        tokens += piece.token_ids
        assert piece.finish_reason in (None, FinishReason.LENGTH)
    return tokens


@pytest.mark.timeout(300)
async def test_a_second_executor_takes_over_the_streams_of_one_whose_rank_died(tmp_path: pathlib.Path) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    # Four of the six requests fit one executor, so each has some; those that move wait for the others to end.
    settings: dict[str, Any] = {"dtype": "float32", "num_seqs_buckets": (1, 2, 4)}
    expected = [[entry.token_id for entry in answer] for answer in answer_alone(model, PROMPTS, NUM_TOKENS, **settings)]
    log = tmp_path / "log"
    with log.open("wb") as file:
        arguments = stack_arguments(model, tensor_parallel_size=2, **settings)
        async with LocalStack(arguments, num_executors=2, log=file) as stack:
            await stack.wait_until_ready()
            await until_executors(stack, 2)
            received = await take_over(stack, rank_of(log, stack.processes[2]))
            assert await stack.processes[2].exited == 3
    assert received == expected
    (lost,) = read_lines(log, "rank_lost")
    assert lost["reason"].endswith("was ended by SIGKILL")
    moves = [line["num_moves"] for line in read_lines(log, "request_ended")]
    assert (len(moves), set(moves)) == (6, {0, 1})  # at least two stayed where they were, at least two moved


async def take_over(stack: LocalStack, rank_pid: int) -> list[list[int]]:
    """All streams, of which all have begun and none has ended when the rank dies."""
    async with AsyncClient(stack.gateway_address, timeout_s=120, max_resumes=0) as client:
        streams = [
            client.stream(token_ids=prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
            for prompt in PROMPTS
        ]
        begun: Sequence[Any] = await asyncio.gather(*(anext(stream) for stream in streams))
        os.kill(rank_pid, signal.SIGKILL)
        rest = await asyncio.gather(*map(rest_of, streams))
        assert [stream.usage and stream.usage.completion_tokens for stream in streams] == [NUM_TOKENS] * len(PROMPTS)
    return [[*first.token_ids, *tokens] for first, tokens in zip(begun, rest, strict=True)]
