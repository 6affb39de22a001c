"""What a start says of itself."""

from __future__ import annotations

import asyncio
import json
import pathlib

import pytest

from holdback.cli.progress import sentence, tell

GRAPH = {"event": "graph_ready", "phase": "prefill", "size": 128, "number": 1, "of": 9, "level": "info"}


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (GRAPH, "graph 1 of 9 is warm: prefill, size 128"),
        ({"event": "model_loaded", "bytes": 269_000_000, "seconds": 0.81}, "model loaded: 269 MB in 0.8 s"),
        ({"event": "request_ended"}, None),
        ({"event": "graph_ready"}, None),  # of another version
        (["event"], None),
    ],
)
def test_only_lines_of_a_start_are_told(entry: object, expected: str | None) -> None:
    assert sentence(json.dumps(entry)) == expected


def test_what_is_no_json_is_passed_over() -> None:
    assert sentence("Traceback (most recent call last):") is None


async def test_a_log_is_told_as_it_grows_and_no_line_in_halves(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "demo.log"
    line = json.dumps(GRAPH) + "\n"
    path.write_text(line + line[:20], encoding="utf-8")
    telling = asyncio.create_task(tell(path))
    told = ""
    while told.count("graph 1 of 9") < 1:
        await asyncio.sleep(0.01)
        told += capsys.readouterr().out
    with path.open("a", encoding="utf-8") as log:
        log.write(line[20:])
    while told.count("graph 1 of 9") < 2:
        await asyncio.sleep(0.01)
        told += capsys.readouterr().out
    telling.cancel()
    assert told == "  graph 1 of 9 is warm: prefill, size 128\n" * 2
