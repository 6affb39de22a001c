"""The gateway's metrics, read from what it counts when somebody asks; docs/metrics.md has them for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gateway.counts import HttpCounts, PoolCounts
from gateway.generations import Generations
from gateway.pool import Pool
from holdback.distribution import Distribution
from holdback.metrics import Kind, Metric, Sample

ENGINE = "0"
"""A pool is what vLLM calls an engine."""

_VLLM = ("model_name", "engine")
_POOL = ("model_name",)


def _counter(name: str, text: str) -> Metric:
    return Metric(f"vllm:{name}_total", Kind.COUNTER, text, _VLLM)


def _histogram(name: str, text: str) -> Metric:
    return Metric(f"vllm:{name}", Kind.HISTOGRAM, text, _VLLM)


PROMPT_TOKENS = _counter("prompt_tokens", "Prompt tokens of requests that have an output.")
CACHED_TOKENS = _counter("prompt_tokens_cached", "Prompt tokens that came from cached blocks.")
GENERATION_TOKENS = _counter("generation_tokens", "Output tokens.")
ENDED = Metric("vllm:request_success_total", Kind.COUNTER, "Requests that have ended.", (*_VLLM, "finished_reason"))
FIRST_TOKEN = _histogram("time_to_first_token_seconds", "From the arrival of a request to its first token.")
BETWEEN_TOKENS = _histogram("inter_token_latency_seconds", "Between two arrivals of tokens of a request.")
PER_TOKEN = _histogram("request_time_per_output_token_seconds", "Mean over the outputs of a request but the first.")
WHOLE = _histogram("e2e_request_latency_seconds", "From the arrival of a request to its end.")
QUEUE = _histogram("request_queue_time_seconds", "In the queue, until the first binding to an executor.")
PREFILL = _histogram("request_prefill_time_seconds", "From the first binding to the first token.")
DECODE = _histogram("request_decode_time_seconds", "From the first token to the last.")
INFERENCE = _histogram("request_inference_time_seconds", "From the first binding to the last token.")
REQUEST_PROMPT = _histogram("request_prompt_tokens", "Tokens of a prompt.")
REQUEST_GENERATION = _histogram("request_generation_tokens", "Output tokens of a request.")
ERRORS = Metric(
    "holdback:request_errors_total",
    Kind.COUNTER,
    "Generations that were refused or failed, by reason.",
    ("model_name", "reason"),
)
OPEN = Metric("holdback:requests_open", Kind.GAUGE, "Generations that are being answered.", _POOL)
RESUBMITTED = Metric(
    "holdback:requests_resubmitted_total",
    Kind.COUNTER,
    "Requests submitted again after the scheduler's stream was lost.",
    _POOL,
)
CONNECTED = Metric("holdback:scheduler_connected", Kind.GAUGE, "1 while the scheduler can be reached.", _POOL)
HTTP_REQUESTS = Metric(
    "holdback:http_requests_total", Kind.COUNTER, "HTTP requests that have ended.", ("route", "method", "status")
)
HTTP_STREAMS = Metric("holdback:http_running_streams", Kind.GAUGE, "HTTP answers that are being streamed.")

METRICS = (
    *(PROMPT_TOKENS, CACHED_TOKENS, GENERATION_TOKENS, ENDED, FIRST_TOKEN, BETWEEN_TOKENS, PER_TOKEN, WHOLE),
    *(QUEUE, PREFILL, DECODE, INFERENCE, REQUEST_PROMPT, REQUEST_GENERATION),
    *(ERRORS, OPEN, RESUBMITTED, CONNECTED, HTTP_REQUESTS, HTTP_STREAMS),
)


class GatewayMetrics:
    """The source of the gateway's samples. Called on the event loop."""

    def __init__(self, generations: Generations, http: HttpCounts) -> None:
        self._generations = generations
        self._http = http

    def __call__(self) -> Iterator[Sample]:
        num_open = Counter(run.pool.names[0] for run in self._generations.runs)
        for pool in self._generations.pools:
            yield from _pool(pool, num_open[pool.names[0]])
        for (model_name, reason), count in self._generations.num_errors.items():
            yield Sample(ERRORS, (model_name, reason.value), count)
        for labels, count in self._http.num_requests.items():
            yield Sample(HTTP_REQUESTS, labels, count)
        yield Sample(HTTP_STREAMS, (), self._http.num_streams)


def _pool(pool: Pool, num_open: int) -> Iterator[Sample]:
    model_name, counts = pool.names[0], pool.counts
    vllm = (model_name, ENGINE)
    yield Sample(PROMPT_TOKENS, vllm, counts.num_prompt_tokens)
    yield Sample(CACHED_TOKENS, vllm, counts.num_cached_tokens)
    yield Sample(GENERATION_TOKENS, vllm, counts.num_generation_tokens)
    for reason, count in counts.num_ended.items():
        yield Sample(ENDED, (*vllm, reason.value), count)
    for metric, distribution in _distributions(counts):
        yield Sample(metric, vllm, distribution)
    yield Sample(OPEN, (model_name,), num_open)
    yield Sample(RESUBMITTED, (model_name,), pool.engine.num_resubmitted)
    yield Sample(CONNECTED, (model_name,), pool.engine.is_connected)


def _distributions(counts: PoolCounts) -> Iterator[tuple[Metric, Distribution]]:
    yield FIRST_TOKEN, counts.time_to_first_token_s
    yield BETWEEN_TOKENS, counts.between_tokens_s
    yield PER_TOKEN, counts.per_token_s
    yield WHOLE, counts.whole_s
    yield QUEUE, counts.queue_s
    yield PREFILL, counts.prefill_s
    yield DECODE, counts.decode_s
    yield INFERENCE, counts.inference_s
    yield REQUEST_PROMPT, counts.prompt_tokens
    yield REQUEST_GENERATION, counts.generation_tokens
