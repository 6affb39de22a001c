"""The other ranks as rank 0 sees them: child processes, told what to do over a socket each, and watched.

A rank goes through three stages, which it reports: "joining" (torch is loaded, it is about to meet the others), then
"ready" (its device is loaded), then it follows. One thread for each rank waits for its reports and for its end, which
the system tells at once, however it came about. An end that nobody asked for is, while ranks load, an error of the
configuration; later it ends the executor with the status of a step that hung, and its requests go on elsewhere.

A rank that hangs is found as any device that hangs: by the watchdog of steps.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import structlog

from executor_svc.parallel.messages import Frame, FrameSocket
from executor_svc.watchdog import EXIT_STEP_TIMEOUT
from holdback.errors import ConfigError, InternalError
from holdback.parent import PARENT_VARIABLE

if TYPE_CHECKING:
    from executor_svc.config import ExecutorConfig

log = structlog.get_logger()

CLOSE_TIMEOUT_S = 3.0
"""How long a rank may take to end when it is asked to, before it is killed."""

LOAD_GRACE_S = 3.0
"""When a rank ended while all load: how soon rank 0 must have noticed, before the process ends under it.

A collective of rank 0 fails as soon as its peer is gone; only waiting to meet a rank that is gone does not.
"""

_STATES = {"R": "computes", "S": "waits", "D": "waits for the system", "T": "is stopped", "Z": "has ended"}

FAIL_GRACE_S = 1.0
"""When a step failed on rank 0: how soon the rank that made it fail must be known to have ended."""


class RankProcesses:
    """Ranks 1 to n - 1.

    Args:
        config: of the executor; `tensor_parallel_size` is n.
        environment: what to add to the environment of each rank, given its number.
        end_process: called with the exit status when a rank is lost while it serves.

    Attributes:
        meeting_file: where the ranks find each other.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        environment: Callable[[int], Mapping[str, str]] | None = None,
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._end_process = end_process
        self._changed = threading.Condition()
        self._is_serving = False
        self._is_closing = False
        self._folder = tempfile.TemporaryDirectory(prefix="holdback-ranks-")
        self.meeting_file = pathlib.Path(self._folder.name) / "meeting"
        self._ranks: list[_Rank] = []
        # What was not set stays so: some defaults are refused where they would decide nothing.
        settings = config.model_dump(mode="json", exclude_unset=True)
        start = Frame("config", {"config": settings, "meeting_file": str(self.meeting_file)})
        try:
            for number in range(1, config.tensor_parallel_size):
                added = environment(number) if environment is not None else {}
                self._ranks.append(_Rank(number, config.tensor_parallel_size, added, self._note))
        except BaseException:
            self.close()
            raise
        self.send(start)
        log.info("ranks_started", pids={rank.number: rank.process.pid for rank in self._ranks})

    def wait_for(self, stage: str) -> None:
        """Returns when every rank has reached a stage. Raises ConfigError when one has ended instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost() or all(stage in rank.stages for rank in self._ranks))
        self.raise_if_lost()

    def raise_if_lost(self) -> None:
        """Raises ConfigError when a rank has ended, with its last words."""
        if lost := self._lost():
            raise ConfigError(lost.describe())

    def raise_cause(self, error: Exception) -> NoReturn:
        """Raises ConfigError with the words of a rank that has ended, or soon does, else what rank 0 met itself."""
        with self._changed:
            self._changed.wait_for(self._lost, timeout=FAIL_GRACE_S)
        self.raise_if_lost()
        raise error

    def serve(self) -> None:
        """From now on a rank that ends takes the process with it. Raises ConfigError when one has ended already."""
        with self._changed:
            self._is_serving = True
        self.raise_if_lost()

    def send(self, frame: Frame) -> None:
        """Tells all ranks. One that is gone is left to the thread that waits for its end."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.socket.send(frame)

    def fail(self, error: BaseException) -> NoReturn:
        """Ends the process: a step failed on rank 0, so that the ranks are not at the same place any more."""
        with self._changed:
            self._changed.wait_for(self._lost, timeout=FAIL_GRACE_S)
        if not self._lost():
            log.critical("step_failed_among_ranks", exit_status=EXIT_STEP_TIMEOUT, exc_info=error)
            self._end_process(EXIT_STEP_TIMEOUT)
        raise InternalError(f"a step failed among ranks that are in step no more: {error}") from error

    def describe(self) -> str:
        """What each rank does now, as far as the system tells: one that is stopped or waits for a disk shows here."""
        return "; ".join(f"rank {rank.number} (process {rank.process.pid}) {rank.state()}" for rank in self._ranks)

    def close(self) -> None:
        """Ends the ranks in order, after the steps that they were told; kills one that takes too long."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        for rank in self._ranks:
            rank.socket.finish()
        for rank in self._ranks:
            rank.close()
        self._folder.cleanup()

    def _lost(self) -> _Rank | None:
        return next((rank for rank in self._ranks if rank.status is not None), None)

    def _note(self, rank: _Rank) -> None:
        """A rank has reached a stage or ended; called by its thread."""
        with self._changed:
            self._changed.notify_all()
            if rank.status is None or self._is_closing:
                return
            is_serving = self._is_serving
            if not is_serving:
                self._changed.wait_for(lambda: self._is_closing, timeout=LOAD_GRACE_S)
                if self._is_closing:
                    return
        # A rank that ends with 2 says that what was asked for cannot be: a graph that must be in the cache and is not.
        status = EXIT_STEP_TIMEOUT if is_serving and rank.status != 2 else 2
        log.critical("rank_lost", reason=rank.describe(), rank=rank.number, exit_status=status)
        self._end_process(status)


class _Rank:
    """One child process.

    Attributes:
        stages: those that it has reported.
        status: as `subprocess` gives it, once it has ended.
    """

    def __init__(self, number: int, size: int, environment: Mapping[str, str], note: Callable[[_Rank], None]) -> None:
        self.number = number
        self.stages: set[str] = set()
        self.status: int | None = None
        self._last_words = ""
        self._note = note
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                _command(number, size, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | dict(environment) | {PARENT_VARIABLE: str(os.getpid())},
                start_new_session=True,  # Ctrl-C reaches rank 0 alone, which ends the others in order
            )
        self.socket = FrameSocket(ours)
        self._thread = threading.Thread(target=self._wait, name=f"rank-{number}", daemon=True)
        self._thread.start()

    def describe(self) -> str:
        """How it ended, for people."""
        status = self.status or 0
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        words = f": {self._last_words}" if self._last_words else ""
        return f"rank {self.number} (process {self.process.pid}) {how}{words}"

    def state(self) -> str:
        """Of its process, for people."""
        try:
            stat = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "is in a state that this system does not tell"
        letter = stat.rpartition(")")[2].split()[0]
        return _STATES.get(letter, f"is in state {letter}")

    def close(self) -> None:
        try:
            self.process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            log.warning("rank_killed", rank=self.number, timeout_s=CLOSE_TIMEOUT_S)
            self.process.kill()
        self._thread.join()
        self.socket.close()

    def _wait(self) -> None:
        while (frame := self.socket.receive()) is not None:
            if frame.kind == "failed":
                self._last_words = frame.fields["reason"]
            else:
                self.stages.add(frame.kind)
                self._note(self)
        self.status = self.process.wait()
        self._note(self)


def _command(number: int, size: int, descriptor: int) -> Sequence[str]:
    numbers = ("--rank", str(number), "--size", str(size), "--socket", str(descriptor))
    # -P: what lies in the working directory is no module of ours
    return (sys.executable, "-P", "-m", "executor_svc.parallel.rank", *numbers)
