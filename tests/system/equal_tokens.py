"""Greedy output of all three services against `generate` of transformers, in float32, position by position.

    python tests/system/equal_tokens.py MODEL     the report over twenty prompts of 5 to 2,000 tokens, 64 tokens each

The rule: tokens must be equal up to the first position where the reference's two largest logits differ by less than
1e-3. There the order of sums may decide, and everything after it follows from another history, so such a position is
counted and ends the comparison of its prompt. Any other difference is an error.
"""

from __future__ import annotations

import argparse
import asyncio
import pathlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdback import AsyncClient
from holdback.cli.local import LocalStack

NUM_OUTPUTS = 64
CLOSE_LOGITS = 1e-3
NUM_AT_ONCE = 8
BLOCK_SIZE = 16

_WHO = ("The ferryman", "A gardener", "My neighbour", "The night train", "An old clock", "The librarian", "A violinist")
_DOES = ("keeps", "repairs", "remembers", "paints", "collects", "sells", "listens to", "writes about")
_WHAT = (
    "broken umbrellas",
    "the harbour",
    "seven maps",
    "quiet streets",
    "winter apples",
    "a letter",
    "the lighthouse",
)
_WHEN = ("every morning", "since the war", "when it rains", "for no reason", "on Tuesdays", "without a word")


@dataclass
class Reference:
    """What transformers says: tokens, and the gap between its two largest logits at each position."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]


@dataclass
class Comparison:
    """Result of one pass over all prompts.

    Attributes:
        num_equal: positions compared and equal.
        close: (prompt, position, gap) of each difference at a position with close logits.
        wrong: (prompt, position, gap) of each other difference.
        num_cached: prompt tokens that came from cached blocks, over all prompts.
    """

    name: str
    num_equal: int = 0
    close: list[tuple[int, int, float]] = field(default_factory=list)
    wrong: list[tuple[int, int, float]] = field(default_factory=list)
    num_cached: int = 0

    def add(self, number: int, tokens: Sequence[int], reference: Reference) -> None:
        assert len(tokens) == len(reference.tokens)
        for position, (got, expected) in enumerate(zip(tokens, reference.tokens, strict=True)):
            if got != expected:
                gap = reference.gaps[position]
                (self.close if gap < CLOSE_LOGITS else self.wrong).append((number, position, gap))
                return
            self.num_equal += 1


def make_prompts(tokenizer_file: pathlib.Path, count: int, shortest: int = 5, longest: int = 2000) -> list[list[int]]:
    """Prompts of plain sentences, their lengths spread evenly over a logarithmic scale, both ends included."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    ratio = (longest / shortest) ** (1 / max(1, count - 1))
    prompts = []
    for number in range(count):
        length, rng = round(shortest * ratio**number), random.Random(number)
        text = " ".join(
            f"{rng.choice(_WHO)} {rng.choice(_DOES)} {rng.choice(_WHAT)} {rng.choice(_WHEN)}."
            for _ in range(length // 6 + 3)
        )
        prompts.append(tokenizer.encode(text).ids[:length])
    return prompts


def references(
    model_directory: pathlib.Path, prompts: list[list[int]], num_outputs: int = NUM_OUTPUTS
) -> list[Reference]:
    """Greedy `generate` of transformers, each prompt alone, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    result = []
    for prompt in prompts:
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=num_outputs,
            min_new_tokens=num_outputs,
            eos_token_id=-1,  # as `ignore_eos`: an end token is a token like any other
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        gaps = [float(top[0] - top[1]) for top in (logits[0].topk(2).values for logits in output.logits)]
        result.append(Reference(prompt, output.sequences[0, len(prompt) :].tolist(), gaps))
    return result


async def compare(address: str, expected: list[Reference], name: str, *, at_once: int, salt: str) -> Comparison:
    """One pass over all prompts, `at_once` of them at the same time. A salt that was used before gives prefix hits."""
    result = Comparison(name)
    semaphore = asyncio.Semaphore(at_once)

    async with AsyncClient(address) as client:

        async def one(number: int, reference: Reference) -> None:
            async with semaphore:
                answer = await client.generate(
                    token_ids=reference.prompt,
                    max_tokens=len(reference.tokens),
                    temperature=0.0,
                    ignore_eos=True,
                    cache_salt=salt,
                )
            result.add(number, answer.token_ids, reference)
            result.num_cached += answer.usage.cached_tokens

        await asyncio.gather(*(one(number, reference) for number, reference in enumerate(expected)))
    return result


def stack_arguments(model_directory: pathlib.Path) -> dict[str, Sequence[str]]:
    model = str(model_directory)
    executor = ["--device", "cpu", "--model", model, "--dtype", "float32", "--max-model-len", "2304"]
    # 8 requests of 144 blocks each, so that eight really run at once.
    executor += ["--block-size", str(BLOCK_SIZE), "--num-blocks", "1300", "--max-num-seqs", "8"]
    return {"executor": executor, "gateway": ["--tokenizer", model, "--served-model-name", "model"]}


async def compare_all(model_directory: pathlib.Path, expected: list[Reference]) -> list[Comparison]:
    """Alone and eight at once, each cold and with prefix hits."""
    async with LocalStack(stack_arguments(model_directory)) as stack:
        await stack.wait_until_ready()
        passes = [
            ("alone, cold", 1, "alone"),
            ("eight at once, cold", NUM_AT_ONCE, "eight"),
            ("eight at once, prefix hit", NUM_AT_ONCE, "eight"),
            ("alone, prefix hit", 1, "eight"),
        ]
        return [
            await compare(stack.gateway_address, expected, name, at_once=at_once, salt=salt)
            for name, at_once, salt in passes
        ]


def report(comparison: Comparison) -> str:
    lines = [
        f"{comparison.name:<28} equal {comparison.num_equal:>5}  close {len(comparison.close):>3}  "
        f"wrong {len(comparison.wrong):>3}  prompt tokens from cache {comparison.num_cached}"
    ]
    lines += [
        f"    prompt {number} position {position}: the two largest logits differ by {gap:.1e}"
        for number, position, gap in [*comparison.close, *comparison.wrong]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--prompts", type=int, default=20)
    flags = parser.parse_args()
    expected = references(flags.model, make_prompts(flags.model / "tokenizer.json", flags.prompts))
    for comparison in asyncio.run(compare_all(flags.model, expected)):
        print(report(comparison))


if __name__ == "__main__":
    main()
