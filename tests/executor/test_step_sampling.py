"""Sampling inside a compiled step against the sampler of the `cpu` device: the same tokens from the same numbers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from executor_svc.devices.compiled import pack_numbers
from executor_svc.sampler import Sampled, Sampler
from executor_svc.sampling_tables import DeviceTables
from executor_svc.step_sampling import SampledRows, SamplingRows, sample_rows
from holdback.errors import InvalidArgumentError
from holdback.types import ModelInfo, RequestSpec, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB_SIZE = 700  # two whole blocks of 256 and a part
EOS = 2
NUM_SLOTS = 6
MODEL = ModelInfo("tiny", "tiny", VOCAB_SIZE, (EOS,), 64)


class Both:
    """The two samplers, given the same requests and the same steps."""

    def __init__(self, num_slots: int = NUM_SLOTS) -> None:
        self.sampler = Sampler(num_slots, VOCAB_SIZE, (EOS,))
        self.tables = DeviceTables(num_slots, MODEL, 20, torch.device("cpu"))

    def start(self, slot: int, params: SamplingParams, prompt: Any = (5, 6, 7), outputs: Any = ()) -> None:
        spec = RequestSpec("r", list(prompt), params, output_token_ids=list(outputs))
        self.sampler.start_request(slot, spec)
        self.tables.start_request(slot, spec)

    def sample(
        self, logits: torch.Tensor, params: list[SamplingParams], num_outputs: int, uniform: torch.Tensor
    ) -> tuple[Sampled, SampledRows]:
        slots = list(range(len(params)))
        ours = self.sampler.sample(logits.clone(), params, [num_outputs] * len(params), uniform, slots)
        numbers = torch.tensor([pack_numbers(row, VOCAB_SIZE) for row in params])
        numbers[:, -1] = uniform
        bans = torch.tensor([num_outputs < row.min_tokens for row in params])
        rows = SamplingRows._make([*numbers.unbind(1), bans])
        return ours, sample_rows(logits.clone(), rows, self.tables.tensors, torch.tensor(slots))


def random_params(rng: random.Random) -> SamplingParams:
    """Anything that a request may ask for; half of each kind not asked for."""

    def maybe(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.5 else default

    ids = rng.sample(range(VOCAB_SIZE), 40)
    return SamplingParams(
        temperature=maybe(rng.choice([1e-30, 0.01, 0.3, 1.0, 2.0]), 0.0),
        top_k=maybe(rng.choice([1, 2, 10, 300, VOCAB_SIZE, 10**6]), None),
        top_p=maybe(rng.choice([0.0, 0.1, 0.5, 0.95]), 1.0),
        min_p=maybe(rng.choice([0.001, 0.05, 0.5, 1.0]), 0.0),
        repetition_penalty=maybe(rng.choice([0.7, 1.3]), 1.0),
        presence_penalty=maybe(rng.choice([-1.5, 0.8]), 0.0),
        frequency_penalty=maybe(rng.choice([-0.5, 0.4]), 0.0),
        min_tokens=maybe(3, 0),
        stop_token_ids=tuple(maybe(ids[:3], [])),
        allowed_token_ids=maybe(tuple(ids), None),
        logit_bias=maybe({ids[0]: 3.0, ids[1]: -4.0, ids[2]: 100.0}, {}),
    )


@pytest.mark.case("B28", "B29", "B30", "B32")
@pytest.mark.parametrize("seed", range(12))
def test_mixed_batches_give_the_tokens_of_the_sampler(seed: int) -> None:
    """Logits on a coarse grid in every second run, so that many are equal, as they are in bfloat16."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    both = Both()
    params = [random_params(rng) for _ in range(NUM_SLOTS)]
    for slot, row in enumerate(params):
        both.start(slot, row, rng.sample(range(VOCAB_SIZE), 20), rng.sample(range(VOCAB_SIZE), rng.randrange(4)))
    for num_outputs in range(6):
        logits = torch.randn(NUM_SLOTS, VOCAB_SIZE, generator=generator) * 3
        if seed % 2:
            logits = (logits * 2).round() / 2
        uniform = torch.rand(NUM_SLOTS, generator=generator)
        expected, found = both.sample(logits, params, num_outputs, uniform)
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert found.is_finite.all()


