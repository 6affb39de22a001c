"""A rank other than 0: `python -m executor_svc.parallel.rank`, started by `processes`.

It runs what rank 0 tells it on a device of its own, one call after the other, and reports its stages and its last
words. It ends when rank 0 closes the socket or is gone; signals of a terminal or a service manager it leaves to rank 0,
which finishes its steps first.

Exit status: 0 when rank 0 closed the socket, 2 for what makes an executor's status 2, else 1.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import queue
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from executor_svc.config import ExecutorConfig
from executor_svc.graphs import build_graph
from executor_svc.parallel.messages import Frame, FrameSocket, RequestTable
from holdback.errors import ConfigError, HoldbackError
from holdback.parent import end_with_parent
from holdback.telemetry import configure_logging

if TYPE_CHECKING:
    from executor_svc.devices.base import Device, GraphKey

log = structlog.get_logger()

END_TIMEOUT_S = 2.0
"""How long the rest may take once rank 0 is gone: it may hang in a collective that nobody answers."""


class Follower:
    """Does what the frames of rank 0 say, in their order."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._built: set[GraphKey] = set()
        self._requests = RequestTable()
        self._calls = {"start": self._start, "step": self._step, "reset": self._reset}

    def follow(self, frame: Frame) -> None:
        self._calls[frame.kind](frame)

    def _start(self, frame: Frame) -> None:
        self._device.start_request(*self._requests.decode_start(frame))

    def _step(self, frame: Frame) -> None:
        inputs = self._requests.decode_step(frame)
        try:
            if inputs.key in self._built:
                self._device.collect(self._device.launch(inputs))
            else:
                self._built.add(inputs.key)
                build_graph(self._device, inputs)
        except ConfigError:  # this rank cannot have the graph, whatever the others can
            raise
        except HoldbackError as error:
            # What is wrong with a request is found before the model runs, and on rank 0 too, which answers for it.
            log.debug("step_refused", reason=error.message)

    def _reset(self, _frame: Frame) -> None:
        self._requests.clear()
        self._device.reset()


def main(argv: Sequence[str] | None = None) -> int:
    end_with_parent(signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    arguments = _parser().parse_args(argv)
    connection = FrameSocket(socket.socket(fileno=arguments.socket))
    first = connection.receive()
    if first is None:
        return 0
    config = ExecutorConfig.model_validate(first.fields["config"])
    configure_logging(f"executor rank {arguments.rank}", config.log_level)
    frames = _read_on(connection)
    try:
        _run(arguments.rank, config, pathlib.Path(first.fields["meeting_file"]), connection, frames)
    except HoldbackError as error:
        connection.send(Frame("failed", {"reason": error.message}))
        return 2 if isinstance(error, ConfigError) else 1
    except Exception as error:
        log.exception("rank_failed", rank=arguments.rank)
        connection.send(Frame("failed", {"reason": f"{type(error).__name__}: {error}"}))
        return 1
    return 0


def _run(
    rank: int,
    config: ExecutorConfig,
    meeting_file: pathlib.Path,
    connection: FrameSocket,
    frames: queue.SimpleQueue[Frame | None],
) -> None:
    from executor_svc.devices import create_local_device, load_collectives
    from executor_svc.parallel.group import RankGroup

    backends = load_collectives(config)
    connection.send(Frame("joining"))
    group = RankGroup(rank, config.tensor_parallel_size, meeting_file, backends)
    device = create_local_device(config, group)
    connection.send(Frame("ready"))
    follower = Follower(device)
    while (frame := frames.get()) is not None:
        follower.follow(frame)
    device.close()


def _read_on(connection: FrameSocket) -> queue.SimpleQueue[Frame | None]:
    """Frames as they come; None when rank 0 closed the socket or is gone, and soon after that the process ends."""
    frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()

    def read() -> None:
        while (frame := connection.receive()) is not None:
            frames.put(frame)
        frames.put(None)
        threading.Event().wait(END_TIMEOUT_S)
        os._exit(1)

    threading.Thread(target=read, name="frames", daemon=True).start()
    return frames


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="executor_svc.parallel.rank", description="started by an executor")
    for name in ("rank", "size", "socket"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # an interpreter that shuts down around the threads of a process group may abort
