"""`holdback chat` and `holdback generate` against the mock gateway, in a pipe and at a terminal."""

from __future__ import annotations

import io
import os
import pathlib
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from holdback.cli import generate, main
from holdback.errors import ErrorReason, InternalError, InvalidArgumentError, UnavailableError
from holdback.testing import Answer, MockGateway

pytestmark = pytest.mark.loopback

Said = list[tuple[str, str]]


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[MockGateway]:
    with MockGateway() as gateway:
        monkeypatch.setenv("HOLDBACK_ADDRESS", gateway.address)
        monkeypatch.delenv("HOLDBACK_API_KEY", raising=False)
        yield gateway


def chat(monkeypatch: pytest.MonkeyPatch, lines: str, *flags: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return main(["chat", *flags])


def said(gateway: MockGateway, number: int) -> Said:
    """The messages of a call."""
    return [(message.role, message.content) for message in gateway.calls[number].request.generation.chat.messages]


# ---- in a pipe ----


def test_each_line_is_a_message_and_the_history_goes_along(
    gateway: MockGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.script(Answer("Hel", "lo"), Answer("Fine"))
    assert chat(monkeypatch, "Hi\n\nHow are you?\n", "--system", "Be brief") == 0
    assert capsys.readouterr().out == "Hello\nFine\n"
    assert said(gateway, 1) == [
        ("system", "Be brief"),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "How are you?"),
    ]


def test_commands_are_obeyed_and_not_sent(gateway: MockGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway.script(Answer("a"), Answer("b"), Answer("c"))
    assert chat(monkeypatch, "one\n/reset\n/nothing\ntwo\n//three\n/quit\nfour\n", "--system", "s") == 0
    assert [said(gateway, number)[-1][1] for number in range(len(gateway.calls))] == ["one", "two", "/three"]
    assert said(gateway, 1) == [("system", "s"), ("user", "two")]


def test_the_first_error_ends_a_pipe_in_words(
    gateway: MockGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.script(Answer(error=InternalError("a fault")))
    assert chat(monkeypatch, "one\ntwo\n") == 1
    assert capsys.readouterr().err == "holdback chat: a fault\n"
    assert len(gateway.calls) == 1


def test_flags_reach_the_request(gateway: MockGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway.script(Answer("a"))
    flags = "--model mock --max-tokens 5 --temperature 0.5 --top-p 0.25 --top-k 3 --seed 9 --stop x --stop y"
    assert chat(monkeypatch, "Hi\n", *flags.split()) == 0
    request = gateway.calls[0].request.generation
    sampling = request.sampling
    assert (request.model, list(request.stop)) == ("mock", ["x", "y"])
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (5, 0.5, 0.25)
    assert (sampling.top_k, sampling.seed) == (3, 9)


def test_the_key_comes_from_the_environment_or_a_file(
    gateway: MockGateway, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.script(*[Answer("a")] * 3)
    file = tmp_path / "key"
    file.write_text("from-file\n")
    chat(monkeypatch, "Hi\n")
    monkeypatch.setenv("HOLDBACK_API_KEY", "from-environment")
    chat(monkeypatch, "Hi\n")
    assert main(["generate", "Hi", "--api-key-file", str(file)]) == 0
    assert [call.api_key for call in gateway.calls] == [None, "from-environment", "from-file"]
    assert main(["generate", "Hi", "--api-key-file", str(tmp_path / "none")]) == 2
    assert "--api-key-file" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["chat", "generate Hi"])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--address nowhere", "address is 'nowhere'"),
        ("--timeout 0", "timeout_s is 0"),
        ("--tls-ca /none", "tls_ca /none"),
    ],
)
def test_a_flag_that_is_not_allowed_is_one_sentence_and_status_2(
    command: str, flags: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), *flags.split()]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_several_addresses_come_from_flags_or_the_environment(
    gateway: MockGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.script(Answer("a"), Answer("b"))
    with MockGateway(Answer("c")) as second:
        monkeypatch.setenv("HOLDBACK_ADDRESS", f"{gateway.address}, {second.address}")
        assert chat(monkeypatch, "one\ntwo\n") == 0
        assert main(["generate", "Hi", "--address", gateway.address, "--address", second.address]) == 0
    assert [len(each.calls) for each in (gateway, second)] == [2, 1]


def test_generate_can_wait_until_somebody_serves_it(
    gateway: MockGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "WAIT_S", 0.01)
    nobody = UnavailableError("no executor", reason=ErrorReason.NO_EXECUTOR)
    gateway.script(Answer(error=nobody), Answer(error=nobody), Answer("there"))
    assert main(["generate", "Hi", "--wait", "--timeout", "60"]) == 0
    assert capsys.readouterr().out == "there\n"
    assert len(gateway.calls) == 3


def test_generate_waits_for_no_longer_than_its_timeout_and_only_for_what_comes_with_time(
    gateway: MockGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "WAIT_S", 0.01)
    nobody = UnavailableError("no executor", reason=ErrorReason.NO_EXECUTOR)
    gateway.script(*[Answer(error=nobody)] * 1000)
    assert main(["generate", "Hi", "--wait", "--timeout", "0.3"]) == 1
    assert 1 < len(gateway.calls) < 60
    wrong = InvalidArgumentError("top_p is 2")
    with MockGateway(Answer(error=wrong)) as second:
        assert main(["generate", "Hi", "--wait", "--timeout", "60", "--address", second.address]) == 1
        assert len(second.calls) == 1
    capsys.readouterr()
    with MockGateway(Answer(error=nobody)) as third:
        assert main(["generate", "Hi", "--timeout", "60", "--address", third.address]) == 1
        assert len(third.calls) == 1
    assert capsys.readouterr().err == "holdback generate: no executor\n"


def test_generate_sends_a_chat_or_the_plain_text(
    gateway: MockGateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.script(*[Answer("Hel", "lo")] * 2)
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
    assert main(["generate", "Hi"]) == 0
    assert main(["generate", "-", "--raw"]) == 0
    assert said(gateway, 0) == [("user", "Hi")]
    assert gateway.calls[1].request.generation.text == "from stdin"
    assert capsys.readouterr().out == "Hello\nHello\n"


# ---- at a terminal ----


# The terminal becomes that of the process, so that Ctrl-C reaches it as a signal.
AT_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from holdback.cli import generate, main
sys.exit(main(["chat"]))
"""


class Terminal:
    """`holdback chat` at a pseudo-terminal."""

    def __init__(self) -> None:
        self.master, slave = pty.openpty()
        self.child = subprocess.Popen(
            [sys.executable, "-c", AT_TERMINAL],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=os.environ | {"TERM": "dumb"},
        )
        os.close(slave)
        self.text = ""

    def expect(self, text: str) -> None:
        """Reads until a text has been shown."""
        deadline = time.monotonic() + 60
        while text not in self.text:
            ready, _, _ = select.select([self.master], [], [], deadline - time.monotonic())
            assert ready, f"{text!r} did not come after {self.text!r}"
            self.text += os.read(self.master, 4096).decode()
        self.text = self.text.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt(self, text: str) -> None:
        """Presses Ctrl-C until a text has been shown.

        Python's readline module leaves a signal that comes after it has shown its prompt, and before it waits for
        input, until the next key.
        """
        deadline = time.monotonic() + 60
        while text not in self.text:
            assert time.monotonic() < deadline, f"{text!r} did not come after {self.text!r}"
            self.type("\x03")
            while select.select([self.master], [], [], 1)[0] and text not in self.text:
                self.text += os.read(self.master, 4096).decode()
        self.text = self.text.partition(text)[2]

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait(60)
        os.close(self.master)


@pytest.fixture
def terminal(gateway: MockGateway) -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


def test_ctrl_c_stops_the_answer_and_ctrl_d_ends(gateway: MockGateway, terminal: Terminal) -> None:
    gateway.script(Answer("Once upon", " a time", delay_s=[0, 60]), Answer("Bye"))
    terminal.expect("> ")
    terminal.type("Tell me a story\n")
    terminal.expect("Once upon")
    terminal.type("\x03")
    terminal.expect("(stopped)")
    assert gateway.calls[0].ended.wait(60)
    terminal.expect("> ")
    terminal.type("Enough\n")
    terminal.expect("Bye")
    assert said(gateway, 1) == [("user", "Tell me a story"), ("assistant", "Once upon"), ("user", "Enough")]
    terminal.expect("> ")
    terminal.interrupt("/quit or Ctrl-D ends")  # there is no answer to stop
    terminal.expect("> ")
    terminal.type("\x04")
    assert terminal.child.wait(60) == 0


def test_an_error_at_a_terminal_is_shown_and_the_conversation_goes_on(gateway: MockGateway, terminal: Terminal) -> None:
    too_long: Any = InvalidArgumentError("the prompt is too long", reason=ErrorReason.PROMPT_TOO_LONG)
    gateway.script(Answer(error=too_long), Answer("a\x1b[31mb"))
    terminal.expect("> ")
    terminal.type("one\n")
    terminal.expect("too long; /reset starts anew")
    terminal.expect("> ")
    terminal.type("two\n")
    terminal.expect("a\ufffd[31mb")  # a model cannot command the terminal
    assert said(gateway, 1) == [("user", "two")]
    terminal.expect("> ")
    terminal.type("/quit\n")
    assert terminal.child.wait(60) == 0


def test_ctrl_c_in_a_pipe_ends_it(gateway: MockGateway) -> None:
    gateway.script(Answer("a", "b", delay_s=[0, 60]))
    command = [sys.executable, "-m", "holdback.cli", "chat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("Hi\n")
        child.stdin.flush()
        assert child.stdout.read(1) == "a"
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 130
    assert gateway.calls[0].ended.wait(60)
