"""The processes of `holdback up` and `holdback demo`."""

from __future__ import annotations

import pathlib

import pytest

from holdback.cli.local import LocalStack


@pytest.mark.loopback
async def test_a_process_takes_no_module_from_the_working_directory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "structlog.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    stack = LocalStack({})
    try:
        scheduler = await stack.spawn("scheduler", "scheduler")
        await scheduler.wait_for_ports()
    finally:
        statuses = await stack.stop()
    assert statuses == [0]