def test_each_filter_keeps_the_tokens_that_the_sampler_keeps() -> None:
    """Rows draw at 100 places of one distribution, so a token too many or too few would be drawn."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(1, VOCAB_SIZE, generator=generator) * 4).round() / 2
    uniform = torch.arange(100) / 100 + 0.003
    for changes in ({"top_k": 7}, {"top_k": 301}, {"top_p": 0.6}, {"min_p": 0.03}, {"top_k": 9, "top_p": 0.7}):
        params = [SamplingParams(**changes)] * 100
        expected, found = Both(num_slots=100).sample(logits.expand(100, -1), params, 0, uniform)
        assert found.token_ids.tolist() == expected.token_ids.tolist(), changes
        assert len(set(found.token_ids.tolist())) > 1


def test_the_largest_random_number_draws_the_last_token_that_is_kept() -> None:
    logits = torch.full((1, VOCAB_SIZE), -200.0)
    logits[0, 10], logits[0, 300] = 1.0, 0.5
    almost_one = torch.tensor([1 - 2.0**-24])
    _, found = Both().sample(logits, [SamplingParams()], 0, almost_one)
    assert found.token_ids.tolist() == [300]
    _, found = Both().sample(logits, [SamplingParams()], 0, torch.tensor([0.0]))
    assert found.token_ids.tolist() == [10]


@pytest.mark.case("B29")
def test_greedy_takes_the_first_of_equal_logits_among_sampling_rows() -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, 400], logits[:, 401] = 2.0, 2.0
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)]
    _, found = Both().sample(logits, params, 0, torch.tensor([0.9, 0.9]))
    assert int(found.token_ids[0]) == 400


@pytest.mark.case("B30")
@pytest.mark.parametrize("penalty", [1e-38, 1e-45, 5e-324])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_repetition_penalty_near_0_draws_a_token_that_was_seen(penalty: float, temperature: float) -> None:
    both, params = Both(), SamplingParams(temperature=temperature, repetition_penalty=penalty)
    both.start(0, params, [3, 4], [])
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 3], logits[0, 4], logits[0, 5] = 29.0, 30.0, 50.0
    _, found = both.sample(logits, [params], 0, torch.tensor([0.5]))
    assert int(found.token_ids[0]) in (3, 4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_fails_alone_and_writes_token_0(bad: float) -> None:
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    logits[1, 17] = bad
    params = [SamplingParams(temperature=temperature) for temperature in (0.0, 0.0, 1.0)]
    expected, found = Both().sample(logits, params, 0, torch.full((3,), 0.5))
    assert found.is_finite.tolist() == [True, False, True]
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert int(found.token_ids[1]) == 0


@pytest.mark.case("B48")
def test_log_probabilities_are_those_of_the_model_whatever_sampling_asks_for() -> None:
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(temperature=0.7, allowed_token_ids=(11, 12), num_logprobs=3)
    both = Both()
    both.start(0, params)
    expected, found = both.sample(logits, [params], 0, torch.tensor([0.4]))
    (logprobs,) = expected.logprobs
    assert logprobs is not None
    assert float(found.logprobs[0]) == pytest.approx(logprobs.logprob, abs=1e-5)
    assert found.top_token_ids[0, :3].tolist() == list(logprobs.top_token_ids)
    assert found.top_logprobs[0, :3].tolist() == pytest.approx(list(logprobs.top_logprobs), abs=1e-5)


def test_a_slot_forgets_the_request_before() -> None:
    both = Both()
    both.start(0, SamplingParams(temperature=0.0, allowed_token_ids=(3,), min_tokens=5, presence_penalty=2.0))
    plain = SamplingParams(temperature=0.0)
    both.start(0, plain)
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    _, found = both.sample(logits, [plain], 0, torch.tensor([0.0]))
    assert int(found.token_ids[0]) == int(logits.argmax())


def test_more_log_probabilities_than_a_graph_returns_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"num_logprobs is 21; allowed: \[0, 20\]"):
        Both().tables.start_request(0, RequestSpec("r", [1], SamplingParams(num_logprobs=21)))


@pytest.mark.case("B35")
@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_a_token_outside_the_vocabulary_is_refused(field: str, token_id: int) -> None:
    value: Any = {token_id: 1.0} if field == "logit_bias" else (token_id,)
    params = SamplingParams(**{field: value})
    with pytest.raises(InvalidArgumentError, match=f"{field} is {token_id}; allowed: "):
        Both().tables.start_request(0, RequestSpec("r", [1], params))


@pytest.mark.case("B30")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_everything_is_banned_both_draw_the_same_token_of_the_vocabulary(temperature: float) -> None:
    generator = torch.Generator().manual_seed(3)
    banned = SamplingParams(temperature=temperature, min_tokens=5, stop_token_ids=tuple(range(VOCAB_SIZE)))
    lowest = SamplingParams(temperature=temperature, repetition_penalty=10.0, allowed_token_ids=(7,))
    both = Both()
    params = [banned, lowest]
    for slot, row in enumerate(params):
        both.start(slot, row)
    logits = torch.randn(2, VOCAB_SIZE, generator=generator)
    logits[1] = -3e38
    ours, compiled = both.sample(logits, params, 0, torch.tensor([0.9, 0.999]))
    assert ours.token_ids.tolist() == compiled.token_ids.tolist()
    assert ours.token_ids[0] == logits[0].argmax() or temperature > 0
    assert ours.token_ids[0] > 0
    assert ours.token_ids[1] == 7
