"""Values that cannot work are refused before anything is installed, in words that name them."""

from __future__ import annotations

import pytest

from tests.chart.rendering import CHART, SMALL, refusal, render, run_helm

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
    "imagePullSecrets[0].named=a": "'/imagePullSecrets/0': missing property 'name'",
    "network.podCIDRs={somewhere}": "'/network/podCIDRs/0': 'somewhere' does not match pattern",
    "gateway.service.grpc.port=9": "'port'",
    "gateway.extraEnv[0].name=A,gateway.extraEnv[0].value=1": "'/gateway/extraEnv/0/value': got number, want string",
    "gateway.extraEnv[1].nam=A": "additional properties 'nam' not allowed",
    "gateway.extraVolumeMounts[0].path=/a": "additional properties 'path' not allowed",
    "gateway.podLabels.tier=two words": "'/gateway/podLabels/tier': 'two words' does not match pattern",
    "gateway.tolerations[0].kee=a": "'/gateway/tolerations/0': additional properties 'kee' not allowed",
    "gateway.affinity.nodeAfinity.a=b": "'/gateway/affinity': additional properties 'nodeAfinity' not allowed",
    "gateway.topologySpreadConstraints[0].maxSkew=1": (
        "'/gateway/topologySpreadConstraints/0': missing properties 'topologyKey', 'whenUnsatisfiable'"
    ),
    "podSecurityContext.runAsUser=root": "'/podSecurityContext/runAsUser': got string, want null or integer",
    "containerSecurityContext.runAsRoot=true": "'/containerSecurityContext': additional properties 'runAsRoot'",
    "networkPolicy.extraEgress[0].port=3": "'/networkPolicy/extraEgress/0': additional properties 'port' not allowed",
    "networkPolicy.gatewayFrom[0].selector.a=b": "'/networkPolicy/gatewayFrom/0': additional properties 'selector'",
    "gateway.extraVolumes[0].emptydir.a=b": "'/gateway/extraVolumes/0': additional properties 'emptydir' not allowed",
    "gateway.resources.limits.memory=4GB": "'/gateway/resources/limits/memory': '4GB' does not match pattern",
    "gateway.gatewayApi.http.parentRefs[0].kind=A": "'/gateway/gatewayApi/http/parentRefs/0': missing property 'name'",
    "gateway.ingress.hosts[0].host=http://a.b": "'/gateway/ingress/hosts/0/host': 'http://a.b' does not match pattern",
    "network.listenAddress=localhost": "'/network/listenAddress': 'localhost' does not match pattern",
    "executorDefaults.config.drain_timeout_s=null": "'/executorDefaults/config': missing property 'drain_timeout_s'",
    "gateway.autoscaling=null": "'/gateway': missing property 'autoscaling'",
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


def test_an_empty_list_of_buckets_is_refused_by_the_schema():
    words = refusal(SMALL.replace("{name: cpu}", "{name: cpu, config: {num_seqs_buckets: []}}"))
    assert "'/pools/0/executors/0/config/num_seqs_buckets': minItems: got 0, want 1" in words


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
        "config.num_batched_tokens_buckets has 128; allowed on the device neuron: multiples of block_size, which is "
        "16, in [512, 4096]"
    ),
    "device=neuron,config.decode_context_length_buckets={1024,16384},config.max_model_len=8192": (
        "config.decode_context_length_buckets has 16384; allowed: at most max_model_len, which is 8192"
    ),
    "device=neuron,config.max_model_len=256": (
        "config.max_model_len is 256, which becomes a prefill bucket; allowed on the device neuron: multiples of "
        "block_size, which is 16, in [512, 4096]"
    ),
    "device=neuron,config.max_num_batched_tokens=8192,config.max_model_len=16384": (
        "config.max_num_batched_tokens is 8192, which becomes a prefill bucket; allowed on the device neuron"
    ),
    "device=neuron,config.block_size=24": "config.block_size is 24; allowed on the device neuron: what divides 512",
    "config.kv_memory_min_bytes=1000000000": (
        "config.kv_memory_min_bytes is 1000000000, which nothing goes by; allowed: with kv_memory_fraction"
    ),
    "config.num_blocks=1": (
        "config.num_blocks is 1; allowed: at least 2, for one request of 2 tokens, of which no model has fewer here"
    ),
    "device=simulated,config.simulated_vocab_size=64,config.simulated_eos_token_ids={64}": (
        "config.simulated_eos_token_ids is 64; allowed: at least 0 and below simulated_vocab_size, which is 64"
    ),
    "device=neuron,tensorParallelSize=3,neuron.count=2": (
        "tensorParallelSize is 3; allowed: at most neuron.count, which is 2, for each process has a core"
    ),
    "device=simulated,tensorParallelSize=2": "tensorParallelSize is 2; allowed on the device simulated: 1",
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
        parts = parts.replace(",tensor", "\ntensor").replace(",num", "\nnum").replace(",neuron", "\nneuron")
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
    scheduler: {config: {heartbeat_interval_s: 9, max_model_len: 4096, max_step_timeout_s: 9}}
    executors:
      - {name: one, config: {max_model_len: 2048, max_step_timeout_s: 8}}
      - {name: one, device: simulated}
