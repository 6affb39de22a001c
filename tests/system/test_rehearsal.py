"""The chart on loopback: rendered commands, environment, configuration and probes serve, drain and scale.

`pytest -s` shows what was replaced, the throughput of each phase and the autoscaler's numbers.
"""

from __future__ import annotations

import asyncio
import pathlib

import pytest
import trustme

from executor_svc.devices.simulated import expected_tokens
from holdback import AsyncClient, Tls
from holdback.errors import UnavailableError
from tests.chart.rendering import Rendered, render
from tests.system.conftest import VOCAB_SIZE
from tests.system.rehearsal import LOOPBACK, Autoscaler, Cluster, Load, Pod, until

pytestmark = [pytest.mark.loopback, pytest.mark.timeout(180)]

GRPC_PORT = 50051
NUM_STREAMS = 64
NUM_SLOTS = 16
NUM_PROMPT_TOKENS = 24
NUM_OUTPUT_TOKENS = 60
DECODE_MS = 50

VALUES = f"""
tls: {{enabled: false}}
network: {{podCIDRs: [127.0.0.0/8]}}
gateway:
  replicas: 1
  preStopSeconds: 1
  config: {{drain_timeout_s: 20}}
pools:
  - name: small
    servedModelNames: [small-model]
    tokenizer: {{persistentVolumeClaim: {{claimName: tokenizers}}}}
    executors:
      - name: simulated
        device: simulated
        autoscaling:
          type: keda
          minReplicas: 1
          maxReplicas: 3
          # 48 that wait are more than three executors' worth, 16 are less.
          targetQueuedPrefillTokens: {16 * NUM_PROMPT_TOKENS}
          keda: {{serverAddress: "http://prometheus:9090"}}
        config:
          max_num_seqs: {NUM_SLOTS}
          num_seqs_buckets: [{NUM_SLOTS}]
          max_model_len: 256
          num_batched_tokens_buckets: [32, 64]
          simulated_vocab_size: {VOCAB_SIZE}
          simulated_decode_us: {DECODE_MS * 1000}
"""


@pytest.fixture(scope="module")
def rendered() -> Rendered:
    return render(VALUES)


async def start(cluster: Cluster) -> tuple[Pod, Pod, Pod]:
    """Scheduler, executor, gateway, in the order in which they find each other at once. All become ready."""
    scheduler = await cluster.add("scheduler")
    assert not await scheduler.passes("readinessProbe"), "ready before there is an executor"
    executor = await cluster.add("simulated")
    gateway = await cluster.add("gateway")
    for pod in (executor, scheduler, gateway):
        await pod.wait_for_probe("readinessProbe")
    return scheduler, executor, gateway


@pytest.mark.case("B62")
async def test_the_rendered_processes_serve_and_are_drained_by_what_was_rendered(
    rendered: Rendered, tmp_path: pathlib.Path, tokenizer_directory: pathlib.Path
) -> None:
    prompt = [7, 300, 22, 41, 5]
    async with Cluster(rendered, tmp_path, {"/tokenizers/small": str(tokenizer_directory)}) as cluster:
        scheduler, executor, gateway = await start(cluster)
        async with AsyncClient(f"{LOOPBACK}:{gateway.port(GRPC_PORT)}", timeout_s=60, max_retries=0) as client:
            answer = await client.generate(token_ids=prompt, max_tokens=3, ignore_eos=True, temperature=0.0)
            assert list(answer.token_ids) == expected_tokens(prompt, 3, VOCAB_SIZE)
            tokens = expected_tokens(prompt, 100, VOCAB_SIZE)
            load = Load(client, [prompt], [tokens])
            load.start()
            await until(load.has_begun)
            # preStop: nobody is told yet, and what still arrives is served
            await gateway.run_pre_stop()
            assert await gateway.passes("readinessProbe")
            await client.generate(token_ids=prompt, max_tokens=1, ignore_eos=True)
            # SIGTERM: no longer ready, new calls go elsewhere, the stream ends as if nothing had happened
            stopping = asyncio.create_task(gateway.stop())
            await until(lambda: fails(gateway, "readinessProbe"))
            with pytest.raises(UnavailableError):
                await client.generate(token_ids=prompt, max_tokens=1, ignore_eos=True)
            assert not load.num_streams
            await load.finish()
            assert await stopping == 0, gateway.log()
            assert (load.problems, load.num_streams) == ([], 1)
        assert await cluster.remove(executor) == 0, executor.log()
        assert await cluster.remove(scheduler) == 0, scheduler.log()


