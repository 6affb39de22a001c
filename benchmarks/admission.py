"""Streams that run at once, and throughput, under the three rules of admission.

    python benchmarks/admission.py [--json FILE] [--quick] [--seed N] [--prefill-token-us N] [--decode-row-us N]

One lane with 4,097 blocks of 32 tokens and `max_model_len` 131,072 works off a queue that is never empty. The scheduler
is the real one, two steps in flight; the device is a latency table, so only its time counts and the result is the same
on every machine. A decode step takes 10 ms, as reading the weights does, and a prefill 50 µs for each token of its
bucket. Rows that cost time of their own (`--decode-row-us`, for each row of the bucket) make more streams worth less.

- `fixed`: prompts of 2,048 tokens and answers of 512.
- `mixed`: lognormal prompts of median 512 and sigma 1; `max_tokens` is 2,048, and the answers end, unknown to the
  scheduler, after 10 to 100 % of it, uniformly.

`streams` is the mean number of running requests over device time, `tokens/s` output tokens over device time, both from
when the lane has been full for a while until the queue is empty. `peak %` is the largest share of KV memory in use.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from report import Table, parser_of, write_json

from holdback.buckets import get_bucket_for_count
from holdback.types import ModelRunnerOutput, Phase, RequestSpec, SamplingParams, SchedulerOutput
from scheduler_svc.core.async_scheduling import NeuronAsyncScheduler
from scheduler_svc.core.config import KvAdmission, SchedulerConfig
from scheduler_svc.core.request import Request

EOS, WORD = 2, 100
MAX_MODEL_LEN = 131_072
MAX_CHUNK = 2048
MAX_ROWS = 128
DECODE_BUCKETS = tuple(range(16, MAX_ROWS + 1, 16))
LONGEST_PROMPT = 16_384


@dataclass(frozen=True)
class Device:
    """What a step takes, microseconds."""

    prefill_token_us: int
    decode_row_us: int
    decode_us: int = 10_000

    def expected_time(self, phase: Phase, size: int, context: int) -> int:
        """Of a step of that bucket."""
        if phase is Phase.PREFILL:
            return self.prefill_token_us * size
        return self.decode_us + self.decode_row_us * size

    def step_us(self, output: SchedulerOutput) -> int:
        """Of a step that was scheduled."""
        if output.phase is Phase.DECODE:
            bucket = get_bucket_for_count(len(output.num_scheduled_tokens), DECODE_BUCKETS)
            return self.expected_time(Phase.DECODE, bucket, 0)
        return sum(self.expected_time(Phase.PREFILL, size, 0) for size in output.num_scheduled_tokens_padded.values())


@dataclass(frozen=True)
class Job:
    """One request: what is submitted, and the number of outputs after which it ends by itself."""

    num_prompt: int
    max_tokens: int
    ends_after: int


def fixed(rng: random.Random) -> Job:
    return Job(2048, 512, 512)


def mixed(rng: random.Random) -> Job:
    num_prompt = min(LONGEST_PROMPT, max(1, round(rng.lognormvariate(0, 1) * 512)))
    return Job(num_prompt, 2048, round(rng.uniform(0.1, 1.0) * 2048))


WORKLOADS: dict[str, Callable[[random.Random], Job]] = {"fixed": fixed, "mixed": mixed}


@dataclass
class Totals:
    """Sums since the beginning.

    Attributes:
        time_us: device time.
        stream_us: running requests times device time.
        num_outputs: tokens.
    """

    time_us: int = 0
    stream_us: int = 0
    num_outputs: int = 0


@dataclass
class Result:
    """Of one workload under one rule."""

    workload: str
    policy: KvAdmission
    streams: float
    tokens_per_s: float
    peak_kv_usage: float
    max_stall_ms: float

    def to_json(self) -> dict[str, object]:
        return {
            "workload": self.workload,
            "kv_admission": self.policy.value,
            "streams": round(self.streams, 2),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "peak_kv_usage": round(self.peak_kv_usage, 4),
            "max_stall_ms": self.max_stall_ms,
        }


@dataclass
class Simulation:
    """One lane, its queue and its device."""

    scheduler: NeuronAsyncScheduler
    device: Device
    totals: Totals = field(default_factory=Totals)
    peak_blocks: int = 0
    ends_after: dict[str, int] = field(default_factory=dict)
    in_flight: deque[tuple[SchedulerOutput, list[Request]]] = field(default_factory=deque)

    def submit(self, number: int, job: Job) -> None:
        req_id = f"r{number}"
        first = 1_000 + number * LONGEST_PROMPT
        prompt = range(first, first + job.num_prompt)
        spec = RequestSpec(req_id, prompt, SamplingParams(max_tokens=job.max_tokens))
        self.ends_after[req_id] = job.ends_after
        self.scheduler.add_request(Request(req_id, spec, (EOS,)))

    def step(self) -> None:
        scheduler = self.scheduler
        output = scheduler.schedule()
        if output.num_scheduled_tokens:
            self.in_flight.append((output, scheduler._steps[-1].sampling_rows))
        self.peak_blocks = max(self.peak_blocks, scheduler.num_usable_blocks - scheduler.num_free_blocks)
        time_us = self.device.step_us(output)
        self.totals.time_us += time_us
        self.totals.stream_us += time_us * len(scheduler.running)
        if len(self.in_flight) >= scheduler.max_steps_in_flight or not output.num_scheduled_tokens:
            self._update()

    def _update(self) -> None:
        output, rows = self.in_flight.popleft()
        tokens = [EOS if len(row.output_token_ids) + 1 >= self.ends_after[row.req_id] else WORD for row in rows]
        update = self.scheduler.update_from_output(output, ModelRunnerOutput(output.step, tokens))
        self.totals.num_outputs += len(update)


def run(workload: str, policy: KvAdmission, device: Device, num_requests: int, seed: int) -> Result:
    config = SchedulerConfig(
        max_num_seqs=MAX_ROWS,
        max_num_batched_tokens=MAX_CHUNK,
        max_model_len=MAX_MODEL_LEN,
        block_size=32,
        num_blocks=4097,
        num_seqs_buckets=DECODE_BUCKETS,
        kv_admission=policy,
        max_decode_stall_ms=1000,
    )
    simulation = Simulation(NeuronAsyncScheduler(config, expected_time=device.expected_time), device)
    rng = random.Random(seed)
    for number in range(num_requests):
        simulation.submit(number, WORKLOADS[workload](rng))
    scheduler, totals = simulation.scheduler, simulation.totals
    while len(scheduler.waiting) > num_requests * 3 // 4:
        simulation.step()
    start = Totals(**vars(totals))
    while scheduler.waiting:
        simulation.step()
    time_us = totals.time_us - start.time_us
    return Result(
        workload,
        policy,
        (totals.stream_us - start.stream_us) / time_us,
        (totals.num_outputs - start.num_outputs) / time_us * 1e6,
        simulation.peak_blocks / scheduler.num_usable_blocks,
        scheduler.max_stall_us / 1000,
    )


def main() -> int:
    parser = parser_of(__doc__, has_peer=False)
    parser.add_argument("--seed", type=int, default=0, help="of prompts and answers")
    parser.add_argument("--prefill-token-us", type=int, default=50, help="of the bucket of a prefill")
    parser.add_argument("--decode-row-us", type=int, default=0, help="of the bucket of a decode, above its 10 ms")
    flags = parser.parse_args()
    device = Device(flags.prefill_token_us, flags.decode_row_us)
    table = Table("workload", "kv_admission", "streams", "tokens/s", "peak %", "stall ms")
    results = []
    for workload in WORKLOADS:
        for policy in KvAdmission:
            num_requests = 16 if policy is KvAdmission.MAX_MODEL_LEN else 200 if flags.quick else 1600
            result = run(workload, policy, device, num_requests, flags.seed)
            results.append(result)
            table.row(
                workload, policy.value, result.streams, result.tokens_per_s, 100 * result.peak_kv_usage,
                result.max_stall_ms,
            )  # fmt: skip
    ratios = {
        "fixed: streams, reserved / max_model_len": results[1].streams / results[0].streams,
        "mixed: streams, phased / reserved": results[5].streams / results[4].streams,
        "mixed: tokens/s, phased / reserved": results[5].tokens_per_s / results[4].tokens_per_s,
    }
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f}")
    write_json(flags.json, {"rows": [result.to_json() for result in results], "ratios": ratios})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