"""


def test_names_that_stand_twice_and_pools_that_disagree_are_refused():
    words = refusal(SMALL + TWICE)
    for sentence in (
        "pools[small] stands twice; allowed: each name once",
        "pools[small].executors[one] stands twice; allowed: each name once",
        'pools[small].servedModelNames has "alias", which another pool or name has too; allowed: each once',
        "pools[small].scheduler.config.lease_timeout_s is 5; allowed: more than heartbeat_interval_s, which is 9",
        "pools[small].scheduler.config.max_step_timeout_s is 9; allowed: at least min_step_timeout_s, which is 10",
        "pools[small].executors[one].config.max_step_timeout_s is 8; allowed: at least min_step_timeout_s, which is 10",
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
        (["metrics.port=50059"], "metrics.port is 50059, which is the port of health; allowed: one of its own"),
        (["network.listenAddress=127.0.0.1"], "network.listenAddress is 127.0.0.1, where only the pod itself"),
        (["network.listenAddress=::1"], "network.listenAddress is ::1, where only the pod itself"),
        (["nameOverride=My_Name"], "make names that start with hb-My_Name; allowed"),
        (
            [f"{GROUP}.autoscaling.type=hpa", "pools[0].servedModelNames={org/model}"],
            'the first of servedModelNames, "org/model", is no label value',
        ),
        (
            ["executorDefaults.autoscaling.type=hpa", "pools[0].executors[1].name=more"],
            "pools[small].executors cpu and more all have autoscaling; allowed: one group of a pool",
        ),
        (
            [f"{GROUP}.name=scheduler"],
            "pools[small].executors[scheduler] makes the name hb-holdback-small-scheduler, which the scheduler of "
            "pools[small] makes too",
        ),
        (["pools[0].model.imagePath=/m"], "pools[small].model has imagePath and persistentVolumeClaim"),
        (["pools[0].tokenizer.imagePath=/m", "pools[0].tokenizer.configMap=m"], "has configMap and imagePath"),
    ],
)
def test_choices_that_exclude_each_other_are_refused(sets, sentence):
    assert sentence in refusal(SMALL, sets=sets)


def test_pools_and_groups_whose_names_join_to_one_are_refused():
    second = "\n  - {name: small-a, servedModelNames: [b], model: {imagePath: /m}, executors: [{name: cpu}]}\n"
    words = refusal(SMALL + second, sets=[f"{GROUP}.name=a-cpu"])
    assert (
        "pools[small-a].executors[cpu] makes the name hb-holdback-small-a-cpu, which pools[small].executors[a-cpu] "
        "makes too; allowed: names that differ when they are joined"
    ) in words


NULLS = ("gateway.config", "gateway.service", "gateway.config.drain_timeout_s", "poolDefaults.scheduler", "metrics")


@pytest.mark.parametrize("name", NULLS)
def test_a_null_that_takes_a_default_away_is_refused_by_name(name):
    parent, _, key = name.rpartition(".")
    where = f"'/{parent.replace('.', '/')}'" if parent else "''"
    assert f"at {where}: missing property '{key}'" in refusal(SMALL, sets=[f"{name}=null"])


EXTRAS = """
gateway:
  extraEnv: [{name: HOME, value: /a}, {name: A, value: "1"}, {name: A, value: "2"}, {name: HOLDBACK_GATEWAY__PORT}]
  extraVolumes: [{name: tokenizer-small, emptyDir: {}}, {name: mine, emptyDir: {}}, {name: mine, emptyDir: {}}]
  extraVolumeMounts: [{name: mine, mountPath: /tmp/}, {name: other, mountPath: /a}, {name: mine, mountPath: /a}]