async def test_with_tls_every_process_takes_the_certificates_of_its_secret(
    tmp_path: pathlib.Path, tokenizer_directory: pathlib.Path
) -> None:
    secrets = (
        "{enabled: true, existingSecrets: {gateway: g, scheduler: s, executor: e}, requireClientCertificates: true}"
    )
    rendered = render(VALUES.replace("{enabled: false}", secrets, 1))
    authority = trustme.CA()
    executor_name = rendered.config("scheduler")["tls_server_name"]
    # Here others are called by address, which their certificates must name; executors are called by their one name.
    names = {"gateway": LOOPBACK, "scheduler": LOOPBACK, "executor": executor_name}
    folders = {process: make_secret(tmp_path / process, authority, name) for process, name in names.items()}
    mounts = {process: {"/etc/holdback/tls": str(folder)} for process, folder in folders.items()}
    async with Cluster(rendered, tmp_path / "pods", {"/tokenizers/small": str(tokenizer_directory)}, mounts) as cluster:
        _, _, gateway = await start(cluster)
        folder = folders["gateway"]
        tls = Tls(cert=folder / "tls.crt", key=folder / "tls.key", ca=folder / "ca.crt")
        address = f"{LOOPBACK}:{gateway.port(GRPC_PORT)}"
        async with AsyncClient(address, timeout_s=60, tls=tls) as client:
            answer = await client.generate(token_ids=[7, 300, 22, 41, 5], max_tokens=1, temperature=0.0)
            assert list(answer.token_ids) == [422]
        async with AsyncClient(address, timeout_s=60, tls=Tls(ca=folder / "ca.crt"), max_retries=0) as client:
            with pytest.raises(UnavailableError):
                await client.generate(token_ids=[7, 300, 22, 41, 5], max_tokens=1)


def make_secret(folder: pathlib.Path, authority: trustme.CA, name: str) -> pathlib.Path:
    """A folder as a secret of type kubernetes.io/tls is mounted."""
    folder.mkdir()
    issued = authority.issue_cert(name)
    issued.private_key_pem.write_to_path(str(folder / "tls.key"))
    (folder / "tls.crt").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    authority.cert_pem.write_to_path(str(folder / "ca.crt"))
    return folder


async def test_a_pool_grows_and_shrinks_under_load_without_losing_a_token(
    rendered: Rendered, tmp_path: pathlib.Path, tokenizer_directory: pathlib.Path
) -> None:
    prompts = [[16 + (7 * n + 3 * i) % 400 for i in range(NUM_PROMPT_TOKENS)] for n in range(NUM_STREAMS)]
    expected = [expected_tokens(prompt, NUM_OUTPUT_TOKENS, VOCAB_SIZE) for prompt in prompts]
    autoscaler = Autoscaler(rendered.find("ScaledObject"))
    async with Cluster(rendered, tmp_path, {"/tokenizers/small": str(tokenizer_directory)}) as cluster:
        scheduler, first, gateway = await start(cluster)
        idle = scheduler.metrics()
        address = f"{LOOPBACK}:{gateway.port(GRPC_PORT)}"
        # A stream that breaks is a failure here, not something that the SDK mends.
        async with AsyncClient(address, timeout_s=120, max_retries=0, max_resumes=0) as client:
            load = Load(client, prompts, expected)
            load.start()
            one, with_one = await settled(load, scheduler, 1)
            others = [await cluster.add("simulated"), await cluster.add("simulated")]
            three, with_three = await settled(load, scheduler, 3, at_least=2.4 * one)
            assert [await cluster.remove(other) for other in others] == [0, 0]
            again, with_one_again = await settled(load, scheduler, 1)
            await load.finish()
        over = scheduler.metrics()
        queued = [autoscaler.values(at)["holdback:queued_prefill_tokens"] for at in (idle, with_one, with_three)]
        queued += [autoscaler.values(at)["holdback:queued_prefill_tokens"] for at in (with_one_again, over)]
        wanted = [autoscaler.wanted(at) for at in (idle, with_one, with_three, with_one_again, over)]
        print(
            f"tokens/s with 1, 3, 1 executors: {one:.0f}, {three:.0f}, {again:.0f}; {three / one:.2f} times the first"
        )
        print(f"queued prefill tokens idle, 1, 3, 1, idle: {queued}; executors that the autoscaler wants: {wanted}")
        assert load.problems == []
        assert load.num_tokens == load.num_streams * NUM_OUTPUT_TOKENS
        assert load.num_streams >= NUM_STREAMS
        assert queued == [0, 48 * NUM_PROMPT_TOKENS, 16 * NUM_PROMPT_TOKENS, 48 * NUM_PROMPT_TOKENS, 0]
        assert (wanted[0], wanted[1], wanted[3], wanted[4]) == (1, 3, 3, 1)
        # Three times the slots. The question is whether executors add up; what a busy machine takes is not in it.
        assert three / one >= 2.4
        assert await cluster.remove(first) == 0


async def settled(
    load: Load, scheduler: Pod, num_executors: int, *, at_least: float = 0.0
) -> tuple[float, dict[str, float]]:
    """Throughput and metrics once that many executors have their slots full.

    Measured until it is `at_least` so many tokens/s, several times at the most: other programs take of it, none adds.
    """
    series = 'vllm:num_requests_running{engine="0",model_name="small-model"}'
    metrics: dict[str, float] = {}

    async def is_full() -> bool:
        metrics.update(await asyncio.to_thread(scheduler.metrics))
        return metrics[series] == NUM_SLOTS * num_executors

    async with asyncio.timeout(60):
        await until(is_full)
        for _ in range(6):
            throughput = await load.measure(4)
            if throughput >= at_least:
                break
        await until(is_full)  # no slot is between two requests
    return throughput, metrics


async def fails(pod: Pod, probe: str) -> bool:
    return not await pod.passes(probe)
