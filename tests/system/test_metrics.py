"""Every metric of every process is documented, is shown, and moves; counters agree with what clients were told."""

from __future__ import annotations

import asyncio
import pathlib
import re
from typing import Any

import httpx
import pytest
import pytest_asyncio

import executor_svc.metrics
import gateway.metrics
import scheduler_svc.metrics
from holdback import AsyncClient
from holdback.cli.local import LocalProcess, LocalStack
from holdback.errors import InvalidArgumentError
from holdback.metrics import Kind, Metric
from tests.prometheus import Scrape, scrape

pytestmark = [pytest.mark.loopback, pytest.mark.asyncio(loop_scope="module")]
PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
TABLES = {
    "Gateway": gateway.metrics.METRICS,
    "Scheduler": scheduler_svc.metrics.METRICS,
    "Executor": executor_svc.metrics.METRICS,
}
PROMPT = [7, 300, 22, 41, 5]
STILL = {
    # What a pool without accidents, and a device without weights or a compile cache, has none of.
    "holdback:requests_resubmitted_total",
    "vllm_neuron:model_load_size_bytes",
    "holdback:compile_cache_hits_total",
    "holdback:compile_cache_misses_total",
}


def documented(title: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Kind and labels by name."""
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w:]+)` \| (\w+) \| ([^|]*)\|", section, re.MULTILINE)
    return {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


@pytest.mark.parametrize("title", TABLES)
async def test_the_page_has_exactly_the_metrics_that_there_are(title):
    declared = {metric.name: (metric.kind.value, metric.labels) for metric in TABLES[title]}
    assert documented(title) == declared


async def test_a_metric_comes_from_one_kind_of_process():
    names = [metric.name for metrics in TABLES.values() for metric in metrics]
    assert len(names) == len(set(names))


async def test_what_the_chart_and_the_pages_name_is_there():
    known = {metric.name for metrics in TABLES.values() for metric in metrics}
    root = PAGE.parents[1]
    files = [path for folder in ("k8s", "docs") for path in (root / folder).rglob("*") if path.is_file()]
    for path in files:
        text = path.read_text(encoding="utf-8", errors="replace")
        for name in re.findall(r"\b(?:holdback|vllm|vllm_neuron):[a-z0-9_]+", text):
            assert {name, re.sub(r"_(bucket|sum|count)$", "", name)} & known, f"{path}: {name}"


def with_metrics(arguments: dict[str, list[str]], *, http: bool = True) -> dict[str, list[str]]:
    port, name = ["--metrics-port", "0"], ["--served-model-name", "small"]
    return {
        "scheduler": [*port, *name, "--max-decode-stall-ms", "100"],
        "executor": [*arguments["executor"], *port, *name],
        "gateway": [*arguments["gateway"], *port, *(["--http-port", "0"] if http else [])],
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def metered(stack_arguments):
    async with LocalStack(with_metrics(stack_arguments), num_executors=2) as running:
        await running.wait_until_ready()
        for process in executors_of(running):
            await process.wait_for_ports()
        yield running


def executors_of(stack: LocalStack) -> list[LocalProcess]:
    """Those that run."""
    return [process for process in stack.processes if "executor" in process.name and not process.exited.done()]


async def read(process: LocalProcess) -> Scrape:
    assert process.metrics_port is not None
    return await asyncio.to_thread(scrape, process.metrics_port)


async def read_all(stack: LocalStack) -> dict[str, list[Scrape]]:
    kinds = {"Gateway": [stack.gateway], "Scheduler": [stack.scheduler], "Executor": executors_of(stack)[:1]}
    return {title: [await read(process) for process in processes] for title, processes in kinds.items()}


def values(metric: Metric, scrapes: list[Scrape]) -> list[float]:
    """Of all series; those of a histogram are its counts."""
    name = f"{metric.name}_count" if metric.kind is Kind.HISTOGRAM else metric.name
    return [value for shown in scrapes for value in shown.matching(name, {})]


async def drive(stack: LocalStack, seen: list[dict[str, list[Scrape]]]) -> int:
    """Requests of every kind, looked at while they run, and an executor that dies meanwhile. Returns their outputs."""
    doomed, num_tokens = executors_of(stack)[-1], 22 * 100 + 150 + 2 + 2
    async with (
        AsyncClient(stack.gateway_address, timeout_s=60) as client,
        httpx.AsyncClient(base_url=f"http://{stack.http_address}", timeout=60, trust_env=False) as http,
    ):
        prompts = [[20 + number, *range(30, 30 + 15 * number)] for number in range(11)]
        options: Any = {"ignore_eos": True, "temperature": 0.0}
        running: list[asyncio.Task[Any]] = [
            asyncio.create_task(client.generate(token_ids=prompt, max_tokens=100, **options))
            for prompt in [*prompts, *prompts]
        ]
        body = {"prompt": PROMPT, "max_tokens": 150, "stream": True} | options
        running.append(asyncio.create_task(http.post("/v1/completions", json=body)))
        while not all(task.done() for task in running):
            seen.append(await read_all(stack))
            lanes = seen[-1]["Scheduler"][0].matching("holdback:lane_requests_running", {})
            if len(lanes) == 2 and all(lanes) and not doomed.exited.done():
                doomed.child.kill()
                await doomed.exited
        *_, streamed = await asyncio.gather(*running)
        assert streamed.text.endswith("data: [DONE]\n\n"), streamed.text
        for hit in (0, 48):
            again = await client.generate(token_ids=[19] * 64, max_tokens=2, **options)
            assert again.usage.cached_tokens == hit
        with pytest.raises(InvalidArgumentError):
            await client.generate(token_ids=[])
    return num_tokens


async def test_every_metric_is_shown_and_moves_and_a_lost_executor_doubles_nothing(metered):
    seen = [await read_all(metered)]
    num_tokens = await drive(metered, seen)
    seen.append(await read_all(metered))
    for title, metrics in TABLES.items():
        for metric in metrics:
            series = [values(metric, shown[title]) for shown in seen]
            assert series[-1], f"{metric.name} is not shown"
            if metric.kind is Kind.GAUGE:
                moves = any(map(any, series))
            else:
                moves = sum(series[-1]) > sum(series[0])
            assert moves is not (metric.name in STILL), metric.name
        (shown,) = seen[-1][title]
        own = {name for name in shown.kinds if not name.startswith(("process_", "python_"))}
        assert own == {metric.name for metric in metrics}
    (gateway,), (scheduler,) = seen[-1]["Gateway"], seen[-1]["Scheduler"]
    assert gateway.of("vllm:generation_tokens_total", model_name="small") == num_tokens
    assert gateway.of("vllm:request_success_total", finished_reason="length") == 25
    assert gateway.of("vllm:request_success_total") == 25
    assert gateway.of("vllm:e2e_request_latency_seconds_count") == 25
    assert gateway.of("vllm:time_to_first_token_seconds_count") == 25
    assert gateway.of("holdback:request_errors_total", reason="PROMPT_EMPTY") == 1
    assert gateway.of("holdback:request_errors_total") == 1
    assert gateway.of("vllm:prompt_tokens_total") == scheduler.of("vllm:prefix_cache_queries_total")
    assert gateway.of("vllm:prompt_tokens_cached_total") == scheduler.of("vllm:prefix_cache_hits_total")
    assert scheduler.of("holdback:request_moves_total", cause="loss") >= 1
    assert scheduler.of("holdback:executors_left_total", cause="loss") == 1


async def test_each_choice_looks_up_its_prompt_and_the_gateway_counts_the_prompt_once(metered):
    names = {
        "Gateway": ("vllm:prompt_tokens_total", "vllm:prompt_tokens_cached_total"),
        "Scheduler": ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    }

    async def counts() -> dict[str, list[float]]:
        shown = await read_all(metered)
        return {title: [shown[title][0].of(name) for name in names[title]] for title in names}

    before = await counts()
    async with AsyncClient(metered.gateway_address, timeout_s=60) as client:
        answer = await client.generate(token_ids=[18] * 64, n=3, max_tokens=2, ignore_eos=True)
    after = await counts()
    grown = {title: [b - a for a, b in zip(before[title], after[title], strict=True)] for title in names}
    assert answer.usage.cached_tokens == 0
    assert grown == {"Gateway": [64, 0], "Scheduler": [192, 96]}
