"""vLLM's `Scheduler` and `AsyncScheduler` as a peer, with no model and no device: `python vllm_scheduler.py`.

Jobs (protocol.py), each answered when it is done:

- `{"job": "build", "name", "running", "waiting", "async", "refused", "num_steps"}` makes a scheduler in which `running`
  requests decode and `waiting` wait for a slot, with blocks for `num_steps` steps; `refused` adds a head that has a
  slot and never enough blocks.
- `{"job": "step", "name", "num_steps"}` runs so many steps; `us` is the processor time that `schedule()` and
  `update_from_output()` took together in each, microseconds.
- `{"job": "drop", "name"}` forgets a scheduler.

The set-up is that of vLLM's own scheduler tests, prefix caching on, without statistics for its log.
"""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import json
import tempfile
import time
from collections import deque

import protocol

BLOCK_SIZE = 16
NUM_PROMPT_TOKENS = 64  # and up to a block more, so that requests do not all need a block in the same step
TOKEN = 1000
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 32000,
    "max_position_embeddings": 1_048_576,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


class Bench:
    """One scheduler in a steady decode."""

    def __init__(self, job, folder):
        self.num_running = job["running"]
        self.is_async = job["async"]
        self.scheduler, self._hasher = build_scheduler(job, folder)
        self._in_flight = deque()
        for number in range(job["running"]):
            self._add(f"running-{number}", NUM_PROMPT_TOKENS + number % BLOCK_SIZE, job["num_steps"] + 64)
        while len(self.scheduler.running) < job["running"] or any(
            request.num_computed_tokens < request.num_prompt_tokens for request in self.scheduler.running
        ):
            self.step()
        for number in range(job["waiting"]):
            self._add(f"waiting-{number}", NUM_PROMPT_TOKENS, 16)
        if job["refused"]:
            self._add("refused", self.scheduler.kv_cache_config.num_blocks * BLOCK_SIZE, 16)
        for _ in range(4):
            self.step()
        assert len(self.scheduler.running) == job["running"]

    def _add(self, request_id, num_prompt_tokens, max_tokens):
        from vllm import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        number = len(self.scheduler.requests)
        prompt = [3 + (number * 31 + i) % 31_000 for i in range(num_prompt_tokens)]
        self.scheduler.add_request(Request(request_id, prompt, sampling, None, block_hasher=self._hasher))

    def step(self):
        """One step at full depth; microseconds of `schedule` and `update_from_output`."""
        began = time.thread_time()
        scheduled = self.scheduler.schedule()
        took = time.thread_time() - began
        self._in_flight.append(scheduled)
        if len(self._in_flight) > self.is_async:
            oldest = self._in_flight.popleft()
            output = self.runner_output(oldest)
            began = time.thread_time()
            self.scheduler.update_from_output(oldest, output)
            took += time.thread_time() - began
        return took * 1e6

    def runner_output(self, scheduled):
        from vllm.v1.outputs import ModelRunnerOutput

        req_ids = list(scheduled.num_scheduled_tokens)
        requests = self.scheduler.requests
        tokens = [[TOKEN] if requests[i].num_computed_tokens >= requests[i].num_prompt_tokens else [] for i in req_ids]
        index = {req_id: i for i, req_id in enumerate(req_ids)}
        return ModelRunnerOutput(req_ids=req_ids, req_id_to_index=index, sampled_token_ids=tokens)


def build_config(folder, *, max_num_seqs, max_model_len, num_blocks, is_async):
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig

    (folder / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    model_config = ModelConfig(
        model=str(folder), dtype="float32", skip_tokenizer_init=True, max_model_len=max_model_len, seed=0
    )
    scheduler_config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
        max_model_len=max_model_len,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=is_async,
    )
    cache_config = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    cache_config.num_gpu_blocks = num_blocks
    config = VllmConfig(
        model_config=model_config,
        scheduler_config=scheduler_config,
        cache_config=cache_config,
        device_config=DeviceConfig("cpu"),
    )
    config.scheduler_config.async_scheduling = is_async  # the platform has switched it off, for the model runner's sake
    return config


def build_scheduler(job, folder):
    import torch
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    num_blocks = 1 + job["running"] * -(-(NUM_PROMPT_TOKENS + BLOCK_SIZE + job["num_steps"] + 64) // BLOCK_SIZE)
    config = build_config(
        folder,
        max_num_seqs=job["running"] + job["refused"],
        max_model_len=(num_blocks + 2) * BLOCK_SIZE,
        num_blocks=num_blocks,
        is_async=job["async"],
    )
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32)
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    scheduler = (AsyncScheduler if job["async"] else Scheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
    )
    return scheduler, get_request_block_hasher(BLOCK_SIZE, hash_function)


def main() -> None:
    folder = tempfile.TemporaryDirectory(prefix="vllm-scheduler-")
    path = pathlib.Path(folder.name)
    benches = {}

    def answer(job):
        kind, name = job["job"], job.get("name")
        if kind == "build":
            benches[name] = Bench(job, path)
            return {}
        if kind == "step":
            return {"us": [benches[name].step() for _ in range(job["num_steps"])]}
        del benches[name]
        return {}

    import vllm.v1.core.sched.async_scheduler  # noqa: F401 - the import takes seconds; it is over before `ready`

    protocol.serve_jobs(answer)


if __name__ == "__main__":
    main()
