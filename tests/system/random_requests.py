"""Sends a gateway random valid and invalid requests, and says what came back.

    python tests/system/random_requests.py MODEL [--requests 10000]

Half go to the OpenAI HTTP API, made by schemathesis from the gateway's own OpenAPI document; half to every RPC of
`InferenceService`, made field by field. MODEL is a directory with a tokenizer; the device is simulated. A 5xx status,
UNKNOWN or INTERNAL is a fault, and so is memory that goes on growing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import pathlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import grpc
import hypothesis
import schemathesis
from schemathesis.generation import GenerationMode

from holdback.cli.local import LocalStack
from holdback.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.gateway.random_messages import messages

TIMEOUT_S = 60.0
FAULTS = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
SMALL_SHARE = 10
WARM_UP_SHARE = 0.2
"""Of the requests: what a process takes once, it has taken by then."""


@dataclass
class Report:
    """What came back.

    Attributes:
        statuses: HTTP statuses and gRPC codes, counted.
        faults: what must not come back, in words.
        memory_mb: resident memory of the gateway after the warm-up and at the end.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)


def send_http(base_url: str, num_requests: int, report: Report) -> None:
    """Valid and invalid requests to every operation of the document, in turn."""
    schema = schemathesis.openapi.from_url(f"{base_url}/openapi.json")
    operations: list[Any] = [result.ok() for result in schema.get_all_operations()]  # type: ignore[union-attr]
    num_with_body = sum(bool(operation.body) for operation in operations)
    for operation, mode in itertools.product(operations, GenerationMode):
        # Without a body there is little to vary.
        share = num_requests // (num_with_body * len(GenerationMode)) if operation.body else SMALL_SHARE
        with contextlib.suppress(hypothesis.errors.Unsatisfiable):  # nothing in it can be wrong
            send = partial(_send_case, report, base_url)
            _try_many(send, operation.as_strategy(generation_mode=mode), share)


def _send_case(report: Report, base_url: str, case: Any) -> None:
    response = case.call(base_url=base_url, timeout=TIMEOUT_S)
    report.statuses[str(response.status_code)] += 1
    if response.status_code >= 500:
        report.faults.append(f"{response.status_code} {case.as_curl_command()[:2000]}")


def send_grpc(address: str, num_requests: int, report: Report) -> None:
    """Messages to every RPC: those of generations are changes of one that would be served."""
    good = inference_pb2.Generation(text="x", sampling=types_pb2.SamplingParams(max_tokens=2))
    stream = inference_pb2.GenerateStreamRequest
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        kinds: list[tuple[Callable[..., Any], Any, Any]] = [
            (stub.Generate, inference_pb2.GenerateRequest, inference_pb2.GenerateRequest(generation=good)),
            (stub.GenerateStream, stream, stream(generation=good)),
            (stub.Tokenize, inference_pb2.TokenizeRequest, inference_pb2.TokenizeRequest(text="x")),
            (stub.Detokenize, inference_pb2.DetokenizeRequest, inference_pb2.DetokenizeRequest(token_ids=[5])),
            (stub.Abort, inference_pb2.AbortRequest, None),
            (stub.GetModel, inference_pb2.GetModelRequest, None),
        ]  # fmt: skip
        for call, kind, base in kinds:
            _try_many(partial(_send_message, report, call), messages(kind, base=base), num_requests // len(kinds))


def _send_message(report: Report, call: Callable[..., Any], message: Any) -> None:
    try:
        answer = call(message, timeout=TIMEOUT_S)
        if isinstance(answer, Iterator):
            list(answer)
        code = grpc.StatusCode.OK
    except grpc.RpcError as error:
        code = error.code()
        if code in FAULTS:
            report.faults.append(f"{code.name} {error.details()} {str(message)[:2000]}")
    report.statuses[code.name] += 1


def _try_many(send: Callable[[Any], None], strategy: Any, count: int) -> None:
    """Draws so many examples; equal ones are sent again only where there are no others."""
    settings = hypothesis.settings(
        max_examples=max(1, count),
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )

    def try_one(example: Any) -> None:
        send(example)

    settings(hypothesis.seed(7)(hypothesis.given(strategy)(try_one)))()


async def send_all(model: pathlib.Path, num_requests: int, executor: list[str], gateway: list[str]) -> Report:
    """Starts a pool, sends everything from a thread, and stops it."""
    arguments = {
        "scheduler": ["--log-level", "warning"],
        "executor": ["--device", "simulated", "--log-level", "warning", *executor],
        "gateway": ["--tokenizer", str(model), "--http-port", "0", "--log-level", "error", *gateway],
    }
    report = Report()
    async with LocalStack(arguments) as stack:
        await stack.wait_until_ready()
        http, rpc, pid = f"http://{stack.http_address}", stack.gateway_address, stack.gateway.child.pid
        for share in (WARM_UP_SHARE, 1 - WARM_UP_SHARE):
            await asyncio.to_thread(send_http, http, round(num_requests * share / 2), report)
            await asyncio.to_thread(send_grpc, rpc, round(num_requests * share / 2), report)
            report.memory_mb.append(_resident_mb(pid))
    return report


def _resident_mb(pid: int) -> float:
    for line in pathlib.Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1000
    raise ValueError(f"/proc/{pid}/status has no VmRSS")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path, metavar="MODEL")
    parser.add_argument("--requests", type=int, default=10_000)
    flags = parser.parse_args()
    warnings.simplefilter("ignore")
    executor = ["--model", str(flags.model), "--max-model-len", "512"]
    report = asyncio.run(send_all(flags.model, flags.requests, executor, []))
    print(*(f"{status:>20} {count}" for status, count in report.statuses.most_common()), sep="\n")
    print(f"memory of the gateway: {report.memory_mb[0]:.0f} MB after a fifth, {report.memory_mb[1]:.0f} MB at the end")
    print(*report.faults[:20], sep="\n")
    print(f"{sum(report.statuses.values())} requests, {len(report.faults)} faults")
    return 1 if report.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
