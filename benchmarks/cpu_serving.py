"""Output tokens per second on a CPU, through the whole service, beside transformers and vLLM in the same run.

    python benchmarks/cpu_serving.py MODEL [--vllm-python PATH] [--json FILE]

Each contender keeps its model loaded and is idle while another one runs; they take turns, and the table shows medians.
Prompts are random token ids, so that nothing is shared, and the prefix cache is off on all sides. A rate counts from
the first request to the last token, prefill included. transformers makes fewer tokens, and the time of the others is
added at the pace of those: what it would take for all of them.

The limit is the least time that the same machine, measured in the same run, needs to read the weights and contexts and
to multiply (`cpu_limits`); a share of it is what holdback reaches.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from cpu_limits import Costs, Machine, measure_machine
from report import Table, parser_of, write_json

from holdback import AsyncClient
from holdback.cli.local import LocalStack

PEERS = pathlib.Path(__file__).parent / "peers"
BLOCK_SIZE = 16
PREFILL_TOKENS = 1024
NAMES = ("holdback", "vllm", "transformers")
# After a run vLLM's engine keeps one core busy for a second or more: whoever comes next would have the others.
SETTLE_S = 2.5


@dataclass(frozen=True)
class Load:
    """Streams that begin at once, each with a prompt of its own and as many output tokens."""

    streams: int
    prompt_tokens: int
    max_tokens: int

    def prompts(self, rng: random.Random) -> list[list[int]]:
        return [[rng.randrange(100, 40_000) for _ in range(self.prompt_tokens)] for _ in range(self.streams)]


class Peer:
    """Another engine in a process of its own (peers/protocol.py)."""

    def __init__(self, process: asyncio.subprocess.Process, most_tokens: int | None) -> None:
        self._process = process
        self._most_tokens = most_tokens

    @classmethod
    async def start(cls, *command: str, most_tokens: int | None = None) -> Peer:
        """With `most_tokens` longer outputs are not made; their time is worked out."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=None, limit=2**24)
        peer = cls(process, most_tokens)
        await peer._answer()
        return peer

    async def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a peer ended with status {await self._process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer

    async def run(self, prompts: list[list[int]], max_tokens: int) -> float:
        """Seconds until all prompts have their tokens."""
        most = self._most_tokens
        if most is None or max_tokens <= most:
            return await self._run(prompts, max_tokens)
        first_s = await self._run(prompts, 1)
        step_s = (await self._run(prompts, most) - first_s) / (most - 1)
        return first_s + step_s * (max_tokens - 1)

    async def _run(self, prompts: list[list[int]], max_tokens: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}).encode() + b"\n")
        await self._process.stdin.drain()
        answer = await self._answer()
        assert answer["tokens"] == len(prompts) * max_tokens
        return answer["seconds"]

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


