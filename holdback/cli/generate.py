"""`holdback generate "..."`: streams an answer to the terminal."""

from __future__ import annotations

import argparse
import asyncio
import sys

from holdback.cli import calling
from holdback.client import AsyncClient


def generate(argv: list[str]) -> int:
    """Exit status: 0, 1 with the error on standard error, or 2 for a flag that is not allowed."""
    return asyncio.run(_stream(_parse(argv)))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="holdback generate", description=__doc__)
    parser.add_argument("prompt", help="what to say to the model; - reads standard input")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    calling.add_flags(parser)
    return parser.parse_args(argv)


async def _stream(flags: argparse.Namespace) -> int:
    calling.prepare_output()
    text = sys.stdin.read() if flags.prompt == "-" else flags.prompt
    options = calling.sampling(flags)
    with calling.checking_flags():
        client = AsyncClient(calling.addresses(flags), **calling.settings(flags))
    async with client:
        messages = [{"role": "user", "content": text}]
        pieces = client.stream(text, **options) if flags.raw else client.chat_stream(messages, **options)
        async for piece in pieces:
            calling.show(piece.text)
    print()
    return 0
