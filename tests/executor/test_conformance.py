"""What every device promises (`devices/base.py`), asked of each of them in the same words.

`pytest -m neuron` asks it of a NeuronCore; without one those tests are skipped, and the summary says so. Whether tokens
are right is for the tests of each device; here a device is only compared with itself.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from executor_svc.config import ExecutorConfig
from executor_svc.devices import create_device
from executor_svc.devices.base import Device, GraphKey, StepInputs, StepResult
from executor_svc.devices.simulated import SimulatedDevice, SimulatedFaults
from holdback.errors import InvalidArgumentError
from holdback.types import Phase, RequestSpec, SamplingParams
from tests.executor import builders
from tests.executor.compiled_models import CountingBackend, build_compiled
from tests.executor.tiny_models import build_device, decode_step, llama_config, prefill_step, save_model, with_graph

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0.0)
POISON_TOKEN = 99


class Subject:
    """A device under test, and its memory as a test can fill and read it."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def prefill(
        self, token_ids: Sequence[int], table: Sequence[int], params: SamplingParams | None = GREEDY, **where: int
    ) -> StepInputs:
        return with_graph(self.device, prefill_step(self.device, token_ids, table, params=params, **where))

    def decode(self, lengths: Sequence[int], tables: Sequence[Sequence[int]], slots: Sequence[int], **how: Any) -> Any:
        params = how.pop("params", [GREEDY] * len(slots))
        return with_graph(self.device, decode_step(self.device, lengths, tables, slots, params, **how))

    def run(self, inputs: StepInputs) -> StepResult:
        return self.device.collect(self.device.launch(inputs))

    def start(self, prompt: Sequence[int], table: Sequence[int], slot: int, params: SamplingParams = GREEDY) -> int:
        """A request and its whole prefill: its first token."""
        self.device.start_request(slot, RequestSpec("r", list(prompt), params))
        (token,) = self.run(self.prefill(prompt, table, params, slot=slot)).token_ids.tolist()
        return int(token)

    def memory(self) -> list[np.ndarray[Any, Any]]:
        """KV memory, each array with the blocks first."""
        if isinstance(self.device, SimulatedDevice):
            return [self.device.kv_token_ids, self.device.kv_positions]
        cache: Any = self.device.kv_cache  # type: ignore[attr-defined]
        return [pages.float().cpu().numpy() for pages in (*cache.keys, *cache.values)]

    def fill(self, value: float, block: int | None = None, place: int | None = None) -> None:
        """Writes to all of KV memory, or to a place of it."""
        at: Any = slice(None) if block is None else (block, place)
        if isinstance(self.device, SimulatedDevice):
            self.device.kv_token_ids[at] = POISON_TOKEN if np.isnan(value) else int(value)
            return
        cache: Any = self.device.kv_cache  # type: ignore[attr-defined]
        for pages in (*cache.keys, *cache.values):
            pages[at] = value


def make_simulated(_models: pathlib.Path) -> Device:
    return builders.build_device(num_blocks=33, vocab_size=128, faults=SimulatedFaults(nan_token_id=POISON_TOKEN))


def make_cpu(models: pathlib.Path) -> Device:
    return build_device(save_model(models / "tiny"))


def make_compiled(models: pathlib.Path) -> Device:
    return build_compiled(
        save_model(models / "tiny"), CountingBackend(), prefill_buckets=(16,), seqs_buckets=(4,), context_buckets=(64,)
    )


def make_neuron(models: pathlib.Path) -> Device:
    """The smallest that its constraints allow. The skip is the fixture's, before anything is made."""
    directory = save_model(models / "tiny", llama_config(max_position_embeddings=512))
    settings: dict[str, Any] = {
        "max_num_batched_tokens": 512,
        "num_seqs_buckets": (4,),
        "num_blocks": 64,
        "dtype": "float32",
    }
    cache = models / "cache"
    return create_device(
        ExecutorConfig(
            scheduler="localhost:1", device="neuron", model=directory, compile_cache=cache, dtype="float32", **settings
        )
    )


