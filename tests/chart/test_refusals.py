"""Values that cannot work are refused before anything is installed, in words that name them."""

from __future__ import annotations

import pytest

from tests.chart.rendering import SMALL, refusal, render

GROUP = "pools[0].executors[0]"
CONFIG = f"{GROUP}.config"


def test_without_a_choice_on_tls_the_two_are_named():
    words = refusal(SMALL.replace("tls: {enabled: false}", ""))
    assert "tls.enabled is not set; allowed: true, with tls.certManager or tls.existingSecrets, or false" in words


def test_without_values_everything_that_is_missing_is_told_at_once():
    words = refusal()
    assert "tls.enabled is not set" in words
    assert "pools is empty" in words


# One wrong value each; what the schema says of it. Several are given to one run of Helm, which names them all.
SCHEMA = {
    "bogus=1": "additional properties 'bogus' not allowed",
    "gateway.replicaCount=3": "additional properties 'replicaCount' not allowed",
    f"{CONFIG}.max_num_seqz=3": "'max_num_seqz'",
    f"{CONFIG}.port=1": "'port'",
    "gateway.replicas=-1": "'/gateway/replicas': minimum: got -1, want 0",
    "gateway.config.drain_timeout_s=soon": "'/gateway/config/drain_timeout_s': got string, want number",
    "gateway.service.http.port=70000": "'/gateway/service/http/port': maximum: got 70,000, want 65,535",
    f"{GROUP}.device=gpu": "'/pools/0/executors/0/device': value must be one of 'cpu', 'neuron', 'simulated'",
    f"{GROUP}.neuron.resource=nvidia.com/gpu": "'/pools/0/executors/0/neuron/resource'",
    f"{GROUP}.autoscaling.minReplicas=0": "'/pools/0/executors/0/autoscaling/minReplicas': minimum: got 0, want 1",
    f"{GROUP}.autoscaling.type=vpa": "'/pools/0/executors/0/autoscaling/type'",
    "pools[0].name=Small_Model": "'/pools/0/name': 'Small_Model' does not match pattern",
    "pools[0].servedModelNames=small": "'/pools/0/servedModelNames': got string, want array",
    "network.podCIDRs={somewhere}": "'/network/podCIDRs/0': 'somewhere' does not match pattern",
    "tls.requireClientCertificates=perhaps": "'/tls/requireClientCertificates': got string, want boolean",
}


@pytest.fixture(scope="module")
def schema_words() -> str:
    return refusal(SMALL, sets=tuple(SCHEMA))


@pytest.mark.parametrize("assignment", SCHEMA)
def test_the_schema_refuses_a_wrong_value(assignment, schema_words):
    assert SCHEMA[assignment] in schema_words


def test_a_pool_without_executors_and_one_without_a_name_are_refused():
    words = refusal("tls: {enabled: false}\npools: [{servedModelNames: [a], executors: []}]")
    assert "missing property 'name'" in words
    assert "'/pools/0/executors': minItems: got 0, want 1" in words


def test_the_number_of_a_large_port_is_not_cut():
    render(SMALL, sets=["gateway.service.http.port=65535"])


# What compares two values: sets of one group, and the sentence.
COMPARED = {
    "autoscaling.minReplicas=9,autoscaling.maxReplicas=2": (
        "autoscaling.minReplicas is 9; allowed: at most maxReplicas, which is 2"
    ),
    "config.num_seqs_buckets={1,4,4},config.max_num_seqs=4": (
        "config.num_seqs_buckets has 4 after 4; allowed: strictly ascending"
    ),
    "config.num_seqs_buckets={1,4},config.max_num_seqs=8": (
        "config.num_seqs_buckets ends with 4; allowed: max_num_seqs, which is 8"
    ),
    "config.num_batched_tokens_buckets={128,512},config.max_num_batched_tokens=1024,config.max_model_len=2048": (
        "config.num_batched_tokens_buckets ends with 512; allowed: the smaller of max_num_batched_tokens and "
        "max_model_len, which is 1024"
    ),
    "config.max_num_batched_tokens=16": (
        "config.max_num_batched_tokens is 16; allowed: at least max_num_seqs, which is 32"
    ),
    "config.num_blocks=4,config.max_model_len=64": (
        "config.num_blocks is 4; allowed: at least 5, for one request of max_model_len, which is 64, and block 0"
    ),
    "config.num_blocks=100,config.kv_cache_bytes=1000": "config has num_blocks and kv_cache_bytes; allowed: one of",
    "config.decode_context_length_buckets={256}": (
        "config.decode_context_length_buckets is set; allowed on the device cpu: none"
    ),
    "device=neuron,config.num_batched_tokens_buckets={128}": (
        "config.num_batched_tokens_buckets has 128; allowed on the device neuron: multiples of block_size in "
        "[512, 4096]"
    ),
    "device=neuron,tensorParallelSize=2": "tensorParallelSize is 2; allowed on the device neuron: 1",
    "device=simulated,config.kv_cache_bytes=1000": (
        "config has kv_cache_bytes; allowed on the device simulated: num_blocks"
    ),
    "autoscaling.type=keda": "autoscaling.keda.serverAddress is not set",
    "maxSurge=0,maxUnavailable=0": "maxSurge and maxUnavailable are both 0; allowed: one of them",
    "terminationGracePeriodSeconds=5": (
        "terminationGracePeriodSeconds is 5; allowed: more than config.drain_timeout_s, which is 5"
    ),
    "precompile.enabled=true": "precompile.enabled is true, but compileCache has no volume",
    "config.require_cached=true": "config.require_cached is true, but compileCache has no volume",
}


