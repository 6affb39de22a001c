"""Each family of models through the `cpu` device, against transformers' own forward of the whole text."""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
from typing import Any

import pytest
import torch
import transformers

from executor_svc.attention import AttentionCall, PagedContext
from executor_svc.devices.base import StepInputs
from executor_svc.devices.cpu import CpuDevice
from executor_svc.models import LoadedModel
from tests.executor.model_families import FAMILIES, WINDOW, save_family
from tests.executor.tiny_models import VOCAB_SIZE, build_device, decode_step, prefill_step

pytestmark = pytest.mark.usefixtures("one_thread")

LARGEST_DIFFERENCE = 1e-4


@dataclasses.dataclass
class Family:
    device: CpuDevice
    reference: Any


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("families")


def open_family(directories: pathlib.Path, name: str, dtype: str = "float32", **changes: Any) -> Family:
    """The device in `dtype`, and the reference in float32 with weights that `dtype` holds exactly."""
    directory = directories / "-".join([name, *changes])
    if not directory.exists():
        save_family(directory, name, **changes)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    for weight in reference.parameters():
        weight.data = weight.data.to(getattr(torch, dtype)).float()
    return Family(build_device(directory, dtype=dtype, num_threads=1), reference)


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


def differences_by_step(family: Family, logits_of_steps: list[torch.Tensor]) -> list[float]:
    """How far each step's last logits are from the reference's, at their largest.

    The steps: a prompt in one chunk, one in three chunks, one that begins on blocks of the second, and then all three
    as rows of unequal lengths in a padded batch, three times.
    """
    device, found = family.device, []
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
            found.append(float((logits[row] - expected).abs().max()))
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
    assert len(found) == 12
    return found


@pytest.mark.case("B22")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_gives_the_logits_of_transformers(
    name: str, directories: pathlib.Path, logits_of_steps: list[torch.Tensor]
) -> None:
    family = open_family(directories, name)
    assert max(differences_by_step(family, logits_of_steps)) < LARGEST_DIFFERENCE
    family.device.close()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, {"sliding_window": None}) for name in ("mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")),
        ("gpt-oss", {"sliding_window": None}),
        ("mixtral", {"sliding_window": None}),
        ("mistral", {"sliding_window": WINDOW - 1}),
        ("mistral", {"sliding_window": WINDOW + 1}),
        ("gpt-oss", {"sinks": None}),
        ("gemma2", {"softcap": None}),
        ("qwen3", {"scale": 1.0}),
    ],
)
def test_what_attention_would_ignore_shows(
    name: str,
    change: dict[str, Any],
    directories: pathlib.Path,
    logits_of_steps: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So the comparison above proves something: without it logits differ by far more than rounding explains."""
    family = open_family(directories, name)
    attend = PagedContext.attend

    def ignore(context: PagedContext, call: AttentionCall) -> torch.Tensor:
        is_limited = call.sliding_window is not None or "sliding_window" not in change
        return attend(context, dataclasses.replace(call, **change) if is_limited else call)

    monkeypatch.setattr(PagedContext, "attend", ignore)
    assert max(differences_by_step(family, logits_of_steps)) > 10_000 * LARGEST_DIFFERENCE
    family.device.close()


@pytest.mark.parametrize(
    ("name", "dtype", "limit"),
    [
        *((name, "bfloat16", 0.2) for name in ("mistral", "qwen2", "qwen3", "gemma3", "phi3", "gpt-oss")),
        *((name, "float16", 0.03) for name in ("llama3", "gemma3", "gpt-oss")),
    ],
)
def test_a_family_in_16_bits_stays_near_float32(
    name: str, dtype: str, limit: float, directories: pathlib.Path, logits_of_steps: list[torch.Tensor]
) -> None:
    """At the median of the steps: a router that rounding turns to another expert changes one step's logits by more.

    Sizes are such that kernels are used where the processor has what they need.
    """
    sizes = {"hidden_size": 256, "head_dim": 64, "query_pre_attn_scalar": 64, "initializer_range": 0.1}
    family = open_family(directories, name, dtype, **sizes)
    found = differences_by_step(family, logits_of_steps)
    assert statistics.median(found) < limit
    family.device.close()


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_a_row_of_experts_that_is_not_finite_fails_alone(
    name: str, directories: pathlib.Path, logits_of_steps: list[torch.Tensor]
) -> None:
    """Tokens of all rows share the experts' products; those of the other row stay the reference's."""
    family = open_family(directories, name)
    device, sequences, tables = family.device, [tokens(6, seed=4), tokens(5, seed=5)], [[5, 9], [11, 12]]
    for slot, sequence in enumerate(sequences):
        sequence += device.collect(
            device.launch(prefill_step(device, sequence, tables[slot], slot=slot))
        ).token_ids.tolist()
    device.kv_cache.values[0][5, 1] = float("nan")
    logits_of_steps.clear()
    result = device.collect(device.launch(decode_step(device, [6, 5], tables, [0, 1])))
    assert result.failed_rows == [0]
    assert int(result.token_ids[0]) == 0
    with torch.no_grad():
        expected = family.reference(torch.tensor([sequences[1]])).logits[0, -1]
    assert float((logits_of_steps[0][1] - expected).abs().max()) < LARGEST_DIFFERENCE
    device.close()
