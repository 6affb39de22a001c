"""Each family of models through the `cpu` device, against transformers' own forward of the whole text."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest
import torch
import transformers

from executor_svc.devices.base import StepInputs
from executor_svc.devices.cpu import CpuDevice
from executor_svc.models import LoadedModel
from tests.executor.model_families import FAMILIES, save_family
from tests.executor.tiny_models import VOCAB_SIZE, build_device, decode_step, prefill_step

LARGEST_DIFFERENCE = 1e-4


@dataclasses.dataclass
class Family:
    device: CpuDevice
    reference: Any


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("families")


def open_family(directories: pathlib.Path, name: str) -> Family:
    directory = directories / name
    if not directory.exists():
        save_family(directory, name)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return Family(build_device(directory), reference)


@pytest.fixture
def logits_of_steps(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The logits that the device's model gave in each step, in the order of the steps."""
    seen: list[torch.Tensor] = []
    compute = LoadedModel.logits

    def record(model: LoadedModel, *arguments: Any) -> torch.Tensor:
        logits = compute(model, *arguments)
        seen.append(logits)
        return logits

    monkeypatch.setattr(LoadedModel, "logits", record)
    return seen


def tokens(length: int, seed: int) -> list[int]:
    found: list[int] = torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found


def largest_difference(family: Family, logits_of_steps: list[torch.Tensor]) -> float:
    """Of every step's last logits from the reference's: a prompt in one chunk, one in three chunks, one that begins on
    blocks of the second, and then all three as rows of unequal lengths in a padded batch, three times.
    """
    device, differences = family.device, []
    sequences = [tokens(11, seed=1), tokens(27, seed=2), []]
    sequences[2] = sequences[1][:12] + tokens(7, seed=3)
    tables = [[5, 9, 2, 30], [11, 12, 1, 3, 4, 6, 7, 8], [11, 12, 1, 20, 21, 22]]

    def run(inputs: StepInputs, rows: list[int]) -> None:
        logits_of_steps.clear()
        result = device.collect(device.launch(inputs))
        if inputs.sampling is None:
            return
        (logits,) = logits_of_steps
        for row, number in enumerate(rows):
            with torch.no_grad():
                expected = family.reference(torch.tensor([sequences[number]])).logits[0, -1]
            differences.append(float((logits[row] - expected).abs().max()))
            assert int(result.token_ids[row]) == int(logits[row].argmax())
            sequences[number].append(int(result.token_ids[row]))

    run(prefill_step(device, sequences[0], tables[0]), [0])
    for start, end in [(0, 8), (8, 16)]:
        run(prefill_step(device, sequences[1][start:end], tables[1], start=start, params=None), [])
    run(prefill_step(device, sequences[1][16:], tables[1], start=16, slot=1), [1])
    run(prefill_step(device, sequences[2][12:], tables[2], start=12, slot=2), [2])
    for _ in range(3):
        lengths = [len(sequence) - 1 for sequence in sequences]
        run(decode_step(device, lengths, tables, [0, 1, 2]), [0, 1, 2])
    assert len(differences) == 12
    return max(differences)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_gives_the_logits_of_transformers(
    name: str, directories: pathlib.Path, logits_of_steps: list[torch.Tensor]
) -> None:
    family = open_family(directories, name)
    found = largest_difference(family, logits_of_steps)
    assert found < LARGEST_DIFFERENCE
    family.device.close()