@pytest.fixture(scope="module")
def compared_words() -> str:
    """One group for each, told in one run."""
    sets = []
    for number, assignments in enumerate(COMPARED):
        group = f"pools[0].executors[{number}]"
        parts = assignments.replace(",config", "\nconfig").replace(",auto", "\nauto").replace(",max", "\nmax")
        parts = parts.replace(",tensor", "\ntensor").replace(",num", "\nnum")
        sets += [f"{group}.name=g{number}", *(f"{group}.{part}" for part in parts.splitlines())]
    return refusal(SMALL, sets=tuple(sets))


@pytest.mark.parametrize("number", range(len(COMPARED)), ids=list(COMPARED))
def test_values_that_do_not_fit_each_other_are_refused_with_both(number, compared_words):
    sentence = list(COMPARED.values())[number]
    assert f"pools[small].executors[g{number}].{sentence}" in compared_words


@pytest.mark.case("B69")
def test_more_replicas_at_least_than_at_most_are_refused_for_gateways_too():
    words = refusal(SMALL, sets=["gateway.autoscaling.minReplicas=3", "gateway.autoscaling.maxReplicas=2"])
    assert "gateway.autoscaling.minReplicas is 3; allowed: at most maxReplicas, which is 2" in words


@pytest.mark.case("B62")
def test_a_grace_period_that_would_cut_the_drain_is_refused():
    words = refusal(SMALL, sets=["gateway.terminationGracePeriodSeconds=130"])
    assert (
        "gateway.terminationGracePeriodSeconds is 130; allowed: more than gateway.preStopSeconds and "
        "gateway.config.drain_timeout_s together, which are 130"
    ) in words
    own = render(SMALL, sets=["gateway.terminationGracePeriodSeconds=131"])
    assert own.pod("Deployment", "gateway")["terminationGracePeriodSeconds"] == 131


TWICE = """
  - name: small
    servedModelNames: [alias]
    scheduler: {config: {heartbeat_interval_s: 9, max_model_len: 4096}}
    executors:
      - {name: one, config: {max_model_len: 2048}}
      - {name: one, device: simulated}
"""


def test_names_that_stand_twice_and_pools_that_disagree_are_refused():
    words = refusal(SMALL + TWICE)
    for sentence in (
        "pools[small] stands twice; allowed: each name once",
        "pools[small].executors[one] stands twice; allowed: each name once",
        'pools[small].servedModelNames has "alias", which another pool or name has too; allowed: each once',
        "pools[small].scheduler.config.lease_timeout_s is 5; allowed: more than heartbeat_interval_s, which is 9",
        "pools[small] has max_model_len 2048 and 4096; allowed: one for the scheduler and all its executors",
        "pools[small].executors[one].device is cpu, but its pool has no model",
        "pools[small] has neither a tokenizer nor a model that has one",
    ):
        assert sentence in words


def test_names_that_kubernetes_cannot_have_are_refused():
    words = refusal(SMALL, sets=[f"fullnameOverride={'a' * 40}", "pools[0].name=a-model-with-a-long-name"])
    assert "characters; allowed: at most 63, by shorter names or fullnameOverride" in words


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        (["tls.enabled=true"], "neither tls.certManager.enabled nor tls.existingSecrets is set"),
        (["tls.enabled=true", "tls.existingSecrets.gateway=a"], "tls.existingSecrets has 1 of 3"),
        (["tls.enabled=true", "tls.certManager.enabled=true"], "tls.certManager.issuerRef.name is not set"),
        (["tls.certManager.enabled=true"], "tls.enabled is false, but certificates are configured"),
        (["gateway.config.vllm_engine_model=other"], 'gateway.config.vllm_engine_model is "other"; allowed: one of'),
        (["gateway.ingress.enabled=true"], "gateway.ingress.hosts is empty"),
        (
            ["gateway.gatewayApi.http.parentRefs[0].name=a", "gateway.gatewayApi.grpc.parentRefs[0].name=a"],
            "gateway.gatewayApi.http and gateway.gatewayApi.grpc have the same parentRefs and hostnames",
        ),
        (["pools[0].model.imagePath=/m"], "pools[small].model has imagePath and persistentVolumeClaim"),
        (["pools[0].tokenizer.imagePath=/m", "pools[0].tokenizer.configMap=m"], "has configMap and imagePath"),
    ],
)
def test_choices_that_exclude_each_other_are_refused(sets, sentence):
    assert sentence in refusal(SMALL, sets=sets)
