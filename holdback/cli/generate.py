"""`holdback generate "..."`: streams an answer to the terminal."""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import sys

from holdback.client import AsyncClient
from holdback.flags import FlagParser
from holdback.tls import add_client_flags, from_flags

DEFAULT_ADDRESS = "127.0.0.1:50051"


def generate(argv: list[str]) -> int:
    """Exit status: 0, or 1 with the error on standard error."""
    return asyncio.run(_stream(_parse(argv)))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = FlagParser(prog="holdback generate", description=__doc__)
    parser.add_argument("prompt", help="what to say to the model; - reads standard input")
    parser.add_argument(
        "--address",
        default=os.environ.get("HOLDBACK_ADDRESS", DEFAULT_ADDRESS),
        help=f"gateway (default: HOLDBACK_ADDRESS, else {DEFAULT_ADDRESS})",
    )
    parser.add_argument("--model", default="", help="served model (default: the only one)")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    parser.add_argument("--max-tokens", type=int, help="most tokens of the answer (default: the pool's)")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: 1)")
    parser.add_argument("--top-p", type=float, help="keep the most likely tokens up to this probability (default: 1)")
    parser.add_argument("--top-k", type=int, help="keep this many most likely tokens (default: all)")
    parser.add_argument("--seed", type=int, help="makes the answer repeatable (default: drawn)")
    parser.add_argument("--stop", action="append", default=[], help="string that ends the answer; may be repeated")
    parser.add_argument("--timeout", type=float, help="seconds until the request is given up (default: none)")
    add_client_flags(parser)
    return parser.parse_args(argv)


async def _stream(flags: argparse.Namespace) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that cannot show a character still gets the rest
        sys.stdout.reconfigure(errors="replace")
    text = sys.stdin.read() if flags.prompt == "-" else flags.prompt
    prompt = {"prompt": text} if flags.raw else {"messages": [{"role": "user", "content": text}]}
    async with AsyncClient(flags.address, timeout_s=flags.timeout, tls=from_flags(flags)) as client:
        pieces = client.stream(
            **prompt,
            model=flags.model,
            max_tokens=flags.max_tokens,
            temperature=flags.temperature,
            top_p=flags.top_p,
            top_k=flags.top_k,
            seed=flags.seed,
            stop=flags.stop,
        )
        async for piece in pieces:
            print(piece.text, end="", flush=True)
    print()
    return 0
