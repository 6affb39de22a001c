"""The `cpu` device on a tiny model: what it computes against transformers' own forward, and what it leaves alone."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from executor_svc.devices.base import GraphKey, StepInputs, StepResult
from executor_svc.devices.cpu import CpuDevice
from holdback.errors import ConfigError, InvalidArgumentError
from holdback.types import Phase, RequestSpec, SamplingParams
from tests.executor.tiny_models import (
    ALL_LOGPROBS,
    VOCAB_SIZE,
    build_device,
    decode_step,
    llama_config,
    prefill_step,
    save_model,
)

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def shared_device(tiny_model: pathlib.Path) -> CpuDevice:
    return build_device(tiny_model)


@pytest.fixture
def device(shared_device: CpuDevice) -> CpuDevice:
    shared_device.reset()
    return shared_device


@pytest.fixture(scope="module")
def reference(tiny_model: pathlib.Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


def tokens(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCAB_SIZE, length)]


def run(device: CpuDevice, inputs: StepInputs) -> StepResult:
    return device.collect(device.launch(inputs))


def logprobs(result: StepResult, row: int = 0) -> torch.Tensor:
    """Log-probabilities of the whole vocabulary by token id, as the device returned them."""
    found = result.logprobs[row]
    assert found is not None
    values = torch.empty(VOCAB_SIZE)
    values[list(found.top_token_ids)] = torch.tensor(found.top_logprobs)
    return values


def expected_logits(reference: Any, token_ids: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = reference(torch.tensor([token_ids])).logits[0, -1]
    return logits


def expected_logprobs(reference: Any, token_ids: Sequence[int]) -> torch.Tensor:
    return torch.log_softmax(expected_logits(reference, token_ids), dim=-1)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_a_prompt_in_one_chunk_gives_the_logits_of_transformers(device: CpuDevice, reference: Any) -> None:
    prompt = tokens(11)
    result = run(device, prefill_step(device, prompt, [5, 9, 2]))
    assert_same(logprobs(result), expected_logprobs(reference, prompt))
    assert result.token_ids.dtype == np.int32
    assert result.token_ids.tolist() == [int(expected_logprobs(reference, prompt).argmax())]
    assert result.device_us >= 1


@pytest.mark.parametrize("cuts", [[8, 16, 24], [1, 2, 11], [5, 6, 12, 13], [16], [16, 26]])
def test_a_prompt_in_chunks_gives_the_logits_of_transformers(
    device: CpuDevice, reference: Any, cuts: list[int]
) -> None:
    prompt, table = tokens(27), [5, 9, 2, 30, 11, 12, 1]
    for start, end in zip([0, *cuts], cuts, strict=False):
        unfinished = run(device, prefill_step(device, prompt[start:end], table, start=start, params=None))
        assert unfinished.token_ids.tolist() == []
        assert unfinished.logprobs == []
    result = run(device, prefill_step(device, prompt[cuts[-1] :], table, start=cuts[-1]))
    assert_same(logprobs(result), expected_logprobs(reference, prompt))


@pytest.mark.case("B22")
@pytest.mark.parametrize("hit", [4, 12, 20])
def test_a_prefix_hit_on_blocks_of_another_request_gives_the_logits_of_a_cold_prefill(
    device: CpuDevice, reference: Any, hit: int
) -> None:
    """The second request shares the first `hit` tokens and their blocks, and has blocks of its own after them."""
    first = tokens(20)
    for start in (0, 10):
        run(device, prefill_step(device, first[start : start + 10], [5, 9, 2, 30, 11], start=start, params=GREEDY))
    second = [*first[:hit], *tokens(7, seed=1)]
    table = [*[5, 9, 2, 30, 11][: hit // 4], 20, 21, 22]
    result = run(device, prefill_step(device, second[hit:], table, start=hit, slot=1))
    assert_same(logprobs(result), expected_logprobs(reference, second))


def test_decode_takes_its_ids_from_the_table_of_last_tokens(device: CpuDevice, reference: Any) -> None:
    sequence, table = tokens(6), [5, 9, 2]
    sequence += run(device, prefill_step(device, sequence, table, slot=3)).token_ids.tolist()
    for _ in range(4):
        result = run(device, decode_step(device, [len(sequence) - 1], [table], [3]))
        assert_same(logprobs(result), expected_logprobs(reference, sequence))
        sequence += result.token_ids.tolist()


def test_a_chunk_that_leaves_tokens_to_compute_does_not_touch_the_last_token(device: CpuDevice, reference: Any) -> None:
    first, second = tokens(6), tokens(12, seed=1)
    first += run(device, prefill_step(device, first, [5, 9], slot=0)).token_ids.tolist()
    run(device, prefill_step(device, second[:8], [2, 30, 11], slot=0, params=None))
    result = run(device, decode_step(device, [6], [[5, 9]], [0]))
    assert_same(logprobs(result), expected_logprobs(reference, first))


def test_logits_are_computed_for_the_last_token_of_the_last_chunk_alone(device: CpuDevice) -> None:
    widths: list[int] = []
    hook = device._model.module.lm_head.register_forward_hook(lambda _, inputs, __: widths.append(inputs[0].shape[1]))
    run(device, prefill_step(device, tokens(8), [5, 9, 2, 30], params=None))
    run(device, prefill_step(device, tokens(7), [5, 9, 2, 30], start=8))
    hook.remove()
    assert widths == [0, 1]


def test_rows_of_a_decode_batch_are_independent_and_in_any_order(device: CpuDevice, reference: Any) -> None:
    sequences = [tokens(13), tokens(2, seed=1), tokens(8, seed=2)]
    tables = [[5, 9, 2, 30], [11], [12, 13, 14]]
    for slot, sequence in enumerate(sequences):
        sequence += run(device, prefill_step(device, sequence, tables[slot], slot=slot)).token_ids.tolist()
    order = [2, 0, 1]
    lengths = [len(sequences[slot]) - 1 for slot in order]
    result = run(device, decode_step(device, lengths, [tables[slot] for slot in order], order))
    assert len(result.token_ids) == 3
    for row, slot in enumerate(order):
        assert_same(logprobs(result, row), expected_logprobs(reference, sequences[slot]))


def test_steps_can_be_launched_ahead_of_their_results(device: CpuDevice) -> None:
    """Launched one behind the other, with arrays that are used again, they give what they give one by one."""
    prompt, table = tokens(6), [5, 9, 2]
    expected = run(device, prefill_step(device, prompt, table)).token_ids.tolist()
    expected += [int(run(device, decode_step(device, [length], [table], [0])).token_ids[0]) for length in (6, 7, 8)]
    device.reset()
    tickets = []
    for inputs in [
        prefill_step(device, prompt, table),
        *(decode_step(device, [length], [table], [0]) for length in (6, 7, 8)),
    ]:
        tickets.append(device.launch(inputs))
        for array in (inputs.positions, inputs.slot_mapping, inputs.block_tables, inputs.context_lens, inputs.slots):
            array.fill(1)
    assert [int(device.collect(ticket).token_ids[0]) for ticket in tickets] == expected


@pytest.mark.case("B26")
def test_padding_writes_to_nobodys_memory_and_reads_nothing_of_it(device: CpuDevice, reference: Any) -> None:
    """2 live rows of a batch of 4, and a padded chunk: only their own slots change, the rest of KV memory is NaN."""
    sequences, tables = [tokens(6), tokens(9, seed=1)], [[5, 9], [31, 2, 7]]
    pages = [*device.kv_cache.keys, *device.kv_cache.values]
    for page in pages:
        page.fill_(float("nan"))
    results = [
        run(device, prefill_step(device, sequence, tables[slot], slot=slot, padding_token_id=77))
        for slot, sequence in enumerate(sequences)
    ]
    for slot, sequence in enumerate(sequences):
        assert_same(logprobs(results[slot]), expected_logprobs(reference, sequence))
        sequence += results[slot].token_ids.tolist()
    before = [page.clone() for page in pages]
    result = run(device, decode_step(device, [6, 9], tables, [0, 1], size=4))
    for slot, sequence in enumerate(sequences):
        assert_same(logprobs(result, slot), expected_logprobs(reference, sequence))
    own = torch.zeros(33, 4, dtype=torch.bool)
    own[9, 2] = own[7, 1] = True  # tokens 6 and 9: the third slot of block 9 and the second of block 7
    for page, old in zip(pages, before, strict=True):
        changed = (page.view(torch.int32) != old.view(torch.int32)).flatten(2).any(dim=2)
        assert changed[:32].equal(own[:32]), "the sink, block 32, is the only other block that may change"
        assert page[0].isnan().all()
        assert page[31, 0].isfinite().all(), "the first live slot of the last block"


def test_a_row_whose_logits_are_not_finite_fails_alone(device: CpuDevice, reference: Any) -> None:
    sequences, tables = [tokens(6), tokens(5, seed=1)], [[5, 9], [31, 2]]
    for slot, sequence in enumerate(sequences):
        sequence += run(device, prefill_step(device, sequence, tables[slot], slot=slot)).token_ids.tolist()
    device.kv_cache.values[0][5, 1] = float("inf")
    result = run(device, decode_step(device, [6, 5], tables, [0, 1]))
    assert result.failed_rows == [0]
    assert int(result.token_ids[0]) == 0
    assert result.logprobs[0] is None
    assert_same(logprobs(result, 1), expected_logprobs(reference, sequences[1]))


def test_penalties_count_tokens_of_steps_that_were_launched_ahead(device: CpuDevice, reference: Any) -> None:
    params = SamplingParams(
        temperature=0.0, repetition_penalty=1.5, presence_penalty=2.0, frequency_penalty=2.0, num_logprobs=0
    )
    prompt, outputs, table = tokens(6), [7, 7], [5, 9, 2, 30, 11]
    device.start_request(1, RequestSpec("r", prompt, params, output_token_ids=outputs))
    tickets = [device.launch(prefill_step(device, [*prompt, *outputs], table, slot=1, params=params))]
    tickets += [device.launch(decode_step(device, [length], [table], [1], [params])) for length in range(8, 18)]
    found = [int(device.collect(ticket).token_ids[0]) for ticket in tickets]
    num_changed = 0
    for token_id in found:
        raw = expected_logits(reference, [*prompt, *outputs])
        logits = raw.clone()
        for seen in {*prompt, *outputs}:
            logits[seen] = logits[seen] / 1.5 if logits[seen] > 0 else logits[seen] * 1.5
            logits[seen] -= 2.0 * (seen in outputs) + 2.0 * outputs.count(seen)
        assert token_id == int(logits.argmax())
        num_changed += int(logits.argmax()) != int(raw.argmax())
        outputs.append(token_id)
    assert num_changed > 0, "penalties that change nothing prove nothing"


def test_eos_of_the_model_is_not_sampled_before_min_tokens(device: CpuDevice) -> None:
    params = SamplingParams(temperature=0.0, min_tokens=1, logit_bias={2: 100.0})
    first = run(device, prefill_step(device, tokens(6), [5, 9], params=params))
    assert int(first.token_ids[0]) != 2
    step = decode_step(device, [6], [[5, 9]], [0], [params], num_outputs=[1])
    assert run(device, step).token_ids.tolist() == [2]


def test_reset_forgets_everything(device: CpuDevice) -> None:
    run(device, prefill_step(device, tokens(6), [5, 9]))
    assert device.kv_cache.keys[0].any()
    device.reset()
    assert not any(page.any() for page in [*device.kv_cache.keys, *device.kv_cache.values])
    # last_token is 0 again: a decode of slot 0 continues token 0
    params = [SamplingParams(temperature=0.0, num_logprobs=VOCAB_SIZE)]
    alone = run(device, decode_step(device, [0], [[5]], [0], params))
    device.reset()
    other_slot = run(device, decode_step(device, [0], [[5]], [2], params))
    assert alone == dataclasses.replace(other_slot, token_ids=alone.token_ids, device_us=alone.device_us)
    assert alone.token_ids.tolist() == other_slot.token_ids.tolist()


def test_a_graph_is_declared_for_each_bucket_with_the_context_as_data(device: CpuDevice) -> None:
    assert device.kind == "cpu"
    assert device.declared_graphs() == [
        GraphKey(Phase.PREFILL, 8, 64),
        GraphKey(Phase.PREFILL, 16, 64),
        GraphKey(Phase.DECODE, 1, 64),
        GraphKey(Phase.DECODE, 2, 64),
        GraphKey(Phase.DECODE, 4, 64),
    ]
    assert device.limits.decode_context_length_buckets == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": GraphKey(Phase.PREFILL, 9, 64)}, "graph is .*size=9"),
        ({"key": GraphKey(Phase.PREFILL, 8, 32)}, "graph is .*context=32"),
        ({"positions": np.zeros(16, np.int32)}, r"positions of a prefill of 8 has shape \(16,\); allowed: \(8,\)"),
        ({"block_tables": np.zeros((1, 3), np.int32)}, r"block_tables .* has shape \(1, 3\); allowed: \(1, 16\)"),
        ({"input_ids": None}, "input_ids goes with a prefill and with nothing else"),
        ({"slots": np.zeros(1, np.int64)}, "slots of a prefill of 8 is int64; allowed: int32"),
    ],
)
def test_a_shape_that_is_not_declared_is_refused(device: CpuDevice, change: dict[str, Any], message: str) -> None:
    inputs = dataclasses.replace(prefill_step(device, tokens(6), [5, 9]), **change)
    with pytest.raises(ValueError, match=message):
        device.launch(inputs)


def test_an_error_of_a_request_that_starts_is_raised_by_its_step(device: CpuDevice) -> None:
    device.start_request(0, RequestSpec("r", [1], SamplingParams(logit_bias={VOCAB_SIZE: 1.0})))
    ticket = device.launch(prefill_step(device, [1], [5]))
    with pytest.raises(InvalidArgumentError, match="logit_bias is 128"):
        device.collect(ticket)
    assert run(device, prefill_step(device, [1], [5])).failed_rows == []


def test_a_ticket_that_is_none_is_refused(device: CpuDevice) -> None:
    with pytest.raises(TypeError, match="ticket is int"):
        device.collect(3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_16_bits_a_row_alone_and_in_a_batch_differ_by_rounding_at_most(tiny_model: pathlib.Path, dtype: str) -> None:
    """Whether they are bit-equal depends on the processor: measured, not promised."""
    device = build_device(tiny_model, dtype=dtype)
    sequences, tables = [tokens(13), tokens(2, seed=1), tokens(8, seed=2)], [[5, 9, 2, 30], [11], [12, 13, 14]]
    lengths = [len(sequence) for sequence in sequences]
    results = []
    for rows in ([0, 1, 2], [0], [1], [2]):
        for slot in rows:
            run(device, prefill_step(device, sequences[slot], tables[slot], slot=slot))
        step = decode_step(device, [lengths[slot] for slot in rows], [tables[slot] for slot in rows], rows)
        results.append(run(device, step))
    for slot in range(3):
        assert len(results[1 + slot].token_ids) == 1
        torch.testing.assert_close(logprobs(results[1 + slot]), logprobs(results[0], slot), atol=0.2, rtol=0)
    device.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_blocks": 16}, "max_model_len is 64, which needs 16 blocks of 4 tokens, but num_blocks is 16"),
        ({"max_model_len": 65}, r"max_model_len is 65; allowed: \[2, 64\]"),
        ({"num_batched_tokens_buckets": (8, 80)}, "the last one is 64"),
        ({"num_seqs_buckets": (2, 1)}, r"num_seqs_buckets is \[2, 1\]; allowed: positive numbers, strictly ascending"),
        ({"max_num_seqs": 3}, "the last one is 3"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tiny_model: pathlib.Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_device(tiny_model, **settings)


def test_limits_follow_from_the_model_where_nothing_is_set(tiny_model: pathlib.Path) -> None:
    device = build_device(tiny_model, num_batched_tokens_buckets=None, num_seqs_buckets=None, max_model_len=60)
    assert device.model.max_model_len == 60
    assert device.limits.num_batched_tokens_buckets == (60,)
    assert device.limits.num_seqs_buckets == (1, 2, 4, 8, 16, 32)
    assert device.limits.max_num_batched_tokens == 512
    device.close()


FAMILIES = {
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "gemma2": transformers.Gemma2Config,
    "gemma3": transformers.Gemma3TextConfig,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_agree_with_transformers_through_prefill_and_decode(tmp_path: pathlib.Path, family: str) -> None:
    """With a sliding window of 5, shorter than the prompt, and, in Gemma 2, capped scores."""
    sizes = llama_config().to_dict()
    keys = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    keys += ["num_key_value_heads", "head_dim", "max_position_embeddings", "initializer_range", "pad_token_id"]
    config = FAMILIES[family](**{key: sizes[key] for key in keys}, sliding_window=5)
    directory = save_model(tmp_path / family, config)
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    device = build_device(directory)
    sequence, table = tokens(14), [5, 9, 2, 30, 11]
    run(device, prefill_step(device, sequence[:8], table, params=None))
    result = run(device, prefill_step(device, sequence[8:], table, start=8))
    assert_same(logprobs(result), expected_logprobs(reference, sequence))
    sequence += result.token_ids.tolist()
    decoded = run(device, decode_step(device, [14], [table], [0], [ALL_LOGPROBS]))
    assert_same(logprobs(decoded), expected_logprobs(reference, sequence))
    device.close()
