"""vLLM's engine loop with a device of a set latency, as a peer: `python vllm_engine.py`.

The job (protocol.py) `{"job": "idle", "step_ms", "streams", "async", "changes", "seconds"}` runs `EngineCore.step_fn`,
the loop that vLLM runs, for a while and answers `{"idle", "num_steps"}`: the share of the time for which the device
stood idle, by the sum of idle.py. The device is a thread of the same process, a step arrives when the executor is
called, nothing is serialized and no client is served: a bound below what a deployment of vLLM can reach.
"""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import protocol  # noqa: I001 - first, for it keeps standard output to itself
from vllm_scheduler import BLOCK_SIZE, NUM_PROMPT_TOKENS, TOKEN, build_config  # sets vLLM's environment

import queue
import tempfile
import threading
import time
from concurrent.futures import Future

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

STEPS_PER_CHANGE = 10
NUM_SETTLING_STEPS = 20
MAX_MODEL_LEN = 4096


def device_class():
    import torch
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.outputs import ModelRunnerOutput

    class Device(Executor):
        """Runs one step after the other, each for `latency_s`; `records` has the arrival of each."""

        latency_s = 0.0

        def _init_executor(self):
            self.records = []
            self._end = 0.0
            self._scheduled = None
            self._queue = queue.SimpleQueue()
            threading.Thread(target=self._run, daemon=True).start()

        def _run(self):
            while (item := self._queue.get()) is not None:
                end, future, output = item
                time.sleep(max(0.0, end - time.perf_counter()))
                future.set_result(output)

        def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False):
            spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32)
            answers = {
                "get_kv_cache_spec": {"layer": spec},
                "get_supported_kv_cache_layouts": ["LBHNC"],
                "determine_available_memory": 2**30,
            }
            return [answers.get(method)]

        def compile_or_warm_up_model(self):
            """There is no model."""

        def check_health(self):
            """A thread does not fall ill."""

        def execute_model(self, scheduled, non_block=False):
            self._scheduled = scheduled
            future = Future()
            is_empty = not scheduled.total_num_scheduled_tokens
            future.set_result(ModelRunnerOutput(req_ids=[], req_id_to_index={}) if is_empty else None)
            return future if non_block else future.result()

        def sample_tokens(self, grammar_output, non_block=False):
            arrival = time.perf_counter()
            self.records.append(arrival)
            self._end = max(self._end, arrival) + self.latency_s
            req_ids = list(self._scheduled.num_scheduled_tokens)
            index = {req_id: i for i, req_id in enumerate(req_ids)}
            output = ModelRunnerOutput(
                req_ids=req_ids, req_id_to_index=index, sampled_token_ids=[[TOKEN] for _ in req_ids]
            )
            future = Future()
            self._queue.put((self._end, future, output))
            return future if non_block else future.result()

        def shutdown(self):
            self._queue.put(None)

        @classmethod
        def supports_async_scheduling(cls):
            return True

    return Device


class Engine:
    """One engine and its load, as idle.py describes it."""

    def __init__(self, job, folder):
        from vllm.v1.engine.core import EngineCore

        config = build_config(
            folder,
            max_num_seqs=job["streams"],
            max_model_len=MAX_MODEL_LEN,
            num_blocks=1 + job["streams"] * MAX_MODEL_LEN // BLOCK_SIZE,
            is_async=job["async"],
        )
        self._core = EngineCore(config, device_class(), False)
        self.device = self._core.model_executor
        self.device.latency_s = job["step_ms"] / 1000
        self._streams, self._changes = job["streams"], job["changes"]
        self._num_added = self._num_steps = 0
        self._joins = []
        for number in range(self._streams):
            lives = NUM_SETTLING_STEPS + 2 * STEPS_PER_CHANGE * (number + 2)
            self._add(lives if self._changes else MAX_MODEL_LEN - 2 * NUM_PROMPT_TOKENS)

    def _add(self, max_tokens):
        from vllm import SamplingParams
        from vllm.v1.request import Request

        number = self._num_added
        self._num_added += 1
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        prompt = [3 + (number * 31 + i) % 31_000 for i in range(NUM_PROMPT_TOKENS + number % BLOCK_SIZE)]
        self._core.add_request(
            Request(f"request-{number}", prompt, sampling, None, block_hasher=self._core.request_block_hasher)
        )

    def step(self):
        outputs, model_executed = self._core.step_fn()
        self._core.post_step(model_executed)
        self._num_steps += model_executed
        for output in (outputs or {}).values():
            ended = sum(entry.finish_reason is not None for entry in output.outputs)
            self._joins += [self._num_steps + STEPS_PER_CHANGE] * ended
        while self._changes and self._joins and self._joins[0] <= self._num_steps:
            self._joins.pop(0)
            self._add(2 * STEPS_PER_CHANGE * self._streams - STEPS_PER_CHANGE)

    def run_until(self, end):
        while time.perf_counter() < end:
            self.step()

    def settle(self):
        while self._num_steps < NUM_SETTLING_STEPS:
            self.step()

    def stop(self):
        self._core.shutdown()


def idle_share(records, latency_s, began):
    window = [arrival for arrival in records if arrival >= began]
    idle, end = 0.0, window[0]
    for arrival in window:
        idle += max(0.0, arrival - end)
        end = max(end, arrival) + latency_s
    return idle / (window[-1] - window[0]), len(window)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="vllm-engine-") as folder:

        def answer(job):
            engine = Engine(job, pathlib.Path(folder))
            engine.settle()
            began = time.perf_counter()
            engine.run_until(began + job["seconds"])
            engine.stop()
            share, num_steps = idle_share(engine.device.records, engine.device.latency_s, began)
            return {"idle": share, "num_steps": num_steps}

        import vllm.v1.engine.core  # noqa: F401 - the import takes seconds; it is over before `ready`

        protocol.serve_jobs(answer)


if __name__ == "__main__":
    main()
