"""What the commands that call a gateway share: where it is, who calls, how tokens are drawn, and how text is shown."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pathlib
import sys
from collections.abc import Iterator

from holdback.errors import ConfigError, InvalidArgumentError
from holdback.options import ChatOptions
from holdback.sync_client import ClientSettings
from holdback.tls import add_client_flags, from_flags

DEFAULT_ADDRESS = "127.0.0.1:50051"
ADDRESS_VARIABLE = "HOLDBACK_ADDRESS"
API_KEY_VARIABLE = "HOLDBACK_API_KEY"
MAX_KEY_FILE_BYTES = 64 * 1024

# A model may write what a terminal takes for a command: to move the cursor, to change the window's title.
_CONTROLS = {code: "\ufffd" for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the gateway, of sampling and of TLS; `addresses`, `settings` and `sampling` read them."""
    parser.add_argument(
        "--address",
        action="append",
        help="gateway, host:port or dns:///name:port; may be repeated, for several that serve the same "
        f"(default: {ADDRESS_VARIABLE}, separated by commas, else {DEFAULT_ADDRESS})",
    )
    parser.add_argument("--model", default="", help="served model (default: the only one)")
    parser.add_argument("--max-tokens", type=int, help="most tokens of the answer (default: the pool's)")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: 1)")
    parser.add_argument("--top-p", type=float, help="keep the most likely tokens up to this probability (default: 1)")
    parser.add_argument("--top-k", type=int, help="keep this many most likely tokens (default: all)")
    parser.add_argument("--seed", type=int, help="makes the answer repeatable (default: drawn)")
    parser.add_argument("--stop", action="append", default=[], help="string that ends the answer; may be repeated")
    parser.add_argument("--timeout", type=float, help="seconds until a request is given up (default: none)")
    # No flag takes the key itself: other users of a machine see the command lines of all processes.
    parser.add_argument(
        "--api-key-file",
        type=pathlib.Path,
        metavar="FILE",
        help=f"file with the API key (default: the key in {API_KEY_VARIABLE}, if that is set)",
    )
    parser.add_argument(
        "--insecure-api-key", action="store_true", help="allow that the key is sent to another machine without TLS"
    )
    add_client_flags(parser)


def addresses(flags: argparse.Namespace) -> list[str]:
    """The gateways that the flags name, else the environment, else the default."""
    if flags.address:
        return list(flags.address)
    named = os.environ.get(ADDRESS_VARIABLE, "").split(",")
    return [address.strip() for address in named if address.strip()] or [DEFAULT_ADDRESS]


def settings(flags: argparse.Namespace) -> ClientSettings:
    """Settings of the client. Raises ConfigError for files that cannot be read or are none."""
    return {
        "timeout_s": flags.timeout,
        "tls": from_flags(flags),
        "api_key": _api_key(flags.api_key_file),
        "insecure_api_key": flags.insecure_api_key,
    }


def sampling(flags: argparse.Namespace) -> ChatOptions:
    """Options of a generation."""
    return {
        "model": flags.model,
        "max_tokens": flags.max_tokens,
        "temperature": flags.temperature,
        "top_p": flags.top_p,
        "top_k": flags.top_k,
        "seed": flags.seed,
        "stop": flags.stop,
    }


@contextlib.contextmanager
def checking_flags() -> Iterator[None]:
    """Around the making of a client: what it refuses came from a flag or a variable, and is a ConfigError."""
    try:
        yield
    except InvalidArgumentError as error:
        raise ConfigError(error.message) from None


def prepare_output() -> None:
    """A terminal that cannot show a character still gets the rest."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def show(text: str) -> None:
    """Writes a piece of an answer at once; to a terminal without the characters that would command it."""
    print(text.translate(_CONTROLS) if sys.stdout.isatty() else text, end="", flush=True)


def _api_key(path: pathlib.Path | None) -> str | None:
    if path is None:
        return os.environ.get(API_KEY_VARIABLE) or None
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MAX_KEY_FILE_BYTES).strip()
    except OSError as error:
        raise ConfigError(f"--api-key-file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file {path}: not text") from None
