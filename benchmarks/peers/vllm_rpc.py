"""vLLM's way of a step to its worker and back, as a peer: `python vllm_rpc.py`.

The job (protocol.py) `{"job": "rpc", "running", "async", "num_steps"}` runs a steady decode of vLLM's scheduler (see
vllm_scheduler.py) with a worker in a process of its own that only answers. Both messages go through vLLM's
`MessageQueue`, pickled into shared memory, as its multiprocess executor sends them. The answer has medians:
`bytes_down` and `bytes_up`, the pickled sizes; `rpc_us`, from handing a step to the queue until its result is out of
the other; `step_us`, that and the processor time of `schedule()` and `update_from_output()`.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import protocol  # noqa: I001 - first, for it keeps standard output to itself
from vllm_scheduler import TOKEN, Bench  # sets vLLM's environment

import multiprocessing
import pickle
import statistics
import tempfile
import time


def work(down_handle, pipe):
    """The worker: answers each step with a token a row."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.v1.outputs import ModelRunnerOutput

    down, up = MessageQueue.create_from_handle(down_handle, 0), MessageQueue(1, 1)
    pipe.send(up.export_handle())
    down.wait_until_ready()
    up.wait_until_ready()
    while (message := down.dequeue()) is not None:
        scheduled = message[1][0]
        req_ids = list(scheduled.num_scheduled_tokens)
        index = {req_id: i for i, req_id in enumerate(req_ids)}
        output = ModelRunnerOutput(req_ids=req_ids, req_id_to_index=index, sampled_token_ids=[[TOKEN]] * len(req_ids))
        up.enqueue(("SUCCESS", output))


class Worker:
    def __init__(self):
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        context = multiprocessing.get_context("spawn")
        self._down = MessageQueue(1, 1)
        pipe, other = context.Pipe()
        self._process = context.Process(target=work, args=(self._down.export_handle(), other), daemon=True)
        self._process.start()
        self._up = MessageQueue.create_from_handle(pipe.recv(), 0)
        self._down.wait_until_ready()
        self._up.wait_until_ready()

    def execute(self, message):
        self._down.enqueue(message)
        return self._up.dequeue()

    def stop(self):
        self._down.enqueue(None)
        self._process.join()


def run(job, folder, worker):
    bench = Bench(job | {"waiting": 0, "refused": 0}, folder)
    seen = {"bytes_down": [], "bytes_up": [], "rpc_us": [], "step_us": []}

    def answer(scheduled):
        message = ("execute_model", (scheduled,), {}, None)
        began = time.perf_counter()
        result = worker.execute(message)
        seen["rpc_us"].append((time.perf_counter() - began) * 1e6)
        seen["bytes_down"].append(len(pickle.dumps(message, pickle.HIGHEST_PROTOCOL)))
        seen["bytes_up"].append(len(pickle.dumps(result, pickle.HIGHEST_PROTOCOL)))
        return result[1]

    bench.runner_output = answer
    for _ in range(job["num_steps"]):
        took_us = bench.step()
        seen["step_us"].append(took_us + seen["rpc_us"][-1])
    return {name: statistics.median(values) for name, values in seen.items()}


def main() -> None:
    worker = Worker()
    with tempfile.TemporaryDirectory(prefix="vllm-rpc-") as folder:
        protocol.serve_jobs(lambda job: run(job, pathlib.Path(folder), worker))
    worker.stop()


if __name__ == "__main__":
    main()
