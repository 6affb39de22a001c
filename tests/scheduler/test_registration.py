"""Executors over real streams: who is accepted, what keeps a lease, and what ends it."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from holdback import codec
from holdback.errors import (
    ErrorReason,
    FailedPreconditionError,
    HoldbackError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
)
from holdback.types import ModelRunnerOutput
from holdback.v1 import scheduler_pb2
from scheduler_svc.server import SchedulerServer
from tests.scheduler.parts import answer_of, build_info, build_spec
from tests.scheduler.stubs import StubExecutor, StubGateway

pytestmark = pytest.mark.loopback

Serve = Callable[..., Awaitable[SchedulerServer]]
PROMPT = [20, 21, 22]
QUICK = {"heartbeat_interval_s": 0.1, "lease_timeout_s": 2}


async def refusal(server: SchedulerServer, **changes: Any) -> HoldbackError:
    """How a registration with these fields of `build_info` ends."""
    build = lambda port, lease: codec.encode_executor_info(build_info(**{"port": port, "lease": lease} | changes))  # noqa: E731
    async with StubExecutor(server.port, info=build) as executor:
        error = await executor.registration_ended()
    assert error is not None
    return error


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"fingerprint": "other"}, FailedPreconditionError, "model.fingerprint is 'other'; allowed: 'model'"),
        ({"max_model_len": 32}, FailedPreconditionError, "model.max_model_len is 32; allowed: 64"),
        ({"num_blocks": 16}, FailedPreconditionError, "num_blocks is 16"),
        ({"num_blocks": 2**21}, InvalidArgumentError, "limits.num_blocks is 2097152; allowed: [0, 1048576]"),
        ({"prefill_buckets": (16, 8)}, FailedPreconditionError, "num_batched_tokens_buckets is [16, 8]"),
        ({"decode_us": 0}, FailedPreconditionError, "latency_us of the decode graph of size 4"),
        ({"lease": "too short"}, InvalidArgumentError, "lease is '9 bytes'; allowed: 16 to 64 bytes"),
        ({"port": 0}, InvalidArgumentError, "port is 0"),
        ({"executor_id": ""}, InvalidArgumentError, "executor_id is '0 bytes'"),
        ({"advertise_address": "127.0.0.1"}, FailedPreconditionError, "executor_allowed_cidrs (none)"),
    ],
)
async def test_an_executor_that_does_not_fit_is_refused_and_the_pool_serves_on(
    serve: Serve, changes: dict[str, Any], kind: type[HoldbackError], message: str
) -> None:
    server = await serve()
    async with StubExecutor(server.port) as good, StubGateway(server.port) as gateway:
        await good.joined()
        await gateway.until(lambda answers: bool(answers.pools) and answers.pools[-1].ready)
        error = await refusal(server, **changes)
        assert isinstance(error, kind)
        assert message in error.message
        await gateway.add(0, build_spec(prompt=PROMPT))
        assert (await gateway.until_ended(0))[0].tokens == answer_of(PROMPT, 3)


@pytest.mark.case("B02")
async def test_a_pool_smaller_than_a_request_is_refused_with_both_numbers_and_a_good_one_serves(serve: Serve) -> None:
    server = await serve()
    sizes: dict[str, Any] = {"block_size": 16, "max_model_len": 512, "prefill_buckets": (128,)}
    error = await refusal(server, num_blocks=17, **sizes)
    assert isinstance(error, FailedPreconditionError)
    assert error.reason is ErrorReason.CONFIG_INVALID
    assert "max_model_len is 512, which needs 32 blocks of 16 tokens, but num_blocks is 17" in error.message
    async with StubExecutor(server.port, num_blocks=33, **sizes), StubGateway(server.port) as gateway:
        await gateway.add(0, build_spec("A", [20] * 300, max_tokens=3))
        await gateway.add(1, build_spec("B", [21] * 10, max_tokens=5))
        answers = await gateway.until_ended(0, 1)
    assert answers[0].tokens == answer_of([20] * 300, 3)
    assert answers[1].tokens == answer_of([21] * 10, 5)


Edit = Callable[[scheduler_pb2.ExecutorInfo], object]


def flood(message: scheduler_pb2.ExecutorInfo) -> None:
    for _ in range(5000):
        message.latencies.append(message.latencies[0])


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda info: setattr(info.compiled, "build_ms", 2**64 - 1), "compiled.build_ms is"),
        (lambda info: setattr(info.compiled, "num_hits", 2**32 - 1), "compiled.num_hits is 4294967295"),
        (lambda info: setattr(info.model, "name", "x" * 257), "model.name is '257 bytes'; allowed: 0 to 256 bytes"),
        (lambda info: setattr(info.model, "fingerprint", "x" * 257), "model.fingerprint is '257 bytes'"),
        (lambda info: setattr(info.model, "fingerprint", ""), "model.fingerprint is '0 bytes'"),
        (lambda info: setattr(info, "device", "x" * 65), "device is '65 bytes'"),
        (lambda info: setattr(info, "kernels", "x" * 4097), "kernels is '4097 bytes'"),
        (lambda info: setattr(info, "advertise_address", "1" * 65), "advertise_address is '65 bytes'"),
        (lambda info: info.model.eos_token_ids.append(128), "model.eos_token_ids is 128; allowed: [0, 127]"),
        (lambda info: info.model.eos_token_ids.extend([3] * 256), "model.eos_token_ids is '257 entries'"),
        (
            lambda info: setattr(info.latencies[0], "latency_us", 2**32 - 1),
            "is 4294967295; allowed: at most max_step_t",
        ),
        (lambda info: setattr(info.model, "vocab_size", 2**32 - 1), "model.vocab_size is 4294967295"),
        (lambda info: info.limits.num_seqs_buckets.extend(range(5, 1030)), "limits.num_seqs_buckets is '1026 entries'"),
        (flood, "latencies is '5003 entries'; allowed: at most 4096"),
    ],
)
async def test_what_an_executor_says_of_itself_is_bounded(serve: Serve, edit: Edit, problem: str) -> None:
    server = await serve()

    def build(port: int, lease: str) -> scheduler_pb2.ExecutorInfo:
        info = codec.encode_executor_info(build_info(port=port, lease=lease))
        edit(info)
        return info

    async with StubExecutor(server.port, info=build) as executor:
        error = await executor.registration_ended()
    assert isinstance(error, InvalidArgumentError)
    assert problem in error.message


def with_latency(latency_us: int) -> Callable[[int, str], scheduler_pb2.ExecutorInfo]:
    def build(port: int, lease: str) -> scheduler_pb2.ExecutorInfo:
        info = codec.encode_executor_info(build_info(port=port, lease=lease))
        info.latencies[-1].latency_us = latency_us
        return info

    return build


async def test_a_graph_slower_than_any_step_may_be_is_refused(serve: Serve) -> None:
    server = await serve(max_step_timeout_s=20)
    async with StubExecutor(server.port, info=with_latency(20_000_001)) as executor:
        error = await executor.registration_ended()
    assert isinstance(error, InvalidArgumentError)
    assert "graph of size 4, context 64 is 20000001; allowed: at most max_step_timeout_s" in error.message
    async with StubExecutor(server.port, info=with_latency(20_000_000)) as executor:
        await executor.joined()


async def test_a_registration_names_its_executor_once(serve: Serve) -> None:
    server = await serve()
    async with StubExecutor(server.port) as executor:
        await executor.joined()
        await executor.register_again()
        error = await executor.registration_ended()
    assert isinstance(error, InvalidArgumentError)
    assert "request is 'executor'; allowed: `executor` first and only first" in error.message


async def test_the_configuration_can_pin_the_model(serve: Serve) -> None:
    server = await serve(model_fingerprint="the right one")
    error = await refusal(server)
    assert error.reason is ErrorReason.MODEL_MISMATCH
    assert "model.fingerprint is 'model'; allowed: 'the right one'" in error.message


async def test_a_lease_serves_once(serve: Serve) -> None:
    server = await serve()
    lease = "the same lease every time"
    build = lambda port, _: codec.encode_executor_info(build_info(port=port, lease=lease))  # noqa: E731
    async with StubExecutor(server.port, info=build) as executor:
        await executor.joined()
        assert executor.opened_with is not None
        assert executor.opened_with.lease == lease
    error = await refusal(server, lease=lease)
    assert error.reason is ErrorReason.LEASE_MISMATCH


async def test_another_major_version_is_refused_naming_both(serve: Serve) -> None:
    server = await serve()

    def build(port: int, lease: str) -> scheduler_pb2.ExecutorInfo:
        info = codec.encode_executor_info(build_info(port=port, lease=lease))
        info.protocol_version.major = 2
        return info

    async with StubExecutor(server.port, info=build) as executor:
        error = await executor.registration_ended()
    assert error is not None
    assert error.reason is ErrorReason.PROTOCOL_MISMATCH
    assert "2.0" in error.message
    assert "1.0" in error.message


async def test_an_advertised_address_within_the_allowed_networks_is_dialled(serve: Serve) -> None:
    server = await serve(executor_allowed_cidrs="10.0.0.0/8, 127.0.0.0/8")
    async with StubExecutor(server.port, advertise_address="127.0.0.1") as executor:
        await executor.joined()


async def test_heartbeats_keep_a_lease_and_silence_ends_it(serve: Serve) -> None:
    server = await serve(**QUICK)
    async with StubExecutor(server.port, "steady") as steady:
        async with StubExecutor(server.port, "silent", is_silent=True) as silent:
            error = await silent.registration_ended()
        assert isinstance(error, UnavailableError)
        assert "silent for 2 s" in error.message
        assert error.reason is ErrorReason.PEER_SILENT
        await steady.condition.until(lambda: steady.num_heartbeats > 22)  # longer than the lease timeout
        assert not steady.ended.done()


async def test_an_executor_that_does_not_accept_execute_never_joins(serve: Serve) -> None:
    server = await serve(**QUICK)
    async with StubExecutor(server.port, accepts=False) as executor:
        error = await executor.registration_ended()
    assert isinstance(error, InternalError)
    assert "did not accept Execute" in error.message
    assert server.pool.model is None


@pytest.mark.parametrize(
    ("tamper", "reason", "message"),
    [
        (
            lambda output: dataclasses.replace(output, step=output.step + 1),
            ErrorReason.STEP_OUT_OF_ORDER,
            "the oldest step in flight",
        ),
        (
            lambda output: dataclasses.replace(output, sampled_token_ids=[*output.sampled_token_ids, 20]),
            ErrorReason.INTERNAL,
            "2 tokens for 1 rows",
        ),
    ],
)
async def test_an_executor_that_answers_wrongly_is_asked_to_register_again_and_its_requests_go_on(
    serve: Serve, tamper: Callable[[ModelRunnerOutput], ModelRunnerOutput], reason: ErrorReason, message: str
) -> None:
    server = await serve()
    async with StubExecutor(server.port, "liar") as liar, StubGateway(server.port) as gateway:
        await liar.joined()
        liar.tamper = lambda output: tamper(output) if output.step == 3 else output
        await gateway.add(0, build_spec(prompt=PROMPT, max_tokens=9))
        error = await liar.registration_ended()
        assert isinstance(error, InternalError)  # FAILED_PRECONDITION would refuse it for good
        assert error.reason is reason
        assert message in error.message
        async with StubExecutor(server.port, "honest"):
            answers = await gateway.until_ended(0)
    assert answers[0].tokens == answer_of(PROMPT, 9)
    assert [started.executor_id for started in answers[0].started] == ["liar", "honest"]


async def test_an_executor_that_ends_execute_is_asked_to_register_again(serve: Serve) -> None:
    server = await serve()
    async with StubExecutor(server.port) as executor, StubGateway(server.port) as gateway:
        await executor.joined()
        executor.fails_with = FailedPreconditionError("step is 9", reason=ErrorReason.STEP_OUT_OF_ORDER)
        await gateway.add(0, build_spec(prompt=PROMPT))
        error = await executor.registration_ended()
    assert isinstance(error, InternalError)
    assert error.reason is ErrorReason.STEP_OUT_OF_ORDER


async def test_a_drain_ends_a_registration_plainly_once_the_step_is_done(serve: Serve) -> None:
    server = await serve(max_request_moves=0)
    async with StubExecutor(server.port, "first") as first, StubGateway(server.port) as gateway:
        await gateway.add(0, build_spec(prompt=PROMPT, max_tokens=40))
        await gateway.until(lambda answers: len(answers[0].tokens) >= 2)
        await first.drain()
        assert await first.registration_ended() is None
        async with StubExecutor(server.port, "second"):
            answers = await gateway.until_ended(0)
    assert answers[0].tokens == answer_of(PROMPT, 40)
    assert answers[0].finish_reason == "length"
