"""Rendered manifests as processes of this machine: what a kubelet would do with them, as far as loopback allows.

Commands, environment, configuration files, probes, hooks and grace periods are those of the manifests. What a cluster
gives and this machine has not (addresses, ports of their own, mounts, an image) is replaced by the pairs of
`Pod.substitutions`, which are printed, and by nothing else.

Not covered: images, what a kernel enforces (users, limits, network policies), and the autoscaler itself,
whose query and target are read from its manifest.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import pathlib
import re
import signal
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from holdback import rpc
from holdback.parent import PARENT_VARIABLE
from tests.chart.rendering import Manifest, Rendered
from tests.executor.serving import free_port

LOOPBACK = "127.0.0.1"
PROBE_PERIOD_S = 0.05
PORT_KEYS = ("port", "health_port", "metrics_port", "http_port")
SERVING = health_pb2.HealthCheckResponse.SERVING


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Returns once a condition holds, which is asked again and again."""
    while not await condition():  # noqa: ASYNC110 - what other processes do sets no event here
        await asyncio.sleep(PROBE_PERIOD_S)


class Pod:
    """One process, started and stopped as its manifest says.

    Args:
        rendered: all manifests.
        deployment: whose pod this is.
        name: of the pod.
        folder: what is this pod's alone.
        mounts: folders of this machine for paths that volumes of a cluster are mounted at.
        hosts: addresses for the names of Services, with their ports: `name.serving.svc:50052`.
    """

    def __init__(
        self,
        rendered: Rendered,
        deployment: Manifest,
        name: str,
        folder: pathlib.Path,
        mounts: dict[str, str],
        hosts: dict[str, str],
    ) -> None:
        self.name = name
        self._folder = folder
        self._rendered = rendered
        self._spec = deployment["spec"]["template"]["spec"]
        (self.container,) = self._spec["containers"]
        self.process = self.container["args"][0]
        text = self._config_text()
        self.ports = {
            int(port): free_port() for _, port in re.findall(rf"^({'|'.join(PORT_KEYS)}): (\d+)$", text, re.M)
        }
        self.substitutions = {
            "the image's entry point": f"{sys.executable} -m holdback.cli",
            "host: 0.0.0.0": f"host: {LOOPBACK}",
            **{f"port: {port}": f"port: {own}" for port, own in self.ports.items()},
            **hosts,
            **mounts,
            "/etc/holdback/config": str(folder / "config"),
            "/var/cache/holdback": str(folder / "cache"),
            "/tmp": str(folder / "tmp"),  # noqa: S108 - the path in the manifests
            "fieldPath: metadata.name": name,
            "fieldPath: status.podIP": LOOPBACK,
        }
        self._child: asyncio.subprocess.Process | None = None

    def describe(self) -> Iterator[str]:
        """The table of substitutions."""
        yield f"{self.name}:"
        for there, here in self.substitutions.items():
            yield f"  {there} -> {here}"
        yield f"  periods of probes -> {PROBE_PERIOD_S} s"
        yield f"  environment beside the manifest's: {PARENT_VARIABLE}, so that it ends with this test"

    def port(self, there: int) -> int:
        """A port of the manifest as it is here."""
        return self.ports[there]

    async def start(self) -> None:
        """Starts the process and returns once its startup probe and its liveness probe pass."""
        for part in ("config", "cache", "tmp"):
            (self._folder / part).mkdir(parents=True)
        config = self._folder / "config" / f"{self.process}.yaml"
        config.write_text(self._replace(self._config_text()), encoding="utf-8")
        with (self._folder / "log").open("wb") as log:
            self._child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "holdback.cli"),
                *(self._replace(argument) for argument in self.container["args"]),
                env=self._environment(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        await self.wait_for_probe("startupProbe")
        await self.wait_for_probe("livenessProbe")

    async def wait_for_probe(self, name: str) -> None:
        """Returns when a probe passes; fails when it has not within the tries that the manifest gives it."""
        probe = self.container[name]
        limit_s = min(probe["periodSeconds"] * probe["failureThreshold"], 60)
        try:
            async with asyncio.timeout(limit_s):
                await until(lambda: self._passes_while_running(name))
        except TimeoutError:
            raise AssertionError(f"{self.name}: {name} has not passed in {limit_s} s\n{self.log()}") from None

    async def _passes_while_running(self, name: str) -> bool:
        assert self.is_running, self.log()
        return await self.passes(name)

    async def passes(self, name: str) -> bool:
        """What one try of a probe says."""
        probe = self.container[name]
        request = health_pb2.HealthCheckRequest(service=probe["grpc"]["service"])
        async with rpc.create_channel(f"{LOOPBACK}:{self.port(probe['grpc']['port'])}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                reply = await stub.Check(request, timeout=probe["timeoutSeconds"], wait_for_ready=False)
            except grpc.aio.AioRpcError:
                return False
        return bool(reply.status == SERVING)

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.returncode is None

    async def terminate(self) -> int:
        """The end of a pod: preStop, SIGTERM, and whatever is left of the grace period. Returns the exit status."""
        await self.run_pre_stop()
        return await self.stop()

    async def run_pre_stop(self) -> None:
        """What Kubernetes does before it tells a process to stop."""
        hook = self.container.get("lifecycle", {}).get("preStop")
        if hook is not None:
            await asyncio.sleep(hook["sleep"]["seconds"])

    async def stop(self) -> int:
        """SIGTERM, and a failure if the grace period is over before the process is."""
        assert self._child is not None
        self._child.send_signal(signal.SIGTERM)
        hook = self.container.get("lifecycle", {}).get("preStop", {"sleep": {"seconds": 0}})
        limit_s = self._spec["terminationGracePeriodSeconds"] - hook["sleep"]["seconds"]
        try:
            async with asyncio.timeout(limit_s):
                return await self._child.wait()
        except TimeoutError:
            raise AssertionError(f"{self.name} would have been killed after {limit_s} s\n{self.log()}") from None

    async def kill(self) -> None:
        """Whatever state it is in, it is gone."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()
            await self._child.wait()

    def log(self) -> str:
        return (self._folder / "log").read_text(encoding="utf-8", errors="replace")[-4000:]

    def metrics(self) -> dict[str, float]:
        """Series and values as the process serves them now."""
        port = next(port["containerPort"] for port in self.container["ports"] if port["name"] == "metrics")
        with urllib.request.urlopen(f"http://{LOOPBACK}:{self.port(port)}/metrics", timeout=60) as reply:
            text = reply.read().decode()
        lines = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
        return {series: float(value) for series, _, value in lines}

    def _config_text(self) -> str:
        (name,) = [one["configMap"]["name"] for one in self._spec["volumes"] if one["name"] == "config"]
        text = self._rendered.find("ConfigMap", name)["data"][f"{self.process}.yaml"]
        assert isinstance(text, str)
        return text

    def _environment(self) -> dict[str, str]:
        environment = {"PATH": os.environ["PATH"], PARENT_VARIABLE: str(os.getpid())}
        for variable in self.container["env"]:
            field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            value = self.substitutions[f"fieldPath: {field}"] if field else self._replace(variable["value"])
            environment[variable["name"]] = value
        return environment

    def _replace(self, text: str) -> str:
        """Every left side of the table by its right side; the longest first, and what was put in stays."""
        table = {there: here for there, here in self.substitutions.items() if not there.startswith("fieldPath")}
        longest_first = sorted(table, key=len, reverse=True)
        return re.sub("|".join(map(re.escape, longest_first)) + r"(?!\d)", lambda found: table[found[0]], text)


class Cluster:
    """The pods of a rendered release. Use it as an async context manager; leaving kills what is left.

    Args:
        rendered: all manifests.
        folder: for the pods' files.
        mounts: of all pods.
        own_mounts: of the pods of each process.

    Attributes:
        pods: that run, in the order of their start.
    """

    def __init__(
        self,
        rendered: Rendered,
        folder: pathlib.Path,
        mounts: dict[str, str],
        own_mounts: Mapping[str, dict[str, str]] | None = None,
    ) -> None:
        self.rendered = rendered
        self.pods: list[Pod] = []
        self._folder = folder
        self._mounts = mounts
        self._own_mounts = own_mounts or {}
        self._hosts: dict[str, str] = {}
        self._num_started = 0

    async def __aenter__(self) -> Cluster:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(pod.kill() for pod in self.pods))

    async def add(self, deployment: str) -> Pod:
        """Starts one more pod of the Deployment whose name ends so."""
        self._num_started += 1
        manifest = self.rendered.find("Deployment", deployment)
        name = f"{manifest['metadata']['name']}-{self._num_started}"
        process = manifest["spec"]["template"]["spec"]["containers"][0]["args"][0]
        mounts = self._mounts | self._own_mounts.get(process, {})
        pod = Pod(self.rendered, manifest, name, self._folder / name, mounts, self._hosts)
        print("\n".join(pod.describe()))
        self.pods.append(pod)
        await pod.start()
        self._publish(manifest, pod)
        return pod

    async def remove(self, pod: Pod) -> int:
        self.pods.remove(pod)
        status = await pod.terminate()
        return status

    def _publish(self, manifest: Manifest, pod: Pod) -> None:
        """What its Services would resolve to."""
        labels = manifest["spec"]["template"]["metadata"]["labels"]
        for service in self.rendered.all("Service"):
            if service["spec"]["selector"].items() <= labels.items():
                for port in service["spec"]["ports"]:
                    target = next(
                        one["containerPort"] for one in pod.container["ports"] if one["name"] == port["targetPort"]
                    )
                    name = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc:{port['port']}"
                    self._hosts[name] = f"{LOOPBACK}:{pod.port(target)}"


class Autoscaler:
    """What KEDA makes of a rendered ScaledObject, without its stabilization: replicas for the values of now."""

    def __init__(self, scaled: Manifest) -> None:
        self._spec = scaled["spec"]

    def values(self, metrics: dict[str, float]) -> dict[str, float]:
        """Of each trigger's query, by its metric; a series that is missing is an error."""
        found = {}
        for trigger in self._spec["triggers"]:
            # The namespace is Prometheus' label, not the scheduler's.
            query = re.fullmatch(r'sum\(([\w:]+)\{namespace="[\w-]+",(.*)\}\)', trigger["metadata"]["query"])
            assert query is not None
            found[query[1]] = metrics[f"{query[1]}{{{query[2]}}}"]
        return found

    def wanted(self, metrics: dict[str, float]) -> int:
        """By the formula of averages: the total over the target, rounded up, within the limits."""
        targets = [float(trigger["metadata"]["threshold"]) for trigger in self._spec["triggers"]]
        wanted = max(
            math.ceil(value / target) for value, target in zip(self.values(metrics).values(), targets, strict=True)
        )
        least, most = int(self._spec["minReplicaCount"]), int(self._spec["maxReplicaCount"])
        return max(least, min(most, wanted))


class Load:
    """Streams that follow each other, a fixed number at once, and what has become of them.

    Attributes:
        num_tokens: received so far.
        num_streams: that ended as they should.
        problems: of all others.
    """

    def __init__(self, client: Any, prompts: list[list[int]], expected: list[list[int]]) -> None:
        self.num_tokens = 0
        self.num_streams = 0
        self.problems: list[str] = []
        self._client = client
        self._work = list(zip(prompts, expected, strict=True))
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run(prompt, tokens)) for prompt, tokens in self._work]

    async def has_begun(self) -> bool:
        return self.num_tokens > 0

    async def finish(self) -> None:
        """Starts no more streams and waits for those that run."""
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def measure(self, seconds: float) -> float:
        """Tokens per second that arrive in that time."""
        before, started = self.num_tokens, time.monotonic()
        await asyncio.sleep(seconds)
        return (self.num_tokens - before) / (time.monotonic() - started)

    async def _run(self, prompt: list[int], expected: list[int]) -> None:
        while not self._is_over:
            tokens: list[int] = []
            try:
                async for piece in self._client.stream(
                    token_ids=prompt, max_tokens=len(expected), temperature=0.0, ignore_eos=True
                ):
                    tokens += piece.token_ids
                    self.num_tokens += len(piece.token_ids)
            except Exception as error:  # any of them is what is looked for
                self.problems.append(repr(error))
                return
            if tokens != expected:
                self.problems.append(f"{len(tokens)} of {len(expected)} tokens, or others than expected")
                return
            self.num_streams += 1
