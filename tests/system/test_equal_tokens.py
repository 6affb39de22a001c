"""The real model gives the tokens that transformers gives, through all three services."""

import pytest

from tests.system.equal_tokens import compare_all, make_prompts, references, report

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]
NUM_PROMPTS = 6
NUM_OUTPUTS = 24  # past the first block of each


async def test_greedy_output_equals_transformers_alone_and_together_cold_and_warm(model_directory):
    prompts = make_prompts(model_directory / "tokenizer.json", NUM_PROMPTS)
    assert [len(prompt) for prompt in prompts] == [5, 17, 55, 182, 603, 2000]
    comparisons = await compare_all(model_directory, references(model_directory, prompts, NUM_OUTPUTS))
    for comparison in comparisons:
        print(report(comparison))
        assert comparison.wrong == []
        # A comparison that ends early everywhere would prove nothing.
        assert comparison.num_equal >= 0.75 * NUM_PROMPTS * NUM_OUTPUTS
    alone_cold, eight_cold, eight_warm, alone_warm = comparisons
    assert alone_cold.num_cached == eight_cold.num_cached == 0
    # Whole blocks, one token left to compute: 0 + 16 + 48 + 176 + 592 + 1984
    assert eight_warm.num_cached == alone_warm.num_cached == 2816