class Holdback:
    """Scheduler, executor and gateway as processes, one client stream for each prompt."""

    def __init__(self, address: str) -> None:
        self._client = AsyncClient(address)

    async def run(self, prompts: list[list[int]], max_tokens: int) -> float:
        """Seconds until all prompts have their tokens."""
        began = time.perf_counter()
        outputs = await self.generate(prompts, max_tokens)
        seconds = time.perf_counter() - began
        assert all(len(output) == max_tokens for output in outputs)
        return seconds

    async def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        return list(await asyncio.gather(*(self._one(ids, max_tokens) for ids in prompts)))

    async def _one(self, ids: list[int], max_tokens: int) -> list[int]:
        answer = await self._client.generate(token_ids=ids, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return list(answer.token_ids)

    async def stop(self) -> None:
        await self._client.close()


Contenders = dict[str, Peer | Holdback]


async def median_s(contenders: Contenders, load: Load, rounds: int, rng: random.Random) -> dict[str, float]:
    """Of each contender, turn by turn."""
    seen: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            seen[name].append(await contender.run(load.prompts(rng), load.max_tokens))
            await asyncio.sleep(SETTLE_S)
    return {name: statistics.median(times) for name, times in seen.items()}


def rates(seconds: dict[str, float], num_tokens: int) -> dict[str, float | None]:
    return {f"{name}_tok_s": num_tokens / seconds[name] if name in seconds else None for name in NAMES}


async def measure(contenders: Contenders, flags: argparse.Namespace, machine: Machine) -> dict[str, object]:
    rng = random.Random(flags.seed)
    costs = Costs.of(pathlib.Path(flags.model))
    await median_s(contenders, Load(2, 128, 8), 1, rng)  # each contender's first request may still build something
    print(f"\nOutput tokens/s, {flags.prompt_tokens} in and {flags.output_tokens} out, {flags.dtype}.\n")
    table = Table("streams", *NAMES, "holdback / vllm", "share of the limit")
    rows = []
    for streams in flags.streams:
        load = Load(streams, flags.prompt_tokens, flags.output_tokens)
        seconds = await median_s(contenders, load, flags.rounds, rng)
        row = rates(seconds, streams * load.max_tokens)
        share = costs.run_s(machine, streams, load.prompt_tokens, load.max_tokens) / seconds["holdback"]
        table.row(streams, *row.values(), ratio(row), share)
        rows.append({"streams": streams} | row | {"share_of_limit": share})
    seconds = await median_s(contenders, Load(1, PREFILL_TOKENS, 1), flags.rounds, rng)
    prefill = rates(seconds, PREFILL_TOKENS)
    share = costs.prefill_s(machine, PREFILL_TOKENS) / seconds["holdback"]
    table.row("prefill", *prefill.values(), ratio(prefill), share)
    return {"rows": rows, "prefill": prefill | {"share_of_limit": share}}


def ratio(row: dict[str, float | None]) -> float | None:
    ours, theirs = row["holdback_tok_s"], row["vllm_tok_s"]
    return ours / theirs if ours and theirs else None


async def count_differing(holdback: Holdback, flags: argparse.Namespace) -> dict[str, int]:
    """Greedy tokens of prompts alone, in eights and all at once: how many are others than alone."""
    load = Load(max(flags.streams), flags.prompt_tokens, flags.equal_tokens)
    prompts = load.prompts(random.Random(flags.seed + 1))
    counts = {"tokens": load.streams * load.max_tokens}
    alone: list[list[int]] = []
    for size in sorted({1, min(8, load.streams), load.streams}):
        outputs: list[list[int]] = []
        for first in range(0, load.streams, size):
            outputs += await holdback.generate(prompts[first : first + size], load.max_tokens)
        alone = alone or outputs
        pairs = zip(chain.from_iterable(alone), chain.from_iterable(outputs), strict=True)
        counts[f"differ_in_{size}"] = sum(one != other for one, other in pairs)
    del counts["differ_in_1"]
    return counts


def stack_arguments(flags: argparse.Namespace, kernels_directory: str) -> dict[str, Sequence[str]]:
    blocks_per_request = -(-flags.max_model_len // BLOCK_SIZE)
    executor = {
        "device": "cpu",
        "model": flags.model,
        "dtype": flags.dtype,
        "max-model-len": flags.max_model_len,
        "block-size": BLOCK_SIZE,
        "num-blocks": max(flags.streams) * blocks_per_request + 1,
        "max-num-seqs": max(flags.streams),
        "kernels-directory": kernels_directory,
        "log-level": "warning",
    }
    return {
        "scheduler": ["--no-enable-prefix-caching", "--log-level", "warning", *flags.scheduler_arguments],
        "executor": [part for key, value in executor.items() for part in (f"--{key}", str(value))],
        "gateway": ["--tokenizer", flags.model, "--served-model-name", "model", "--log-level", "warning"],
    }


async def start_peers(flags: argparse.Namespace) -> Contenders:
    peers: Contenders = {}
    if flags.vllm_python:
        limits = (str(flags.max_model_len), str(max(flags.streams)), flags.dtype)
        peers["vllm"] = await Peer.start(flags.vllm_python, str(PEERS / "vllm_offline.py"), flags.model, *limits)
    if not flags.without_transformers:
        command = (sys.executable, str(PEERS / "transformers_offline.py"), flags.model, flags.dtype)
        peers["transformers"] = await Peer.start(*command, most_tokens=flags.transformers_tokens)
    return peers


async def run(flags: argparse.Namespace, kernels_directory: str) -> dict[str, object]:
    machine = measure_machine()
    print(f"Memory is read at {machine.read_gb_s:.0f} GB/s, matrices multiplied at {machine.gemm_gflop_s:.0f} GFLOP/s.")
    began = time.perf_counter()
    async with LocalStack(stack_arguments(flags, kernels_directory)) as stack:
        await stack.wait_until_ready()
        start_s = time.perf_counter() - began
        print(f"The service was ready after {start_s:.1f} s, kernels compiled.")
        holdback = Holdback(stack.gateway_address)
        contenders = {"holdback": holdback} | await start_peers(flags)
        result = await measure(contenders, flags, machine)
        differing = await count_differing(holdback, flags)
        print(f"\nOf {differing['tokens']} greedy tokens others than alone: {differing}")
        for contender in contenders.values():
            await contender.stop()
    return result | {"machine": vars(machine), "start_s": start_s, "differing": differing}


def parse_flags() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("model", help="model directory in Hugging Face layout")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--transformers-tokens", type=int, default=24, help="output tokens that transformers makes")
    parser.add_argument("--equal-tokens", type=int, default=32, help="tokens of each prompt that are compared")
    parser.add_argument("--without-transformers", action="store_true")
    parser.add_argument("--scheduler-arguments", nargs="*", default=[], help="more arguments for the scheduler")
    parser.add_argument("--max-model-len", type=int, default=2304)
    parser.add_argument("--rounds", type=int, default=3, help="times that each contender runs each row")
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    if flags.quick:
        flags.rounds, flags.streams, flags.output_tokens, flags.equal_tokens = 1, [1, 2], 8, 4
        flags.transformers_tokens = 4
    return flags


def main() -> None:
    flags = parse_flags()
    with tempfile.TemporaryDirectory(prefix="holdback-kernels-") as kernels_directory:
        write_json(flags.json, asyncio.run(run(flags, kernels_directory)))


if __name__ == "__main__":
    main()
