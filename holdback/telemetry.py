"""Logs of every process: one JSON object per line, or coloured columns when standard error is a terminal.

Each line has `timestamp` (UTC, ISO 8601), `level`, `logger`, `event`, `process`, `pid`, and what the caller adds. Lines
of libraries that use `logging` (grpc, transformers, asyncio), warnings and uncaught exceptions take the same form, so a
reader of a pipe can parse every line that Python writes. The C core of gRPC writes plain lines of its own.

Prompts, answers and tokens are never logged.
"""

from __future__ import annotations

import logging
import os
import sys
import types
from typing import Any, TextIO

import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict, Processor

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
    handler = logging.StreamHandler(target)
    handler.setFormatter(ProcessorFormatter(processors=_renderers(target.isatty()), foreign_pre_chain=shared))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(LEVELS[level])
    logging.captureWarnings(capture=True)
    if "transformers" in sys.modules:
        route_library("transformers")
    sys.excepthook = _log_uncaught
    structlog.configure(
        processors=[*shared, ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


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
        return [
            ProcessorFormatter.remove_processors_meta,
            structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain),
        ]
    return [
        ProcessorFormatter.remove_processors_meta,
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(),
    ]


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    structlog.get_logger(__name__).critical("uncaught exception", exc_info=(kind, error, trace))