MAKERS = {"simulated": make_simulated, "cpu": make_cpu, "compiled": make_compiled, "neuron": make_neuron}
WITH_SAMPLING = [
    "cpu",
    pytest.param("compiled", marks=pytest.mark.compiled),
    pytest.param("neuron", marks=pytest.mark.neuron),
]
ALL = ["simulated", *WITH_SAMPLING]


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Device]]:
    """Those that the tests asked for so far; each is made once."""
    made: dict[str, Device] = {}
    yield made
    for device in made.values():
        device.close()


@pytest.fixture
def subject(
    request: pytest.FixtureRequest, devices: dict[str, Device], tmp_path_factory: pytest.TempPathFactory
) -> Subject:
    kind = request.param
    if kind not in devices:
        devices[kind] = MAKERS[kind](tmp_path_factory.mktemp(kind))
    devices[kind].reset()
    return Subject(devices[kind])


every_device = pytest.mark.parametrize("subject", ALL, indirect=True)
every_device_with_a_model = pytest.mark.parametrize("subject", WITH_SAMPLING, indirect=True)


def tokens(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 90, length)]


@every_device
def test_graphs_are_declared_for_every_bucket_and_each_once(subject: Subject) -> None:
    device = subject.device
    graphs = device.declared_graphs()
    assert len(set(graphs)) == len(graphs)
    assert {key.size for key in graphs if key.phase is Phase.PREFILL} == set(device.limits.num_batched_tokens_buckets)
    assert {key.size for key in graphs if key.phase is Phase.DECODE} == set(device.limits.num_seqs_buckets)
    assert max(key.context for key in graphs) == device.model.max_model_len


@every_device
def test_a_result_has_a_token_for_each_real_row_and_the_time_it_took(subject: Subject) -> None:
    subject.start(tokens(3), [5], 0)
    subject.start(tokens(2, seed=1), [6], 1)
    result = subject.run(subject.decode([3, 2], [[5], [6]], [0, 1], num_outputs=[1, 1], size=4))
    assert result.token_ids.dtype == np.int32
    assert result.token_ids.shape == (2,)
    assert result.failed_rows == []
    assert result.logprobs == []
    assert result.device_us >= 1


@every_device
def test_a_chunk_that_leaves_tokens_to_compute_samples_nothing(subject: Subject) -> None:
    first = subject.start(tokens(3), [5], 0)
    subject.device.start_request(1, RequestSpec("r", tokens(8, seed=1), GREEDY))
    unfinished = subject.run(subject.prefill(tokens(4, seed=1), [7, 8], None))
    assert unfinished.token_ids.tolist() == []
    assert unfinished.logprobs == []
    # The slot that decodes still has its own last token.
    with_it = subject.run(subject.decode([3], [[5]], [0], num_outputs=[1])).token_ids.tolist()
    subject.device.reset()
    assert subject.start(tokens(3), [5], 0) == first
    assert subject.run(subject.decode([3], [[5]], [0], num_outputs=[1])).token_ids.tolist() == with_it


@pytest.mark.case("B26")
@every_device
def test_padding_and_real_rows_write_to_their_own_places_and_the_sink_alone(subject: Subject) -> None:
    device, block_size = subject.device, subject.device.limits.block_size
    subject.fill(7)
    before = [pages.copy() for pages in subject.memory()]
    device.start_request(0, RequestSpec("r", tokens(3), GREEDY))
    subject.run(subject.prefill(tokens(3), [5], slot=0))
    subject.run(subject.decode([3], [[5, 9]], [0], num_outputs=[1], size=device.limits.num_seqs_buckets[-1]))
    for old, new in zip(before, subject.memory(), strict=True):
        changed = np.argwhere((old != new).reshape(*old.shape[:2], -1).any(axis=-1))
        places = {(int(block), int(place)) for block, place in changed if block != device.limits.num_blocks}
        assert places <= {(5, 0), (5, 1), (5, 2), (5 if block_size > 3 else 9, 3 % block_size)}
    changed_places = sum(int((old[5] != new[5]).any()) for old, new in zip(before, subject.memory(), strict=True))
    assert changed_places == len(before), "the row's own places were written"


