"""Server-sent events of one streamed answer, and output of several generations in the order in which it comes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from gateway.choice import Choice, Delta
from gateway.generation import GenerationRun
from gateway.openai.shapes import Error, Usage

DONE = b"data: [DONE]\n\n"


class Events:
    """Writes the events of one answer; what all of them share is written once."""

    def __init__(self, head: Mapping[str, Any], *, includes_usage: bool) -> None:
        self._head = "data: " + json.dumps(head, separators=(",", ":"))[:-1] + ',"choices":['
        self._tail = '],"usage":null}\n\n' if includes_usage else "]}\n\n"

    def choice(self, choice: str) -> bytes:
        """An event with one choice, which is JSON already."""
        return f"{self._head}{choice}{self._tail}".encode()

    def usage(self, usage: Usage) -> bytes:
        """The event that has the usage and no choices."""
        return f'{self._head}],"usage":{usage.model_dump_json()}}}\n\n'.encode()


def error_event(error: Error) -> bytes:
    """The last event of a stream that fails."""
    excluded = {"resume"} if error.resume is None else None
    return f'data: {{"error":{error.model_dump_json(exclude=excluded)}}}\n\n'.encode()


async def merged(runs: Sequence[GenerationRun]) -> AsyncGenerator[tuple[int, Choice, Delta], None]:
    """New output of all runs, each with the number of its run, until every choice has its end.

    However many runs there are, one piece at most waits for the reader beside what the runs merge.

    Raises:
        HoldbackError: a choice failed.
    """
    if len(runs) == 1:
        async for choice, delta in runs[0].deltas():
            yield 0, choice, delta
        return
    queue: asyncio.Queue[tuple[int, Choice, Delta] | BaseException | None] = asyncio.Queue(maxsize=1)
    pumps = [asyncio.create_task(_pump(number, run, queue)) for number, run in enumerate(runs)]
    try:
        num_running = len(runs)
        while num_running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    number: int, run: GenerationRun, queue: asyncio.Queue[tuple[int, Choice, Delta] | BaseException | None]
) -> None:
    try:
        async with aclosing(run.deltas()) as deltas:  # type: ignore[type-var]
            async for choice, delta in deltas:
                await queue.put((number, choice, delta))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)
