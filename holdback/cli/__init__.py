"""The command `holdback`: finds the command that was called and loads nothing else.

`up`, `generate`, `chat` and other commands of this package are in the table below; each service adds its own as entry
points of the group `holdback.commands`. Every command is a function of its arguments that returns the exit status.

What takes time to import is imported once `main` runs: Ctrl-C before that is Python's, with a traceback.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

Command = Callable[[list[str]], int]

OWN_COMMANDS = {
    "up": "holdback.cli.up:up",
    "generate": "holdback.cli.generate:generate",
    "chat": "holdback.cli.chat:chat",
    "demo": "holdback.cli.demo:demo",
}
SUMMARIES = {
    "up": "start scheduler, executor and gateway on this machine",
    "generate": "stream an answer to the terminal",
    "chat": "hold a conversation in the terminal",
    "demo": "start everything, ask two questions, show the steps, stop",
    "scheduler": "start a scheduler",
    "executor": "start an executor",
    "gateway": "start a gateway",
    "key": "draw an API key for the gateway's file of keys",
    "model": "import a model: holdback model import SRC DEST",
    "state": "show what a scheduler's executors run, and why its queue waits",
    "replay": "run a recorded scheduler trace",
    "timeline": "write the last steps of all executors as a trace for Perfetto",
}
EXTRAS = {
    "scheduler": "scheduler",
    "replay": "scheduler",
    "state": "scheduler",
    "timeline": "scheduler",
    "executor": "executor",
    "model": "executor",
    "gateway": "gateway",
    "key": "gateway",
}
OWN_PACKAGES = ("holdback", "scheduler_svc", "executor_svc", "gateway")
INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Runs one command.

    Exit status: 0, 1 when it failed, 2 when it was called or configured wrongly, 130 after Ctrl-C. An executor also
    ends with 3, when a step hung and its watchdog ended the process.
    """
    # Before gRPC is loaded: its C core writes lines of its own form to standard error, harmless ones too.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        return dispatch(sys.argv[1:] if argv is None else argv)
    except BrokenPipeError:
        # Who read standard output is gone; without this, Python complains again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def dispatch(arguments: list[str]) -> int:
    """Finds the command, runs it, and turns the errors that are raised on purpose into one line and a status."""
    with ending_at_once():
        from importlib import metadata

        from holdback.errors import ConfigError, HoldbackError

        targets = {entry.name: entry.value for entry in metadata.entry_points(group="holdback.commands")}
        targets |= OWN_COMMANDS
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(targets), file=sys.stdout if arguments else sys.stderr, flush=True)
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in targets:
        print(f"holdback: no command {name!r}; there are: {', '.join(sorted(targets))}", file=sys.stderr)
        return 2
    try:
        with ending_at_once():
            command = load(targets[name])
        return command(rest)
    except HoldbackError as error:
        print(f"holdback {name}: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except ModuleNotFoundError as error:
        print(f"holdback {name}: {how_to_install(name, error)}", file=sys.stderr)
        return 2


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """While modules are loaded, Ctrl-C ends the process where it stands, for there is nothing to clean up yet.

    As KeyboardInterrupt it would be lost in what Python calls back meanwhile, or come out as the error of an import.
    """
    # Else it is ignored, as in the background of a script, or the caller's.
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    is_ours &= threading.current_thread() is threading.main_thread()
    if is_ours:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def usage(targets: dict[str, str]) -> str:
    lines = [f"  {name:<12}{SUMMARIES.get(name, '')}" for name in sorted(targets)]
    return "\n".join(["usage: holdback COMMAND [ARGUMENTS]", "", *lines, "", "holdback COMMAND --help tells more."])


def load(target: str) -> Command:
    """Imports one command, given as `module:function`."""
    module, _, function = target.partition(":")
    command: Command = getattr(importlib.import_module(module), function)
    return command


def how_to_install(name: str, error: ModuleNotFoundError) -> str:
    """What to do about a package that a command lacks. Raises the error again when installing is not the remedy."""
    package = (error.name or "").partition(".")[0]
    if name not in EXTRAS or package in OWN_PACKAGES:
        raise error
    return f"needs the package {package!r}; install it with: pip install 'holdback[{EXTRAS[name]}]'"
