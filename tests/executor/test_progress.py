"""A bar on a terminal, and nothing but log lines elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from executor_svc.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def advance_twice() -> None:
    with ProgressBar(2, "graph") as bar:
        for number in (1, 2):
            bar.advance(lambda number=number: sys.stderr.write(f"line {number}\n"))  # type: ignore[misc]


def test_without_a_terminal_there_are_only_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    advance_twice()
    assert stream.getvalue() == "line 1\nline 2\n"


def test_on_a_terminal_a_bar_stands_below_the_lines_and_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    advance_twice()
    written = terminal.getvalue()
    assert "0/2" in written
    assert written.index("line 1\n") < written.index("1/2") < written.index("line 2\n") < written.index("2/2")
    # Each line begins where the bar was cleared, and the last thing is a cleared bar.
    shown = written.split("\n")
    assert [line.rpartition("\r")[2] for line in shown[:2]] == ["line 1", "line 2"]
    assert shown[-1].rpartition("\r")[2].strip() == ""
