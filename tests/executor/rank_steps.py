"""The same steps on every rank of a model that is cut, or on a whole one. As a program it is rank 1 of two.

A rank that follows another is told its steps; here each rank runs them by itself, so that a test can go through many
models with one child process.
"""

from __future__ import annotations

import contextlib
import pathlib
import sys
from collections.abc import Iterator, Sequence

import torch

from executor_svc.devices.base import StepResult
from executor_svc.devices.cpu import CpuDevice
from executor_svc.parallel.group import RankGroup
from holdback.types import RequestSpec, SamplingParams
from tests.executor.tiny_models import ALL_LOGPROBS, build_device, decode_step, prefill_step

PROMPT = [20, 61, 22, 93, 24, 25, 116, 27, 28, 79, 30, 31, 102, 33]
OTHER = [40, 41, 92, 43, 14, 45]
DRAWN = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.1)
TABLES = [[5, 9, 2, 30, 11], [5, 9, 20, 21, 22]]
"""Of two requests of which the second begins with the first 8 tokens of the first, whose blocks it shares."""


def run_steps(device: CpuDevice) -> list[StepResult]:
    """A prompt in chunks, a prefix hit with a drawn token, and decodes of both together and of the second alone."""
    device.start_request(0, RequestSpec("first", PROMPT, ALL_LOGPROBS))
    steps = [
        prefill_step(device, PROMPT[:8], TABLES[0], params=None),
        prefill_step(device, PROMPT[8:], TABLES[0], start=8),
    ]
    results = [device.collect(device.launch(step)) for step in steps]
    device.start_request(1, RequestSpec("second", PROMPT[:8] + OTHER, DRAWN))
    steps = [prefill_step(device, OTHER, TABLES[1], start=8, slot=1, params=DRAWN)]
    for number in range(3):
        lengths, sampling = [14 + number] * 2, [ALL_LOGPROBS, DRAWN]
        counts, uniform = [number + 1] * 2, [0.5, 0.1 + 0.3 * number]
        steps.append(decode_step(device, lengths, TABLES, [0, 1], sampling, num_outputs=counts, uniform=uniform))
    steps.append(decode_step(device, [17], TABLES[1:], [1], [ALL_LOGPROBS], num_outputs=[4]))
    tickets = [device.launch(step) for step in steps]
    return results + [device.collect(ticket) for ticket in tickets]


@contextlib.contextmanager
def group_of_two(rank: int, meeting_file: pathlib.Path) -> Iterator[RankGroup]:
    group, num_threads = RankGroup(rank, 2, meeting_file), torch.get_num_threads()
    torch.set_num_threads(group.num_threads(None))
    try:
        yield group
    finally:
        torch.set_num_threads(num_threads)
        group.close()


def run_rank(group: RankGroup, directories: Sequence[pathlib.Path]) -> Iterator[tuple[CpuDevice, list[StepResult]]]:
    """Each model's device and results, one after the other."""
    for directory in directories:
        device = build_device(directory, ranks=group)
        yield device, run_steps(device)
        device.close()


if __name__ == "__main__":
    with group_of_two(1, pathlib.Path(sys.argv[1])) as own_group:
        for _ in run_rank(own_group, [pathlib.Path(argument) for argument in sys.argv[2:]]):
            pass
