"""The command `holdback`: finds the command that was called and loads nothing else.

`up`, `generate` and other commands of this package are in the table below; each service adds its own as entry points of
the group `holdback.commands`. Every command is a function of its arguments that returns the exit status.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib import metadata

from holdback.errors import ConfigError, HoldbackError

Command = Callable[[list[str]], int]

OWN_COMMANDS = {
    "up": "holdback.cli.up:up",
    "generate": "holdback.cli.generate:generate",
    "demo": "holdback.cli.demo:demo",
}
SUMMARIES = {
    "up": "start scheduler, executor and gateway on this machine",
    "generate": "stream an answer to the terminal",
    "demo": "start everything, ask two questions, show the steps, stop",
    "scheduler": "start a scheduler",
    "executor": "start an executor",
    "gateway": "start a gateway",
    "model": "import a model: holdback model import SRC DEST",
    "replay": "run a recorded scheduler trace",
}
EXTRAS = {"scheduler": "scheduler", "replay": "scheduler", "executor": "executor", "model": "executor", "gateway": "gateway"}


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Exit status: 0, 1 when it failed, 2 when it was called or configured wrongly."""
    arguments = sys.argv[1:] if argv is None else argv
    targets = OWN_COMMANDS | {entry.name: entry.value for entry in metadata.entry_points(group="holdback.commands")}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(targets))
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in targets:
        print(f"holdback: no command {name!r}; there are: {', '.join(sorted(targets))}", file=sys.stderr)
        return 2
    try:
        return load(name, targets[name])(rest)
    except ConfigError as error:
        print(f"holdback {name}: {error.message}", file=sys.stderr)
        return 2
    except HoldbackError as error:
        print(f"holdback {name}: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def usage(targets: dict[str, str]) -> str:
    lines = [f"  {name:<12}{SUMMARIES.get(name, '')}" for name in sorted(targets)]
    return "\n".join(["usage: holdback COMMAND [ARGUMENTS]", "", *lines, "", "holdback COMMAND --help tells more."])


def load(name: str, target: str) -> Command:
    """Imports one command. A package that is not installed becomes a sentence that says what to install."""
    module, _, attribute = target.partition(":")
    try:
        command: Command = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(name)
        if extra is None or (error.name or "").split(".")[0] in ("holdback", "scheduler_svc", "executor_svc", "gateway"):
            raise
        raise ConfigError(f"needs the package {error.name!r}; install it with: pip install 'holdback[{extra}]'") from error
    return command
