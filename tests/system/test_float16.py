"""float16 through gateway, scheduler and executor: what is equal to what, and where rounding may decide.

Alone, a request has the same steps as in an executor without the services around it, so even its log-probabilities are
the same numbers. In a batch PyTorch adds in another order; then tokens are promised only as far as the reference is
sure: up to the first position where its two most likely tokens are closer than rounding.
"""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio
import torch
import transformers

from holdback import AsyncClient
from holdback.cli.local import LocalStack
from holdback.types import TokenLogprobs
from tests.system.tiny_model import VOCAB_SIZE, answer_alone, save_tiny_model, stack_arguments

pytestmark = pytest.mark.loopback

NUM_TOKENS = 24
PROMPTS = [
    [(7 * number + 11 * place) % (VOCAB_SIZE - 20) + 20 for place in range(3 + 3 * number)] for number in range(8)
]
CLOSE = 0.05
"""Of logits of about 10, of which float16 keeps steps of 0.008: what some sums in another order may come to."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(model: pathlib.Path) -> AsyncIterator[AsyncClient]:
    async with LocalStack(stack_arguments(model, dtype="float16")) as stack:
        await stack.wait_until_ready()
        async with AsyncClient(stack.gateway_address, timeout_s=60) as client:
            yield client


@pytest.fixture(scope="module")
def alone(model: pathlib.Path) -> list[list[TokenLogprobs]]:
    return answer_alone(model, PROMPTS, NUM_TOKENS, dtype="float16")


async def ask(client: AsyncClient, prompt: Sequence[int], salt: str) -> Sequence[TokenLogprobs]:
    answer = await client.generate(
        token_ids=prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, num_logprobs=1, cache_salt=salt
    )
    assert answer.usage.completion_tokens == NUM_TOKENS
    return answer.choices[0].logprobs


@pytest.mark.asyncio(loop_scope="module")
async def test_alone_the_services_change_no_bit_of_what_the_executor_computes(
    client: AsyncClient, model: pathlib.Path, alone: list[list[TokenLogprobs]]
) -> None:
    for prompt, expected in zip(PROMPTS, alone, strict=True):
        assert list(await ask(client, prompt, "alone")) == expected
    # And it was float16 that computed.
    assert alone[0] != answer_alone(model, PROMPTS[:1], NUM_TOKENS, dtype="float32")[0]


@pytest.mark.asyncio(loop_scope="module")
async def test_eight_at_once_get_the_tokens_of_each_alone_as_far_as_it_is_sure(
    client: AsyncClient, alone: list[list[TokenLogprobs]]
) -> None:
    together = await asyncio.gather(*(ask(client, prompt, "together") for prompt in PROMPTS))
    num_equal = 0
    for expected, found in zip(alone, together, strict=True):
        for one, other in zip(expected, found, strict=True):
            # Where tokens differ, either might have been chosen; what follows has another history.
            assert abs(one.logprob - other.logprob) < CLOSE
            if one.token_id != other.token_id:
                break
            num_equal += 1
    assert num_equal >= 0.75 * len(PROMPTS) * NUM_TOKENS


def test_the_tokens_are_those_of_transformers_in_float16_as_far_as_it_is_sure(
    model: pathlib.Path, alone: list[list[TokenLogprobs]]
) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float16)
    num_sure = 0
    for prompt, found in zip(PROMPTS, alone, strict=True):
        tokens = [entry.token_id for entry in found]
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :].float()
        gaps = logits.topk(2).values.diff().abs()[:, 0]
        sure = gaps > CLOSE
        assert torch.equal(logits.argmax(-1)[sure], torch.tensor(tokens)[sure])
        num_sure += int(sure.sum())
    assert num_sure >= 0.9 * len(PROMPTS) * NUM_TOKENS
