"""The service's settings, and where an executor may be dialled."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from holdback.errors import ConfigError, ErrorReason, FailedPreconditionError
from scheduler_svc.config import SchedulerServiceConfig
from scheduler_svc.executors import dial_target
from tests.scheduler.parts import Simulation, build_info, build_spec, prompt_of, settle


def load(*arguments: str) -> SchedulerServiceConfig:
    return SchedulerServiceConfig.load(arguments, {})


def test_the_defaults() -> None:
    config = load()
    assert (config.heartbeat_interval_s, config.lease_timeout_s, config.executor_loss_timeout_s) == (1, 5, 30)
    assert (config.max_num_queued_reqs, config.max_num_queued_tokens) == (10_000, 10_000_000)
    assert (config.default_max_tokens, config.max_request_moves, config.gateway_stall_timeout_s) == (4096, 2, 10)
    assert config.executor_allowed_cidrs == ()
    assert (config.async_scheduling, config.scheduling_policy.value) == (True, "fcfs")
    assert (config.kv_admission.value, config.max_decode_stall_ms) == ("phased", 1000)


async def test_policies_reach_the_core_of_each_lane(simulate: Callable[..., Simulation]) -> None:
    for admission in ("max_model_len", "reserved", "phased"):
        core = simulate(kv_admission=admission, max_decode_stall_ms=50).add_lane().lane.core
        assert (core.config.kv_admission.value, core.config.max_decode_stall_ms) == (admission, 50)
    assert simulate(max_decode_stall_ms=None).add_lane().lane.core.config.max_decode_stall_ms is None


async def test_a_lane_bounds_the_stall_by_the_latencies_of_its_executor(simulate: Callable[..., Simulation]) -> None:
    simulation = simulate(max_decode_stall_ms=250, async_scheduling=False)
    lane = simulation.add_lane(is_stepped=True, prefill_us=100_000)
    for handle in range(4):
        simulation.submit(handle, build_spec(f"r{handle}", prompt_of(handle), max_tokens=9))
        await settle()
    for _ in range(5):
        await lane.step()
    phases = [step.phase.value for step in lane.sent if step.phase is not None]
    assert phases == ["prefill", "prefill", "decode", "prefill", "prefill", "decode"]  # a third one would pass 250 ms


def test_networks_are_given_as_a_list() -> None:
    config = load("--executor-allowed-cidrs", "10.0.0.0/8, fd00::/8")
    assert config.executor_allowed_cidrs == (ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("fd00::/8"))


def test_a_lease_must_outlast_a_heartbeat() -> None:
    with pytest.raises(ConfigError, match=r"lease_timeout_s is 1.0; allowed: more than heartbeat_interval_s"):
        load("--lease-timeout-s", "1", "--heartbeat-interval-s", "1")


def test_the_longest_step_timeout_is_no_shorter_than_the_shortest() -> None:
    assert load("--min-step-timeout-s", "9", "--max-step-timeout-s", "9").step_timeout_s(1e9) == 9
    with pytest.raises(ConfigError, match=r"max_step_timeout_s is 8.0; allowed: at least min_step_timeout_s"):
        load("--min-step-timeout-s", "9", "--max-step-timeout-s", "8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--executor-allowed-cidrs", "10.0.0.1/8"), r"'10.0.0.1/8' is no network; allowed: 10.0.0.0/8, without bits"),
        (("--executor-allowed-cidrs", "10.0.0.0/8,bla"), "'bla' is no network; allowed: networks such as"),
        (("--heartbeat-interval-s", "0.0001"), "heartbeat_interval_s is '0.0001'"),
        (("--lease-timeout-s", "0.0004", "--heartbeat-interval-s", "0.01"), "lease_timeout_s is '0.0004'"),
        (("--model-fingerprint", ""), "model_fingerprint is ''"),
        (("--max-num-queued-reqs", "0"), "max_num_queued_reqs is '0'"),
        (("--default-max-tokens", "0"), "default_max_tokens is '0'"),
        (("--max-request-moves", "-1"), "max_request_moves is '-1'"),
        (("--scheduling-policy", "lifo"), "scheduling_policy is 'lifo'"),
        (("--kv-admission", "all"), "kv_admission is 'all'"),
        (("--max-decode-stall-ms", "-1"), "max_decode_stall_ms is '-1'"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*arguments)


def test_an_unbounded_default_is_legal_and_its_cost_is_said() -> None:
    with capture_logs() as logs:
        load("--default-max-tokens", "null").warn()
        load().warn()
    [entry] = logs
    assert entry["log_level"] == "warning"
    assert entry["setting"] == "default_max_tokens"
    assert "fewer requests run at once" in entry["consequence"]


@pytest.mark.parametrize(
    ("peer", "target"),
    [
        ("ipv4:10.1.2.3:51000", "10.1.2.3:7000"),
        ("ipv6:%5B::1%5D:51000", "[::1]:7000"),
        ("ipv6:%5B::ffff:10.1.2.3%5D:51000", "10.1.2.3:7000"),
    ],
)
def test_an_executor_is_dialled_where_it_dials_from(peer: str, target: str) -> None:
    assert dial_target(build_info(port=7000), peer, ()) == target


def test_an_advertised_address_wins_where_it_is_allowed() -> None:
    info = build_info(port=7000, advertise_address="10.9.9.9")
    assert dial_target(info, "ipv4:127.0.0.1:1", [ipaddress.ip_network("10.0.0.0/8")]) == "10.9.9.9:7000"


@pytest.mark.parametrize("address", ["192.168.0.1", "metadata.internal", "10.0.0.1:80", "fd00::1"])
def test_any_other_advertised_address_is_refused(address: str) -> None:
    with pytest.raises(FailedPreconditionError, match="advertise_address is") as caught:
        dial_target(build_info(advertise_address=address), "ipv4:10.0.0.1:1", [ipaddress.ip_network("10.0.0.0/8")])
    assert caught.value.reason is ErrorReason.ADDRESS_NOT_ALLOWED


def test_a_peer_without_an_ip_is_refused() -> None:
    with pytest.raises(FailedPreconditionError, match="peer is 'unix:/tmp/x'"):
        dial_target(build_info(), "unix:/tmp/x", ())