@every_device_with_a_model
def test_what_lies_behind_the_visible_tokens_and_in_the_null_block_does_not_count(subject: Subject) -> None:
    def answers() -> list[int]:
        found = [subject.start(tokens(3), [5], 0)]
        for length in (3, 4, 5):
            step = subject.decode([length], [[5, 6]], [0], num_outputs=[length - 2])
            found += subject.run(step).token_ids.tolist()
        return found

    expected = answers()
    subject.device.reset()
    subject.fill(float("nan"))
    assert answers() == expected


@every_device
def test_rows_of_a_batch_have_the_tokens_that_they_have_alone_in_any_order(subject: Subject) -> None:
    prompts, tables = [tokens(6), tokens(2, seed=1), tokens(5, seed=2)], [[5, 9], [11], [12, 13]]
    for slot, prompt in enumerate(prompts):
        subject.start(prompt, tables[slot], slot)
    alone = []
    for slot in range(3):
        step = subject.decode([len(prompts[slot])], [tables[slot]], [slot], num_outputs=[1])
        alone += subject.run(step).token_ids.tolist()
    subject.device.reset()
    for slot, prompt in enumerate(prompts):
        subject.start(prompt, tables[slot], slot)
    order = [2, 0, 1]
    lengths = [len(prompts[slot]) for slot in order]
    batch = subject.run(subject.decode(lengths, [tables[slot] for slot in order], order, num_outputs=[1] * 3))
    assert batch.token_ids.tolist() == [alone[slot] for slot in order]


@every_device
def test_steps_launched_ahead_run_in_order_and_give_the_same_tokens(subject: Subject) -> None:
    def answers(depth: int) -> list[int]:
        subject.device.reset()
        subject.device.start_request(0, RequestSpec("r", tokens(3), GREEDY))
        steps = [subject.prefill(tokens(3), [5, 6], slot=0)]
        steps += [subject.decode([3 + n], [[5, 6]], [0], num_outputs=[1 + n]) for n in range(4)]
        found: list[int] = []
        tickets: list[object] = []
        for step in steps:
            tickets.append(subject.device.launch(step))
            if len(tickets) == depth:
                found += subject.device.collect(tickets.pop(0)).token_ids.tolist()
        return found + [token for ticket in tickets for token in subject.device.collect(ticket).token_ids.tolist()]

    assert answers(subject.device.limits.max_steps_in_flight) == answers(1)


@every_device
def test_a_request_starts_in_a_slot_whose_last_row_is_still_launched(subject: Subject) -> None:
    """The late row writes its token and its place first; the new owner has slot and block to itself then."""
    device = subject.device
    expected = [subject.start(tokens(3, seed=5), [6], 0)]
    expected += subject.run(subject.decode([3], [[6]], [0], num_outputs=[1])).token_ids.tolist()
    device.reset()
    subject.start(tokens(3), [6], 0)
    late = device.launch(subject.decode([3], [[6]], [0], num_outputs=[1]))
    device.start_request(0, RequestSpec("new", tokens(3, seed=5), GREEDY))
    first = device.launch(subject.prefill(tokens(3, seed=5), [6], slot=0))
    device.collect(late)
    found = device.collect(first).token_ids.tolist()
    found += subject.run(subject.decode([3], [[6]], [0], num_outputs=[1])).token_ids.tolist()
    assert found == expected


@every_device
def test_reset_zeroes_memory_and_forgets_requests(subject: Subject) -> None:
    first = subject.start(tokens(3), [5], 0)
    subject.fill(3)
    subject.device.reset()
    assert all(not pages.any() for pages in subject.memory())
    assert subject.start(tokens(3), [5], 0) == first


