"""What processes say while they start, a short line for each step, taken from their log as it grows."""

from __future__ import annotations

import asyncio
import json
import pathlib
from collections.abc import Callable
from typing import Any

POLL_S = 0.1

SENTENCES: dict[str, Callable[[dict[str, Any]], str]] = {
    "scheduler_listens": lambda line: "scheduler listens",
    "model_loaded": lambda line: f"model loaded: {line['bytes'] / 1e6:.0f} MB in {line['seconds']:.1f} s",
    "kernels": lambda line: f"kernels: {line['kernels']}",
    "graph_ready": lambda line: f"graph {line['number']} of {line['of']} is warm: {line['phase']}, size {line['size']}",
    "registered": lambda line: "executor has registered",
}
"""By the event of a line; every other line is passed over."""


async def tell(log: pathlib.Path) -> None:
    """Prints what there is to say until it is cancelled."""
    with log.open(encoding="utf-8", errors="replace") as lines:
        rest = ""
        while True:
            # A process may be in the middle of a line.
            *whole, rest = (rest + lines.read()).split("\n")
            for line in whole:
                said = sentence(line)
                if said is not None:
                    print(f"  {said}", flush=True)
            await asyncio.sleep(POLL_S)


def sentence(line: str) -> str | None:
    """One line of a log, for people; None where it tells nothing of a start."""
    try:
        entry = json.loads(line)
        return SENTENCES[entry["event"]](entry)
    except (ValueError, KeyError, TypeError):
        return None
