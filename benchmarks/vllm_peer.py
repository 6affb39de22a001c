"""Another engine's process, as a benchmark drives it: one job at a time, the benchmark waits (peers/protocol.py)."""

from __future__ import annotations

import json
import pathlib
import subprocess
import tempfile
from types import TracebackType
from typing import Any, Self

PEERS = pathlib.Path(__file__).parent / "peers"


class VllmPeer:
    """Use it as a context manager. What the process writes to standard error is shown when it fails.

    Args:
        python: interpreter of an environment that has vLLM.
        program: file in peers/.
    """

    def __init__(self, python: str, program: str) -> None:
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [python, str(PEERS / program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def __enter__(self) -> Self:
        self._answer()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()

    def run(self, job: str, **parameters: object) -> dict[str, Any]:
        """Sends a job and waits for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"job": job, **parameters}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            raise SystemExit(f"{self._errors.read()[-4000:]}\na peer ended with status {status}")
        answer: dict[str, Any] = json.loads(line)
        return answer
