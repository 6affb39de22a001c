"""The form of log lines, of ours and of libraries."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from holdback.telemetry import configure_logging, route_library


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, hook = list(root.handlers), root.level, sys.excepthook
    yield
    logging.captureWarnings(capture=False)
    root.handlers[:] = handlers
    root.setLevel(level)
    sys.excepthook = hook
    structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_says_what_when_and_which_process() -> None:
    stream = io.StringIO()
    configure_logging("scheduler", "info", stream)
    structlog.get_logger("scheduler_svc.lane").info("lane started", executor_id="e0", num_blocks=4)
    (line,) = lines(stream)
    timestamp = line.pop("timestamp")
    assert timestamp.endswith("Z")
    assert timestamp[10] == "T"
    assert line == {
        "event": "lane started",
        "level": "info",
        "logger": "scheduler_svc.lane",
        "process": "scheduler",
        "pid": os.getpid(),
        "executor_id": "e0",
        "num_blocks": 4,
    }


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_lines_below_the_level_are_not_written(level: str) -> None:
    order = ["debug", "info", "warning", "error"]
    stream = io.StringIO()
    configure_logging("gateway", level, stream)
    for name in order:
        getattr(structlog.get_logger("ours"), name)("said")
        getattr(logging.getLogger("theirs"), name)("said")
    expected = [name for name in order[order.index(level) :] for _ in range(2)]
    assert [line["level"] for line in lines(stream)] == expected


def test_a_library_that_uses_logging_is_written_in_the_same_form() -> None:
    stream = io.StringIO()
    configure_logging("gateway", "info", stream)
    logging.getLogger("grpc._cython.cygrpc").error("call %d failed", 7)
    (line,) = lines(stream)
    assert (line["event"], line["logger"], line["level"]) == ("call 7 failed", "grpc._cython.cygrpc", "error")
    assert (line["process"], line["pid"]) == ("gateway", os.getpid())


def test_a_library_with_handlers_of_its_own_is_routed_once() -> None:
    own = io.StringIO()
    library = logging.getLogger("library_with_handlers")
    library.addHandler(logging.StreamHandler(own))
    library.propagate = False
    stream = io.StringIO()
    configure_logging("executor", "info", stream)
    route_library("library_with_handlers")
    logging.getLogger("library_with_handlers.part").warning("weights are tied")
    assert [line["event"] for line in lines(stream)] == ["weights are tied"]
    assert own.getvalue() == ""


def test_an_exception_is_one_field_of_one_line() -> None:
    stream = io.StringIO()
    configure_logging("executor", "info", stream)
    try:
        raise RuntimeError("no such graph")
    except RuntimeError:
        structlog.get_logger("executor_svc").exception("step failed", step=3)
    (line,) = lines(stream)
    assert (line["event"], line["step"], line["level"]) == ("step failed", 3, "error")
    assert line["exception"].splitlines()[-1] == "RuntimeError: no such graph"


def test_a_value_that_is_not_json_is_shown_and_not_refused() -> None:
    stream = io.StringIO()
    configure_logging("executor", "info", stream)
    structlog.get_logger("executor_svc").info("odd", value={1, 2}, text="line\nbreak")
    (line,) = lines(stream)
    assert (line["value"], line["text"]) == ("{1, 2}", "line\nbreak")


def test_a_warning_is_a_line() -> None:
    stream = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        configure_logging("executor", "warning", stream)
        warnings.warn("soon gone", FutureWarning, stacklevel=1)
        logging.captureWarnings(capture=False)
    (line,) = lines(stream)
    assert (line["logger"], line["level"]) == ("py.warnings", "warning")
    assert "FutureWarning: soon gone" in line["event"]


def test_a_later_call_replaces_the_earlier_one() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging("scheduler", "info", first)
    configure_logging("scheduler", "info", second)
    logging.getLogger("library").info("once")
    assert first.getvalue() == ""
    assert len(lines(second)) == 1


def test_a_terminal_gets_columns_instead_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    configure_logging("scheduler", "info", stream)
    structlog.get_logger("scheduler_svc").info("lane started", num_blocks=4)
    (line,) = stream.getvalue().splitlines()
    assert "lane started" in line
    assert "num_blocks=4" in line
    assert "process=scheduler" in line
    assert "\x1b" not in line


def test_an_uncaught_exception_is_a_line_on_standard_error() -> None:
    code = "from holdback.telemetry import configure_logging; configure_logging('gateway', 'info'); 1 / 0"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    (line,) = [json.loads(text) for text in done.stderr.splitlines()]
    assert done.returncode == 1
    assert done.stdout == ""
    assert (line["event"], line["level"], line["process"]) == ("uncaught exception", "critical", "gateway")
    assert line["exception"].splitlines()[-1] == "ZeroDivisionError: division by zero"
