"""vLLM's offline engine as a peer: `python vllm_offline.py MODEL MAX_MODEL_LEN MAX_NUM_SEQS DTYPE`."""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import protocol


def main() -> None:
    from vllm import LLM, SamplingParams

    model, max_model_len, max_num_seqs, dtype = sys.argv[1:5]
    engine = LLM(
        model=model,
        dtype=dtype,
        max_model_len=int(max_model_len),
        max_num_seqs=int(max_num_seqs),
        enable_prefix_caching=False,
        disable_log_stats=True,
    )

    def generate(prompts, max_tokens):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    protocol.serve(generate)


if __name__ == "__main__":
    main()
