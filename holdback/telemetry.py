"""Logs of every process: one JSON object per line, or coloured columns when standard error is a terminal.

Each line has `timestamp` (UTC, ISO 8601), `level`, `logger`, `event`, `process`, `pid`, and what the caller adds. Lines
of libraries that use `logging` (grpc, transformers, asyncio), warnings and uncaught exceptions take the same form, so a
reader of a pipe can parse every line that Python writes. The C core of gRPC writes plain lines of its own. Our own do
not pass `logging`, which doubles what a line costs: a scheduler may end 10,000 requests at once.

Prompts, answers and tokens are never logged.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import types
from typing import Any, TextIO

import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict, Processor

_LOCK = threading.Lock()
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure_logging(process: str, level: str, stream: TextIO | None = None) -> None:
    """Sends all logs of this process to one stream. A later call replaces the earlier one.

    Args:
        process: what the process is, for example "scheduler"; a field of every line.
        level: least severe level that is written, a key of `LEVELS`.
        stream: where to; standard error if None. JSON unless it is a terminal.
    """
    target = sys.stderr if stream is None else stream
    shared = _shared_processors(process)
    renderers = _renderers(target.isatty())
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        ProcessorFormatter(processors=[ProcessorFormatter.remove_processors_meta, *renderers], foreign_pre_chain=shared)
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(LEVELS[level])
    logging.captureWarnings(capture=True)
    if "transformers" in sys.modules:
        route_library("transformers")
    sys.excepthook = _log_uncaught
    structlog.configure(
        processors=[*shared, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=lambda name=process: _LineWriter(name, target),
        cache_logger_on_first_use=True,
    )


class _LineWriter:
    """Where structlog ends: writes a rendered line, whole, from any thread."""

    def __init__(self, name: str, stream: TextIO) -> None:
        self.name = name
        self._stream = stream

    def msg(self, line: str) -> None:
        # Who read the stream is gone, and there is nobody to tell; a service goes on without it, as with `logging`.
        with contextlib.suppress(OSError, ValueError), _LOCK:
            self._stream.write(line + "\n")
            self._stream.flush()

    debug = info = warning = error = critical = msg


def route_library(name: str) -> None:
    """Makes a library that brought handlers of its own log as everything else does; call it after importing it."""
    logger = logging.getLogger(name)
    logger.handlers.clear()
    logger.propagate = True


def _shared_processors(process: str) -> list[Processor]:
    """What every line passes, ours or a library's."""
    pid = os.getpid()

    def add_process(_logger: Any, _method: str, event: EventDict) -> EventDict:
        event.update(process=process, pid=pid)
        return event

    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_process,
    ]


def _renderers(is_terminal: bool) -> list[Processor]:
    if is_terminal:
        colors = "NO_COLOR" not in os.environ
        plain = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    structlog.get_logger(__name__).critical("uncaught exception", exc_info=(kind, error, trace))