executorDefaults:
  extraEnv: [{name: HOLDBACK_EXECUTOR__ADVERTISE_ADDRESS, value: "10.0.0.1"}, {name: B, value: "", valueFrom: {}}]
  extraVolumes: [{name: cache, emptyDir: {}}]
  extraVolumeMounts: [{name: cache, mountPath: /var/cache/holdback}]
poolDefaults:
  scheduler: {extraVolumes: [{name: tls, emptyDir: {}}]}
"""


def test_extras_that_collide_with_the_chart_s_or_each_other_are_refused():
    words = refusal(SMALL + EXTRAS)
    for sentence in (
        "gateway.extraEnv has HOME, which the chart or another entry sets; allowed: each name once",
        "gateway.extraEnv has A, which the chart or another entry sets",
        "gateway.extraEnv has HOLDBACK_GATEWAY__PORT, a setting of the process; allowed: in config",
        "gateway.extraVolumes has tokenizer-small, which the chart or another entry has",
        "gateway.extraVolumes has mine, which the chart or another entry has",
        "gateway.extraVolumeMounts has /tmp, which the chart or another entry mounts",
        "gateway.extraVolumeMounts has /a, which the chart or another entry mounts",
        "gateway.extraVolumeMounts has other, which is no volume; allowed: a name of extraVolumes",
        "pools[small].executors[cpu].extraEnv has HOLDBACK_EXECUTOR__ADVERTISE_ADDRESS, a setting of the process",
        "pools[small].executors[cpu].extraEnv has B with value and valueFrom; allowed: one of them",
        "pools[small].executors[cpu].extraVolumes has cache",
        "pools[small].executors[cpu].extraVolumeMounts has /var/cache/holdback",
        "pools[small].scheduler.extraVolumes has tls",
    ):
        assert sentence in words


def test_a_release_whose_name_no_service_can_have_is_refused():
    done = run_helm("template", "1st.one", str(CHART), values=SMALL)
    assert done.returncode
    assert "make names that start with 1st.one-holdback; allowed" in done.stderr
    own = run_helm("template", "1st.one", str(CHART), "--set=fullnameOverride=first", values=SMALL)
    assert own.returncode == 0, own.stderr


OWN_NAMES = """
commonLabels: {holdback/pool: a, team: b}
commonAnnotations: {helm.sh/hook: test}
gateway:
  podLabels: {app.kubernetes.io/name: a}
  podAnnotations: {checksum/config: a, note: b}
executorDefaults:
  podLabels: {holdback/group: a}
metrics:
  alerts: {labels: {helm.sh/chart: a}}
"""


def test_labels_and_annotations_that_the_chart_sets_are_refused_in_its_words():
    words = refusal(SMALL + OWN_NAMES)
    for sentence in (
        "commonLabels has holdback/pool, which the chart sets itself; allowed: every other name",
        "commonAnnotations has helm.sh/hook, which the chart sets itself",
        "gateway.podLabels has app.kubernetes.io/name, which the chart sets itself",
        "gateway.podAnnotations has checksum/config, which the chart sets itself",
        "pools[small].executors[cpu].podLabels has holdback/group, which the chart sets itself",
        "metrics.alerts.labels has helm.sh/chart, which the chart sets itself",
    ):
        assert sentence in words
    assert "team" not in words
    assert "note" not in words


REQUESTS = """
gateway:
  resources: {requests: {cpu: 1001m, memory: 1Gi}, limits: {cpu: "1", memory: 1000M}}
poolDefaults:
  scheduler:
    resources: {requests: {cpu: 1, memory: 1048576Ki, ephemeral-storage: 1e3}, limits: {cpu: 1000m, memory: 1Gi}}
executorDefaults:
  device: neuron
  resources: {requests: {aws.amazon.com/neuroncore: 2, memory: 2Ti}, limits: {memory: 1Pi}}
"""


def test_requests_above_their_limits_are_refused_and_the_same_in_other_units_is_not():
    two = "[{name: cpu}, {name: two, neuron: {count: 2}, resources: {requests: {aws.amazon.com/neuroncore: 1}}}]"
    words = refusal(SMALL.replace("[{name: cpu}]", two) + REQUESTS)
    above = [line for line in words.split(" - ") if ".resources.requests." in line]
    assert [line.split("; ")[0] for line in above] == [
        "gateway.resources.requests.cpu is 1001m",
        "gateway.resources.requests.memory is 1Gi",
        "pools[small].executors[cpu].resources.requests.aws.amazon.com/neuroncore is 2",
        "pools[small].executors[two].resources.requests.aws.amazon.com/neuroncore is 1",
    ]
    assert above[0].endswith("allowed: at most limits.cpu, which is 1")
