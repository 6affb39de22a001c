"""`holdback demo`: starts everything, asks two questions, shows the steps that answered them, stops."""

from __future__ import annotations

import asyncio
import itertools
import pathlib
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import IO

from holdback import rpc
from holdback.cli.local import LocalStack, run_until_signal
from holdback.cli.progress import tell
from holdback.cli.up import parse as parse_up
from holdback.client import AsyncClient
from holdback.errors import HoldbackError, InternalError
from holdback.flags import FlagParser
from holdback.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2

QUESTION = "What is the capital of France?"
NUM_LOG_LINES_SHOWN = 30


def demo(argv: list[str]) -> int:
    """Takes the arguments of `holdback up`. Exit status: 0 when both questions were answered."""
    parser = FlagParser(
        prog="holdback demo",
        description=__doc__,
        epilog="All other flags are those of holdback up.",
    )
    parser.add_argument("--max-tokens", type=int, default=48, help="most tokens of each answer (default 48)")
    own, rest = parser.parse_known_args(argv)
    up, arguments = parse_up(rest)

    async def start_and_ask(log: IO[bytes]) -> bool:
        telling = asyncio.create_task(tell(pathlib.Path(log.name)))

        async def ask_all(stack: LocalStack) -> None:
            telling.cancel()
            await _ask_all(stack, own.max_tokens, began)

        try:
            return await run_until_signal(LocalStack(arguments, num_executors=up.executors, log=log), ask_all)
        finally:
            telling.cancel()

    began = time.monotonic()
    print("Starting scheduler, gateway and executor; the executor warms up every bucket ...", flush=True)
    with tempfile.NamedTemporaryFile(prefix="holdback-demo-", suffix=".log") as log:
        try:
            is_complete = asyncio.run(start_and_ask(log))
        except HoldbackError:
            print(f"The processes said last:\n{tail(log)}", flush=True)
            raise
    return 0 if is_complete else 130


async def _ask_all(stack: LocalStack, max_tokens: int, began: float) -> None:
    print(f"Ready after {time.monotonic() - began:.1f} s. Gateway on {stack.gateway_address}.\n", flush=True)
    for number, prompt in enumerate((QUESTION, long_prompt())):
        await _ask(stack, f"demo-{number}", prompt, max_tokens)


async def _ask(stack: LocalStack, request_id: str, prompt: str, max_tokens: int) -> None:
    """Streams one greedy answer and then prints the steps that it took."""
    print(f"> {shorten(prompt)}\n", flush=True)
    async with AsyncClient(stack.gateway_address) as client:
        pieces = client.stream(
            messages=[{"role": "user", "content": prompt}],
            request_id=request_id,
            temperature=0.0,
            max_tokens=max_tokens,
        )
        text = ""
        async for piece in pieces:
            print(piece.text, end="", flush=True)
            text += piece.text
    if not text.strip():
        raise InternalError(f"the answer to {shorten(prompt)!r} is empty")
    print("\n")
    print("\n".join(step_table(await _steps(stack.scheduler_address, request_id))), "\n", flush=True)


async def _steps(address: str, request_id: str) -> list[scheduler_pb2.StepRecord]:
    async with rpc.create_channel(address) as channel:
        stub: scheduler_pb2_grpc.SchedulerServiceAsyncStub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        state = await stub.GetState(scheduler_pb2.GetStateRequest(request_id=request_id), timeout=10)
    return [step for lane in state.lanes for step in lane.steps]


def step_table(steps: Iterable[scheduler_pb2.StepRecord]) -> Iterator[str]:
    """One line for each prefill chunk and one for each run of decode steps."""
    yield f"{'steps':>12}  {'state':<15} {'computed':>9} {'scheduled':>10} {'padded':>7} {'ms':>8}"
    for state, group in itertools.groupby(steps, key=lambda step: step.state):
        name = types_pb2.SchedulerState.Name(state).removeprefix("SCHEDULER_STATE_")
        members = list(group)
        runs = [members] if name == "ACTIVE_DECODE" else [[step] for step in members]
        for run in runs:
            yield _line(name, run)


def _line(name: str, run: list[scheduler_pb2.StepRecord]) -> str:
    first, last = run[0], run[-1]
    numbers = f"{first.step}" if len(run) == 1 else f"{first.step}..{last.step}"
    scheduled = sum(step.rows[0].num_scheduled_tokens for step in run)
    padded = sum(step.rows[0].num_scheduled_tokens_padded for step in run)
    duration_ms = sum(step.duration_us for step in run) / 1000
    computed = first.rows[0].num_computed_tokens
    return f"{numbers:>12}  {name:<15} {computed:>9} {scheduled:>10} {padded:>7} {duration_ms:>8.1f}"


def long_prompt() -> str:
    """About 1,300 tokens: more than one prefill chunk at the default of 512."""
    notes = [
        f"Note {number}: on day {number} the ferry to harbour {number % 7 + 1} left at {number % 12 + 6} o'clock "
        f"and carried {number * 13 % 90 + 10} people."
        for number in range(1, 41)
    ]
    return "\n".join([*notes, "", "In one sentence: what are these notes about?"])


def shorten(text: str) -> str:
    return text if len(text) <= 160 else f"{text[:80]} ... {text[-60:]}  ({len(text)} characters)"


def tail(log: IO[bytes]) -> str:
    lines = pathlib.Path(log.name).read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-NUM_LOG_LINES_SHOWN:])
