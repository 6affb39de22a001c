"""`holdback up`: scheduler, executors and gateway on this machine, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import pathlib
import socket
from collections.abc import Sequence

from holdback.cli.local import LocalStack, run_until_signal
from holdback.errors import ConfigError, InternalError
from holdback.flags import FlagParser

HTTP_PORT = 8000
PROCESSES = ("scheduler", "executor", "gateway")
EPILOG = """
Any flag of a process is passed on when its name is put in front: `--executor.max-model-len 2048`,
`--scheduler.default-max-tokens 256`, `--gateway.log-level debug`. `holdback executor --help` lists them.
"""


def up(argv: list[str]) -> int:
    """Exit status: 0 after Ctrl-C or SIGTERM, 1 when a process ended by itself, 2 when one could not start."""
    own, arguments = parse(argv)
    asyncio.run(run_until_signal(LocalStack(arguments, num_executors=own.executors), serve))
    return 0


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, list[str]]]:
    """The flags of `up` itself, and the arguments of each process."""
    parser = FlagParser(prog="holdback up", description=__doc__, epilog=EPILOG, add_help=True)
    parser.add_argument(
        "--model", type=pathlib.Path, required=True, help="directory in Hugging Face layout (holdback model import)"
    )
    parser.add_argument("--port", default="0", help="port of the gateway; 0 takes a free one (default)")
    parser.add_argument(
        "--http-port", help=f"port of the OpenAI HTTP API; null for none (default: {HTTP_PORT}, or a free one)"
    )
    parser.add_argument("--device", default="cpu", help="device of the executors: cpu (default) or simulated")
    parser.add_argument("--executors", type=int, default=1, help="number of executors (default 1)")
    parser.add_argument("--name", help="model name that clients use (default: the directory's name)")
    own, rest = parser.parse_known_args(argv)
    if own.executors < 1:
        raise ConfigError(f"executors is {own.executors}; allowed: 1 or more")
    model = own.model.resolve()
    arguments: dict[str, list[str]] = {
        "scheduler": [],
        "executor": ["--device", own.device, "--model", str(model)],
        "gateway": ["--port", own.port, "--tokenizer", str(model), "--served-model-name", own.name or model.name],
    }
    arguments["gateway"] += ["--http-port", own.http_port or usual_http_port()]
    for process, passed_on in split(rest).items():
        arguments[process].extend(passed_on)
    return own, arguments


def usual_http_port() -> str:
    """The port where clients look first; 0, for a free one, where somebody else has it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", HTTP_PORT))
        except OSError:
            return "0"
    return str(HTTP_PORT)


def split(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Sorts `--executor.dtype float32` and the like by process. Raises ConfigError for a flag of no process."""
    result: dict[str, list[str]] = {process: [] for process in PROCESSES}
    current: list[str] | None = None
    for argument in arguments:
        if argument.startswith("--"):
            process, dot, flag = argument.removeprefix("--").partition(".")
            if not dot or process not in PROCESSES:
                raise ConfigError(f"{argument} is not known; allowed: flags of up, and --PROCESS.FLAG of {PROCESSES}")
            current = result[process]
            current.append(f"--{flag}")
        elif current is None:
            raise ConfigError(f"{argument!r} follows no flag")
        else:
            current.append(argument)
    return result


async def serve(stack: LocalStack) -> None:
    """Prints the addresses and returns, with an error, when a process ends by itself."""
    print(f"gateway    {stack.gateway_address}  (holdback generate --address {stack.gateway_address} 'Hello!')")
    if stack.http_address is not None:
        print(f"http       http://{stack.http_address}/v1  (OpenAI API)")
    print(f"scheduler  {stack.scheduler_address}")
    for process in stack.processes[:2]:
        print(f"health     127.0.0.1:{process.health_port}  ({process.name}: readiness, liveness)")
    print("ready; Ctrl-C stops", flush=True)
    ended = await stack.wait_until_one_ends()
    raise InternalError(f"{ended.name} ended with status {ended.exited.result()}; everything else was stopped")
