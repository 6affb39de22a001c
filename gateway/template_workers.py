"""Where chat templates run: a few processes, each of which is ended and replaced when a template takes too long.

A template is a program of the model's author that works on a client's text. In a process of its own it can hold up
nobody else's tokens, cannot be given time without end, and has a limit of memory. Processes start when they are
needed, the first one with `start`.

What is not covered: a conversation waits while all processes render others, each for at most the time that it may take;
the shorter goes first (`turns`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from gateway.chat import check_messages, template_error, template_failed
from gateway.template_process import HEADER, pack, pack_question
from gateway.turns import TurnLimits, Turns
from holdback.errors import ConfigError, InternalError
from holdback.parent import PARENT_VARIABLE

log = structlog.get_logger(__name__)

NUM_WORKERS = 2
START_TIMEOUT_S = 60.0
MEMORY_BYTES = 1024**3
TURN_LIMITS = TurnLimits(NUM_WORKERS, max_chars=64 * 1024 * 1024, largest_chars=8 * 1024 * 1024)
MESSAGE_CHARS = 256
"""What each message counts beside its text."""

ENVIRONMENT = ("LANG", "LC_ALL", "PATH", "PYTHONPATH", "TZ")
"""All of the gateway's environment that a template's process gets: nothing in it is secret."""


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """A template as a model directory has it. It is compiled by the processes alone: that, too, can take for ever.

    Attributes:
        owner: whose it is, for people: the model and its directory.
        text: Jinja; None for a model that has no template, which refuses every conversation.
        special_tokens: variables such as `bos_token`.
    """

    owner: str
    text: str | None
    special_tokens: Mapping[str, str]


class WorkerTemplate:
    """One model's template, rendered in a worker."""

    def __init__(self, workers: TemplateWorkers, number: int, source: TemplateSource) -> None:
        self._workers = workers
        self._number = number
        self._source = source

    async def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """As `ChatTemplate.render`; a template that takes too long or too much memory refuses the messages too."""
        check_messages(messages, has_template=self._source.text is not None)
        return await self._workers.render(self._number, messages)


class TemplateWorkers:
    """The processes, and the templates that all of them know."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._sources: list[TemplateSource] = []
        self._idle: list[_Worker] = []
        self._turns = Turns("rendered by a chat template", TURN_LIMITS)

    def add(self, source: TemplateSource) -> WorkerTemplate:
        """Makes a template known; before `start`."""
        self._sources.append(source)
        return WorkerTemplate(self, len(self._sources) - 1, source)

    async def start(self) -> None:
        """Starts the first process, which compiles all templates. Raises ConfigError when it cannot."""
        self._idle.append(await self._start_worker())

    async def render(self, number: int, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt of a conversation.

        Raises:
            InvalidArgumentError: the template does not give one in time.
            ResourceExhaustedError: too much text waits already.
        """
        num_chars = sum(MESSAGE_CHARS + sum(map(len, message.values())) for message in messages)
        # Who gives up does not leave an answer behind that the next would read: the exchange goes on without it, and
        # its process counts as taken until then.
        return await self._turns.run(num_chars, lambda: asyncio.create_task(self._render(number, messages)))

    async def close(self) -> None:
        """Ends all processes."""
        while under_way := list(self._turns.under_way):  # what waited has their places then
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
        while self._idle:
            await self._idle.pop().end()

    async def _render(self, number: int, messages: Sequence[Mapping[str, Any]]) -> str:
        worker = await self._free_worker()
        is_fit = False
        try:
            async with asyncio.timeout(self._timeout_s):
                answer, text = await worker.ask(pack_question(number, messages))
            is_fit = True
        except TimeoutError:
            raise template_failed(f"it took longer than template_timeout_s, which is {self._timeout_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise template_failed("it ended the process that rendered it") from None
        finally:
            if is_fit:
                self._idle.append(worker)
            else:
                log.warning("template_worker_replaced", worker_pid=worker.pid, template=number)
                await worker.end()
        if "error" in answer:
            raise template_error(answer["error"])
        return text

    async def _free_worker(self) -> _Worker:
        """One that waits and has not died meanwhile, else a new one.

        Raises:
            InternalError: none can be started, which is no fault of a client's.
        """
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive:
                return worker
            log.warning("template_worker_died", worker_pid=worker.pid)
        try:
            return await self._start_worker()
        except ConfigError as error:
            log.error("template_worker_not_started", why=error.message)
            raise InternalError("no process could be started for the chat template; the log says why") from error

    async def _start_worker(self) -> _Worker:
        worker = await _Worker.start(MEMORY_BYTES)
        problem: str | None = None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                for source in self._sources:
                    problem = await worker.compile(source)
                    if problem is not None:
                        break
        except TimeoutError:
            problem = f"the chat template took longer than {START_TIMEOUT_S:g} s to compile"
        except (asyncio.IncompleteReadError, ConnectionError):
            problem = "the process of the chat template ended while it was compiled"
        except asyncio.CancelledError:
            await worker.end()
            raise
        if problem is not None:
            await worker.end()
            raise ConfigError(f"{source.owner}: {problem}")
        return worker


class _Worker:
    """One process, which answers one question at a time."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        if child.stdin is None or child.stdout is None:
            raise InternalError("a process for chat templates was started without pipes")
        self._child, self._stdin, self._stdout = child, child.stdin, child.stdout
        self.pid = child.pid

    @classmethod
    async def start(cls, memory_bytes: int) -> _Worker:
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # what lies in the working directory is no module of ours
                "-m",
                "gateway.template_process",
                str(memory_bytes),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environment | {PARENT_VARIABLE: str(os.getpid())},
                start_new_session=True,  # Ctrl-C is for the gateway, which still drains
            )
        )

    @property
    def is_alive(self) -> bool:
        return self._child.returncode is None

    async def compile(self, source: TemplateSource) -> str | None:
        """Makes the next template known. What is wrong with it, if anything is."""
        answer, _ = await self.ask(pack({"source": source.text, "special_tokens": source.special_tokens}))
        return None if "error" not in answer else str(answer["error"])

    async def ask(self, frame: bytes) -> tuple[Any, str]:
        """The answer to a frame, and its text."""
        self._stdin.write(frame)
        await self._stdin.drain()
        size, text_size = HEADER.unpack(await self._stdout.readexactly(HEADER.size))
        answer = json.loads(await self._stdout.readexactly(size))
        return answer, (await self._stdout.readexactly(text_size)).decode()

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._child.kill()
        # A pipe that is left full stays open, and newer Pythons wait for it too.
        await self._stdout.read()
        await self._child.wait()
        self._stdin.close()
        with contextlib.suppress(ConnectionError):
            await self._stdin.wait_closed()
