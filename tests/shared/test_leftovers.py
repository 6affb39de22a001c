"""What a failed test leaves running is found and ended, and nothing else is."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import leftovers

SLEEP = "import time; time.sleep(600)"

pytestmark = pytest.mark.loopback


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the children of a process in /proc")
def test_a_process_that_is_left_is_ended_and_other_children_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    before = leftovers.running()
    with (
        subprocess.Popen([sys.executable, "-c", SLEEP, "holdback.cli"]) as ours,
        subprocess.Popen([sys.executable, "-c", SLEEP]) as other,
    ):
        try:
            assert leftovers.running() - before == {ours.pid}
            leftovers.end({ours.pid})
            assert ours.wait(30) == -9
            assert other.poll() is None
        finally:
            ours.kill()
            other.kill()
    assert f"process {ours.pid} was left behind" in capsys.readouterr().out
    assert leftovers.running() == before
