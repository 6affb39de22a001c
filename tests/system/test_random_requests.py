"""Random requests, a few of those that `random_requests.py` sends by the thousand: none is a fault of ours."""

from __future__ import annotations

import pathlib

import pytest

from tests.system.random_requests import send_all

pytestmark = pytest.mark.loopback


@pytest.mark.filterwarnings("ignore")  # schemathesis's own
async def test_no_random_request_is_a_fault_of_ours(tokenizer_directory: pathlib.Path) -> None:
    executor = ["--simulated-vocab-size", "512", "--max-model-len", "128"]
    report = await send_all(tokenizer_directory, 120, executor, [])
    assert report.faults == []
    assert report.statuses["200"] > 0
    assert report.statuses["400"] > 0
    assert report.statuses["OK"] > 0
    assert report.statuses["INVALID_ARGUMENT"] > 0
