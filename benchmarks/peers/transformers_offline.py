"""transformers' `generate` as a peer, one batch: `python transformers_offline.py MODEL DTYPE`."""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import protocol


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    path, dtype = sys.argv[1:3]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))

    @torch.inference_mode()
    def generate(prompts, max_tokens):
        ids = torch.tensor(prompts)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            pad_token_id=0,
        )
        return (output.shape[1] - ids.shape[1]) * len(prompts)

    protocol.serve(generate)


if __name__ == "__main__":
    main()
