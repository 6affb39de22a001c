"""Calls of vLLM's engine protocol as SMG makes them, and how they fail."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from smg_grpc_proto import vllm_engine_pb2 as pb

from holdback import rpc
from tests.gateway.small_tokenizers import byte_ids, make_tokenizer

EOS = 2
PROMPT = [70, 71, 72]


def ids_of(text: str) -> list[int]:
    return byte_ids(make_tokenizer("byte_level"), text.encode())


def request(stream: bool = False, **params: Any) -> pb.GenerateRequest:
    """A request as SMG builds it: token ids, and the parameters of its own defaults."""
    defaults: dict[str, Any] = {"top_p": 1.0, "repetition_penalty": 1.0, "skip_special_tokens": True, "n": 1}
    return pb.GenerateRequest(
        request_id="smg-1",
        tokenized=pb.TokenizedInput(original_text="as sent", input_ids=PROMPT),
        sampling_params=pb.SamplingParams(**(defaults | params)),
        stream=stream,
    )


async def answers(stub: Any, message: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return await read_all(stub.Generate(message, timeout=60))


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """How a call fails; of a stream everything is read."""
    is_stream = isinstance(call, grpc.aio.UnaryStreamCall)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (read_all(call) if is_stream else call)
    return caught.value


async def read_all(call: Any) -> list[Any]:
    return [response async for response in call]


def violated_field(error: grpc.aio.AioRpcError) -> str:
    (value,) = [value for key, value in error.trailing_metadata() or () if key == rpc.STATUS_DETAILS_KEY]
    assert isinstance(value, bytes)
    bad = error_details_pb2.BadRequest()
    for detail in status_pb2.Status.FromString(value).details:
        if detail.Is(bad.DESCRIPTOR):
            detail.Unpack(bad)
    (violation,) = bad.field_violations
    return str(violation.field)
