"""`holdback generate "..."`: streams an answer to the terminal."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

from holdback.cli import calling
from holdback.client import AsyncClient
from holdback.errors import UnavailableError

WAIT_S = 1.0
"""Between two tries of `--wait`."""


def generate(argv: list[str]) -> int:
    """Exit status: 0, 1 with the error on standard error, or 2 for a flag that is not allowed."""
    return asyncio.run(_stream(_parse(argv)))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="holdback generate", description=__doc__)
    parser.add_argument("prompt", help="what to say to the model; - reads standard input")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    parser.add_argument(
        "--wait", action="store_true", help="while nobody can serve it yet, ask again, until --timeout is over"
    )
    calling.add_flags(parser)
    return parser.parse_args(argv)


async def _stream(flags: argparse.Namespace) -> int:
    calling.prepare_output()
    text = sys.stdin.read() if flags.prompt == "-" else flags.prompt
    answer = _Answer(flags, text)
    while not await answer.show():
        pass
    print()
    return 0


class _Answer:
    """One answer, asked for until somebody gives it; the timeout is that of all tries together."""

    def __init__(self, flags: argparse.Namespace, text: str) -> None:
        self._flags = flags
        self._text = text
        self._settings = calling.settings(flags)
        self._ends_at: float | None = None if flags.timeout is None else time.monotonic() + flags.timeout
        self._has_begun = False

    async def show(self) -> bool:
        """Whether it is all there; False, after a wait, where nobody could give it and it is worth another try."""
        try:
            await self._ask()
        except UnavailableError:
            if not self._flags.wait or self._has_begun or not self._has_time():
                raise
            await asyncio.sleep(WAIT_S)
            return False
        return True

    def _has_time(self) -> bool:
        """Whether there is any for another try, which then has what is left of it."""
        if self._ends_at is not None:
            self._settings["timeout_s"] = left_s = self._ends_at - time.monotonic() - WAIT_S
            return left_s > 0
        return True

    async def _ask(self) -> None:
        """With a client of its own, so that names are looked up again."""
        options = calling.sampling(self._flags)
        with calling.checking_flags():
            client = AsyncClient(calling.addresses(self._flags), **self._settings)
        async with client:
            messages = [{"role": "user", "content": self._text}]
            ask = client.stream(self._text, **options) if self._flags.raw else client.chat_stream(messages, **options)
            async for piece in ask:
                self._has_begun = True
                calling.show(piece.text)
