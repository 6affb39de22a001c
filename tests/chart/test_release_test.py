"""What `helm test` runs: a token from each pool, with a release that may still be starting."""

from __future__ import annotations

import pytest

from holdback.cli import main
from holdback.errors import ErrorReason, UnavailableError
from holdback.testing import Answer, MockGateway
from tests.chart.rendering import EXAMPLES, SMALL, Manifest, Rendered, render

HELM_TIMEOUT_S = 300
"""Of `helm test`, where none is given."""


def jobs(rendered: Rendered) -> list[Manifest]:
    return [one for one in rendered.all("Job") if one["metadata"]["name"].endswith("-test")]


def arguments(job: Manifest) -> list[str]:
    return list(job["spec"]["template"]["spec"]["containers"][0]["args"])


def test_it_generates_a_token_with_each_pool_that_has_executors(everything, small):
    assert len(jobs(everything)) == 2
    assert all(one["metadata"]["annotations"]["helm.sh/hook"] == "test" for one in jobs(everything))
    secured = arguments(jobs(everything)[0])
    assert "--tls-ca=/etc/holdback/tls/ca.crt" in secured
    assert "--address=dns:///hb-holdback-gateway-grpc.serving.svc:50051" in secured
    plain = arguments(jobs(small)[0])
    assert plain[-1] == "Hello"
    assert not any(one.startswith("--tls") for one in plain)


def test_it_waits_for_the_release_as_long_as_the_values_say_and_is_ended_after_that(small):
    (job,) = jobs(small)
    assert {"--wait", "--timeout=240"} <= set(arguments(job))
    assert 240 < job["spec"]["activeDeadlineSeconds"] <= HELM_TIMEOUT_S
    (longer,) = jobs(render(SMALL, sets=["helmTest.timeoutSeconds=4000"]))
    assert "--timeout=4000" in arguments(longer)
    assert longer["spec"]["activeDeadlineSeconds"] > 4000
    assert job["spec"]["backoffLimit"] == 0


def test_a_pool_without_executors_is_left_out(everything):
    names = {one["metadata"]["name"] for one in jobs(everything)}
    assert names == {"hb-holdback-large-test", "hb-holdback-tiny-test"}
    one_of_two = SMALL.replace("{name: cpu}", "{name: cpu, replicas: 0}, {name: more}")
    assert len(jobs(render(one_of_two))) == 1


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_that_of_an_example_waits_as_long_as_its_executors_may_take_to_start(example):
    rendered = render(files=[example])
    probes = [
        pod["containers"][0]["startupProbe"]
        for one, pod in rendered.pods()
        if one["kind"] == "Deployment" and pod["containers"][0]["name"] == "executor"
    ]
    (job,) = jobs(rendered)
    (timeout,) = [one for one in arguments(job) if one.startswith("--timeout=")]
    assert int(timeout.removeprefix("--timeout=")) > max(
        one["periodSeconds"] * one["failureThreshold"] for one in probes
    )


@pytest.mark.loopback
def test_its_command_gets_a_token_once_somebody_serves(small, capsys, monkeypatch):
    monkeypatch.setattr("holdback.cli.generate.WAIT_S", 0.01)
    nobody = UnavailableError("no executor", reason=ErrorReason.NO_EXECUTOR)
    (job,) = jobs(small)
    with MockGateway(Answer(error=nobody), Answer("H"), model="small-model") as gateway:
        there = "dns:///hb-holdback-gateway-grpc.serving.svc:50051"
        assert main([one.replace(there, gateway.address) for one in arguments(job)]) == 0
    assert capsys.readouterr().out == "H\n"
    asked = gateway.calls[-1].request.generation
    assert asked.sampling.max_tokens == 1
    assert asked.text == "Hello", "a model that does not chat can be tested too"
