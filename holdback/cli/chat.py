"""`holdback chat`: a conversation in the terminal.

Each line is a message. /reset starts anew, /quit or Ctrl-D ends, Ctrl-C stops the answer that is being written and
nothing else. Without a terminal, as in a pipe, each line of standard input is a message, too, and the first error ends.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from holdback.cli import calling
from holdback.errors import ErrorReason, HoldbackError
from holdback.options import ChatOptions
from holdback.sync_client import Client

PROMPT = "> "
HELP = "/reset starts anew, /quit or Ctrl-D ends, Ctrl-C stops an answer; a line that begins with // is sent with one /"


def chat(argv: list[str]) -> int:
    """Exit status: 0, or 1 with the error on standard error when there is no terminal to go on at."""
    flags = _parse(argv)
    calling.prepare_output()
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if is_interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives `input` editing and a history, where it is there
    with calling.checking_flags():
        client = Client(calling.addresses(flags), **calling.settings(flags))
    with client:
        conversation = Conversation(client, calling.sampling(flags), flags.system)
        if is_interactive:
            print(HELP, file=sys.stderr)
            _talk(conversation)
        else:
            _answer_lines(conversation)
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="holdback chat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--system", help="what the model is told before the conversation")
    calling.add_flags(parser)
    return parser.parse_args(argv)


class Conversation:
    """What was said so far, and the client that continues it."""

    def __init__(self, client: Client, options: ChatOptions, system: str | None) -> None:
        self._client = client
        self._options = options
        self._beginning = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._beginning)

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self._messages = list(self._beginning)

    def say(self, text: str) -> None:
        """Sends a message and shows the answer as it comes.

        An answer that is stopped, by Ctrl-C as KeyboardInterrupt or by an error, stays in the conversation as far as it
        came; a message that was not answered at all does not.

        Raises:
            HoldbackError: the answer failed.
        """
        self._messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            with self._client.chat_stream(self._messages, **self._options) as stream:
                for piece in stream:
                    pieces.append(piece.text)
                    calling.show(piece.text)
        finally:
            print(flush=True)
            if any(pieces):
                self._messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self._messages.pop()


def _talk(conversation: Conversation) -> None:
    """At a terminal, until /quit or Ctrl-D."""
    while True:
        try:
            line = input(PROMPT)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"\n{HELP}", file=sys.stderr)
            continue
        try:
            if not _obey(conversation, line):
                return
        except KeyboardInterrupt:
            print("(stopped)", file=sys.stderr)
        except HoldbackError as error:
            print(f"holdback chat: {_explain(error)}", file=sys.stderr)


def _answer_lines(conversation: Conversation) -> None:
    for line in sys.stdin:
        if not _obey(conversation, line.rstrip("\r\n")):
            return


def _obey(conversation: Conversation, line: str) -> bool:
    """Does what a line asks for; False when that is to end. Raises HoldbackError when an answer failed."""
    command = line.strip()
    if command == "/quit":
        return False
    if command == "/reset":
        conversation.reset()
    elif command.startswith("/") and not command.startswith("//"):
        print(HELP, file=sys.stderr)
    elif command:
        conversation.say(line[1:] if line.startswith("//") else line)
    return True


def _explain(error: HoldbackError) -> str:
    if error.reason is ErrorReason.PROMPT_TOO_LONG:
        return f"{error.message}; /reset starts anew"
    return error.message