@every_device
def test_a_row_that_is_not_finite_fails_alone_with_token_0(subject: Subject) -> None:
    prompts, tables = [tokens(3), tokens(2, seed=1)], [[5], [6]]
    for slot, prompt in enumerate(prompts):
        subject.start(prompt, tables[slot], slot)
    healthy = subject.run(subject.decode([3, 2], tables, [0, 1], num_outputs=[1, 1])).token_ids.tolist()
    subject.device.reset()
    for slot, prompt in enumerate(prompts):
        subject.start(prompt, tables[slot], slot)
    subject.fill(float("nan"), 5, 1)
    result = subject.run(subject.decode([3, 2], tables, [0, 1], num_outputs=[1, 1]))
    assert result.failed_rows == [0]
    assert result.token_ids.tolist() == [0, healthy[1]]


@every_device
def test_what_is_not_declared_or_has_another_shape_is_refused_and_nothing_runs(subject: Subject) -> None:
    device = subject.device
    good = subject.prefill(tokens(3), [5], slot=0)
    other = GraphKey(Phase.PREFILL, good.key.size, good.key.context + 1)
    for change in (
        {"key": other},
        {"key": GraphKey(Phase.PREFILL, good.key.size + 1, good.key.context)},
        {"positions": good.positions[:-1]},
        {"block_tables": good.block_tables[:, :-1]},
        {"slots": np.zeros(2, np.int32)},
        {"input_ids": None},
    ):
        with pytest.raises(ValueError, match=r"allowed|goes with"):
            device.launch(dataclasses.replace(good, **change))
    assert all(not pages.any() for pages in subject.memory())
    with pytest.raises(TypeError, match="allowed: what launch returned"):
        device.collect("no ticket")


@every_device_with_a_model
def test_what_sampling_counts_starts_from_the_request_and_grows_with_its_tokens(subject: Subject) -> None:
    """Logits of 1,000 and 900, halved once their token was seen; what the model adds is small beside them."""
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0, logit_bias={100: 1000.0, 101: 900.0})
    for _ in range(2):
        found = [subject.start(tokens(3), [5, 6], 0, params)]
        for output in range(1, 4):
            step = subject.decode([2 + output], [[5, 6]], [0], num_outputs=[output], params=[params])
            found += subject.run(step).token_ids.tolist()
        assert found == [100, 101, 100, 100]
    plain = [subject.start(tokens(3), [5, 6], 0)]
    for output in range(1, 4):
        plain += subject.run(subject.decode([2 + output], [[5, 6]], [0], num_outputs=[output])).token_ids.tolist()
    assert not {100, 101} & set(plain), "the slot's next request has no bias"


@every_device_with_a_model
def test_a_row_draws_by_its_own_numbers_whoever_is_beside_it(subject: Subject) -> None:
    params, tables = [SamplingParams(temperature=1.2, top_k=20), GREEDY], [[5], [6]]

    def draw(rows: list[int]) -> int:
        subject.device.reset()
        for slot in range(2):
            subject.start(tokens(2 + slot, seed=slot), tables[slot], slot, params[slot])
        step = subject.decode(
            [2 + slot for slot in rows],
            [tables[slot] for slot in rows],
            rows,
            params=[params[slot] for slot in rows],
            num_outputs=[1] * len(rows),
            uniform=[(0.37, 0.9)[slot] for slot in rows],
        )
        return int(subject.run(step).token_ids[rows.index(0)])

    assert draw([0]) == draw([0, 1]) == draw([1, 0])


@every_device_with_a_model
def test_a_request_with_a_token_outside_the_vocabulary_fails_its_step_alone(subject: Subject) -> None:
    device = subject.device
    bad = SamplingParams(temperature=0.0, logit_bias={device.model.vocab_size: 1.0})
    device.start_request(0, RequestSpec("r", tokens(3), bad))
    with pytest.raises(InvalidArgumentError, match="logit_bias is"):
        subject.run(subject.prefill(tokens(3), [5], slot=0))
    assert 0 <= subject.start(tokens(3), [5], 1) < device.model.vocab_size
