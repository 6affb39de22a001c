"""The command `holdback`: it finds the command that was called, loads nothing else, and ends with the right status."""

from __future__ import annotations

import signal
import subprocess
import sys
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdback import cli
from holdback.errors import ConfigError, HoldbackError, UnavailableError

Register = Callable[[str, cli.Command], None]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    """Adds a command for the length of a test."""

    def add(name: str, command: cli.Command) -> None:
        module = types.ModuleType("command_under_test")
        module.command = command  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "command_under_test", module)
        monkeypatch.setitem(cli.OWN_COMMANDS, name, "command_under_test:command")

    return add


def failing(error: BaseException) -> cli.Command:
    def command(argv: list[str]) -> int:
        raise error

    return command


def test_a_command_gets_its_arguments_and_gives_its_status(register: Register) -> None:
    seen: list[list[str]] = []

    def command(argv: list[str]) -> int:
        seen.append(argv)
        return 3

    register("probe", command)
    assert cli.main(["probe", "--port", "1"]) == 3
    assert seen == [["--port", "1"]]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("port is 70000; allowed: [0, 65535]"), 2),
        (UnavailableError("no executor"), 1),
        (HoldbackError("broken"), 1),
    ],
)
def test_an_expected_error_is_one_line_and_a_status(
    register: Register, capsys: pytest.CaptureFixture[str], error: HoldbackError, status: int
) -> None:
    register("probe", failing(error))
    assert cli.main(["probe"]) == status
    assert capsys.readouterr().err == f"holdback probe: {error.message}\n"


def test_a_fault_of_ours_is_not_hidden(register: Register) -> None:
    register("probe", failing(ZeroDivisionError("bug")))
    with pytest.raises(ZeroDivisionError, match="bug"):
        cli.main(["probe"])


def test_an_interrupt_ends_with_130_and_without_a_traceback(
    register: Register, capsys: pytest.CaptureFixture[str]
) -> None:
    register("probe", failing(KeyboardInterrupt()))
    assert cli.main(["probe"]) == 130
    assert capsys.readouterr().err == ""


# As the console script, with Ctrl-C when a module is looked for.
INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupter:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
from holdback.cli import main
signal.signal(signal.SIGINT, getattr(signal, sys.argv[2]))
sys.exit(main(["generate", "--help"]))
"""


def interrupt_import(module: str, handler: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, module, handler]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    "module", ["importlib.metadata", "holdback.errors", "holdback.cli.generate", "grpc", "grpc._cython.cygrpc"]
)
def test_an_interrupt_while_modules_are_loaded_ends_with_130_and_without_a_traceback(module: str) -> None:
    done = interrupt_import(module, "default_int_handler")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interrupt_is_ignored_where_the_caller_wants_that() -> None:
    done = interrupt_import("grpc", "SIG_IGN")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: holdback generate")


def test_the_command_itself_is_interrupted_as_any_program(register: Register) -> None:
    handlers: list[object] = []

    def command(argv: list[str]) -> int:
        handlers.append(signal.getsignal(signal.SIGINT))
        return 0

    register("probe", command)
    cli.main(["probe"])
    assert handlers == [signal.default_int_handler]


def test_a_command_may_be_run_in_any_thread(register: Register) -> None:
    register("probe", lambda argv: 3)
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(cli.main, ["probe"]).result(60) == 3


def test_an_unknown_command_is_refused_and_the_known_ones_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sheduler"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("holdback: no command 'sheduler'; there are: ")
    assert "scheduler" in message


@pytest.mark.parametrize(("argv", "status"), [([], 2), (["--help"], 0), (["-h"], 0)])
def test_usage_lists_every_command_with_a_summary(
    capsys: pytest.CaptureFixture[str], argv: list[str], status: int
) -> None:
    assert cli.main(argv) == status
    shown = capsys.readouterr()
    text = shown.out if status == 0 else shown.err
    for name in ("chat", "demo", "executor", "gateway", "generate", "model", "replay", "scheduler", "up"):
        assert f"  {name:<12}{cli.SUMMARIES[name]}" in text.splitlines()


@pytest.mark.parametrize(
    ("name", "missing", "sentence"),
    [
        ("executor", "torch", "needs the package 'torch'; install it with: pip install 'holdback[executor]'"),
        ("gateway", "tokenizers", "needs the package 'tokenizers'; install it with: pip install 'holdback[gateway]'"),
        ("model", "gguf.scripts", "needs the package 'gguf'; install it with: pip install 'holdback[executor]'"),
    ],
)
def test_a_missing_extra_is_one_sentence_with_the_remedy(
    register: Register, capsys: pytest.CaptureFixture[str], name: str, missing: str, sentence: str
) -> None:
    register(name, failing(ModuleNotFoundError(f"No module named {missing!r}", name=missing)))
    assert cli.main([name]) == 2
    assert capsys.readouterr().err == f"holdback {name}: {sentence}\n"


def test_a_missing_module_of_ours_is_a_fault_and_not_a_missing_extra(register: Register) -> None:
    register("executor", failing(ModuleNotFoundError("No module named 'executor_svc.x'", name="executor_svc.x")))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["executor"])


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    code = (
        "import sys, types, holdback.cli as cli\n"
        "module = sys.modules['m'] = types.ModuleType('m')\n"
        "module.run = lambda argv: [print('x' * 1000, flush=True) for _ in range(10000)] and 0\n"
        "cli.OWN_COMMANDS['probe'] = 'm:run'\n"
        "sys.exit(cli.main(['probe']))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 1


def test_the_command_loads_neither_grpc_nor_a_service_to_print_its_usage() -> None:
    code = (
        "import sys, holdback.cli\n"
        "holdback.cli.main(['--help'])\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "sys.exit(', '.join(loaded & {'grpc', 'torch', 'scheduler_svc', 'executor_svc', 'gateway'}) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
