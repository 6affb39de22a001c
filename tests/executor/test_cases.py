"""The executor's side of faults that other serving systems shipped, with the numbers of each case, on a tiny model."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from executor_svc.devices.base import StepInputs
from executor_svc.devices.cpu import CpuDevice
from executor_svc.runner import NeuronModelRunner
from holdback.errors import InvalidArgumentError
from holdback.types import ModelRunnerOutput, SamplingParams, SchedulerOutput
from tests.executor.builders import Steps
from tests.executor.tiny_models import VOCAB_SIZE, build_device, llama_config, save_model

MAX_MODEL_LEN = 256
EOS_IDS = (2, 5)
GREEDY = SamplingParams(temperature=0.0, num_logprobs=4)


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> CpuDevice:
    config = llama_config(max_position_embeddings=MAX_MODEL_LEN, eos_token_id=list(EOS_IDS))
    directory = save_model(tmp_path_factory.mktemp("models") / "tiny", config)
    return build_device(directory, block_size=16, num_blocks=65, num_batched_tokens_buckets=(128, 256))


@pytest.fixture
def runner(device: CpuDevice) -> NeuronModelRunner:
    runner = NeuronModelRunner(device)
    runner.reset()
    return runner


def tokens(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(6, VOCAB_SIZE, length)]


def decode(runner: NeuronModelRunner, steps: Steps, req_id: str, first: ModelRunnerOutput) -> list[ModelRunnerOutput]:
    """The first token and 31 more, with their log-probabilities."""
    return [first, *(runner.execute(steps.decode(req_id)) for _ in range(31))]


def assert_equal_answers(found: list[ModelRunnerOutput], expected: list[ModelRunnerOutput]) -> None:
    assert [output.sampled_token_ids for output in found] == [output.sampled_token_ids for output in expected]
    for one, other in zip(found, expected, strict=True):
        (a,), (b,) = one.logprobs, other.logprobs
        assert a is not None
        assert b is not None
        np.testing.assert_allclose(a.top_logprobs, b.top_logprobs, atol=1e-4)


def run_cold(runner: NeuronModelRunner, prompt: list[int]) -> list[ModelRunnerOutput]:
    """In blocks 1 to 15, which another request may hit afterwards."""
    steps = Steps()
    first = steps.new("cold", prompt, slot=0, blocks=range(1, 16), padded=256, sampling=GREEDY)
    answers = decode(runner, steps, "cold", runner.execute(first))
    runner.execute(steps.finish("cold"))
    return answers


@pytest.mark.case("B22")
@pytest.mark.parametrize("num_shared", [200, 100])
def test_a_prefix_hit_answers_as_a_cold_prefill(
    runner: NeuronModelRunner, num_shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 tokens in blocks of 16: all of them equal hit 192, the first 100 equal hit 96."""
    hit = {200: 192, 100: 96}[num_shared]
    cold = tokens(200, seed=1)
    prompt = [*cold[:num_shared], *tokens(200 - num_shared, seed=2)]
    expected = run_cold(runner, prompt)
    runner.reset()
    run_cold(runner, cold)
    launched: list[StepInputs] = []
    launch = runner.device.launch

    def record(inputs: StepInputs) -> object:
        launched.append(dataclasses.replace(inputs, positions=inputs.positions.copy()))
        launched[-1].slot_mapping = inputs.slot_mapping.copy()
        return launch(inputs)

    monkeypatch.setattr(runner.device, "launch", record)
    steps = Steps()
    blocks = [*range(1, 1 + hit // 16), *range(30, 45 - hit // 16)]
    first = steps.new("warm", prompt, slot=1, blocks=blocks, computed=hit, padded=128, sampling=GREEDY)
    assert_equal_answers(decode(runner, steps, "warm", runner.execute(first)), expected)
    num_new = 200 - hit
    assert launched[0].positions[:num_new].tolist() == list(range(hit, 200))
    assert (launched[0].slot_mapping[num_new:] == -1).all()


@pytest.mark.case("B22")
def test_a_prefix_hit_that_goes_on_in_chunks_answers_as_a_cold_prefill(runner: NeuronModelRunner) -> None:
    cold = tokens(200, seed=1)
    prompt = [*cold[:100], *tokens(100, seed=2)]
    expected = run_cold(runner, prompt)
    runner.reset()
    run_cold(runner, cold)
    steps = Steps()
    blocks = [*range(1, 7), *range(30, 39)]
    chunk = steps.new("warm", prompt, slot=1, blocks=blocks, computed=96, num_tokens=37, padded=128, sampling=GREEDY)
    assert runner.execute(chunk).sampled_token_ids == []
    last = runner.execute(steps.chunk("warm", 67, padded=128))
    assert_equal_answers(decode(runner, steps, "warm", last), expected)


@pytest.mark.case("B32")
def test_a_seed_gives_the_same_tokens_in_the_first_row_and_in_the_fourth(runner: NeuronModelRunner) -> None:
    """Alone in row 0, then in row 3 and another slot behind a seeded, a greedy and an unseeded neighbour."""
    seeded = SamplingParams(temperature=1.5, seed=42)
    others = (SamplingParams(temperature=1.5, seed=7), SamplingParams(temperature=0.0), SamplingParams(temperature=1.5))
    prompt = tokens(8, seed=1)
    steps = Steps()
    alone = runner.execute(steps.new("r", prompt, blocks=[1, 2], padded=128, sampling=seeded)).sampled_token_ids
    alone = alone + [runner.execute(steps.decode("r")).sampled_token_ids[0] for _ in range(20)]
    assert len(set(alone)) > 8

    runner.reset()
    steps = Steps()
    names = [f"other {number}" for number in range(3)]
    for number, (name, params) in enumerate(zip(names, others, strict=True)):
        blocks = [10 + 2 * number, 11 + 2 * number]
        runner.execute(steps.new(name, prompt, slot=number, blocks=blocks, padded=128, sampling=params))
    first = steps.new("r", prompt, slot=3, blocks=[1, 2], padded=128, sampling=seeded)
    found = [runner.execute(first).sampled_token_ids]
    found += [runner.execute(steps.decode(*names, "r")).sampled_token_ids for _ in range(20)]
    assert [row[-1] for row in found] == alone
    assert [row[2] for row in found[1:]] != alone[1:]


def test_the_same_steps_give_the_same_bits_with_one_and_with_two_in_flight(runner: NeuronModelRunner) -> None:
    drawn, greedy = SamplingParams(temperature=1.5, seed=3, num_logprobs=4), GREEDY

    def steps() -> list[SchedulerOutput]:
        made = Steps()
        first = made.new("a", tokens(40, seed=1), slot=0, blocks=range(1, 5), padded=128, sampling=drawn)
        second = made.new("b", tokens(20, seed=2), slot=1, blocks=range(5, 8), padded=128, sampling=greedy)
        return [first, second, *(made.decode("a", "b") for _ in range(12))]

    one_by_one = [runner.execute(step) for step in steps()]
    runner.reset()
    overlapped, launched = [], None
    for step in steps():
        following = runner.launch(step)
        if launched is not None:
            overlapped.append(runner.collect(launched))
        launched = following
    assert launched is not None
    overlapped.append(runner.collect(launched))
    for found, expected in zip(overlapped, one_by_one, strict=True):
        assert found.sampled_token_ids == expected.sampled_token_ids
        assert found.logprobs == expected.logprobs  # to the last bit


@pytest.mark.case("B37")
def test_an_end_id_is_a_token_like_any_other_to_the_executor(runner: NeuronModelRunner) -> None:
    """Whether it ends the request is the scheduler's to say; here it is drawn, written and decoded from."""
    steps = Steps()
    only_end_ids = SamplingParams(temperature=0.0, allowed_token_ids=EOS_IDS, ignore_eos=True, stop_token_ids=(9,))
    outputs = runner.execute(steps.new("r", tokens(8, seed=1), blocks=[1], padded=128, sampling=only_end_ids))
    found = outputs.sampled_token_ids
    for _ in range(5):
        found += runner.execute(steps.decode("r")).sampled_token_ids
    assert len(found) == 6
    assert set(found) <= set(EOS_IDS)


@pytest.mark.case("B37")
def test_every_end_id_of_the_model_waits_for_min_tokens(runner: NeuronModelRunner) -> None:
    steps = Steps()
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(9,), logit_bias={2: 90.0, 5: 95.0, 9: 99.0})
    found = runner.execute(steps.new("r", tokens(8, seed=1), blocks=[1], padded=128, sampling=params)).sampled_token_ids
    for _ in range(3):
        found += runner.execute(steps.decode("r")).sampled_token_ids
    assert not {*EOS_IDS, 9} & set(found[:3])
    assert found[3] == 9


@pytest.mark.case("B47")
@pytest.mark.parametrize("max_tokens", [1, 5, 20])
def test_a_request_gets_one_token_from_each_step_that_samples_and_none_else(
    runner: NeuronModelRunner, max_tokens: int
) -> None:
    steps = Steps()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    counts = [
        len(runner.execute(step).sampled_token_ids)
        for step in [
            steps.new("r", tokens(40, seed=1), blocks=[1, 2, 3, 4], num_tokens=30, padded=128, sampling=params),
            steps.chunk("r", 10, padded=128),
            *(steps.decode("r") for _ in range(max_tokens - 1)),
        ]
    ]
    assert counts == [0, *[1] * max_tokens]
    assert runner.requests.num_outputs[0] == max_tokens


@pytest.mark.case("B35")
@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {VOCAB_SIZE: 5.0}}, "logit_bias is 128"),
        ({"logit_bias": {-1: 5.0}}, "logit_bias is -1"),
        ({"stop_token_ids": (99999,), "min_tokens": 2}, "stop_token_ids is 99999"),
        ({"allowed_token_ids": (VOCAB_SIZE,)}, "allowed_token_ids is 128"),
    ],
)
def test_parameters_that_would_index_outside_the_vocabulary_name_their_field_and_change_no_other_request(
    runner: NeuronModelRunner, params: dict[str, object], message: str
) -> None:
    steps = Steps()
    good = runner.execute(steps.new("good", tokens(8, seed=1), slot=0, blocks=[1], padded=128, sampling=GREEDY))
    sampler = SamplingParams(**params)  # type: ignore[arg-type]
    before = [page[1].clone() for page in _pages(runner)]
    with pytest.raises(InvalidArgumentError, match=rf"{message}; allowed: \[0, 128\)"):
        runner.execute(steps.new("bad", [20], slot=1, blocks=[2], padded=128, sampling=sampler))
    assert all(page[1].equal(old) for page, old in zip(_pages(runner), before, strict=True))
    runner.reset()
    again = runner.execute(Steps().new("good", tokens(8, seed=1), slot=0, blocks=[1], padded=128, sampling=GREEDY))
    assert_equal_answers([again], [good])


def _pages(runner: NeuronModelRunner) -> list[torch.Tensor]:
    assert isinstance(runner.device, CpuDevice)
    return [*runner.device.kv_cache.keys, *runner.device.kv_cache.values]
