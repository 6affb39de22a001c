"""What the HTTP side of a gateway process counts. Labels are bounded: what a client can choose freely is in none."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector

TIMES_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
OTHER_ROUTE = "other"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class HttpMetrics:
    """Metrics of one server, in a registry of its own.

    Attributes:
        registry: that `/metrics` shows; others may add to it.
        running_streams: answers that are being streamed.
        prompt_tokens: of requests that were run, each prompt counted once.
        completion_tokens: that were sampled for them.
        time_to_first_token_s: from the arrival of a request to its first token.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._requests = Counter(
            "holdback_http_requests",
            "Requests that have ended, by route, method and status.",
            ("route", "method", "status"),
            registry=self.registry,
        )
        self.running_streams = Gauge(
            "holdback_http_running_streams", "Answers that are being streamed.", registry=self.registry
        )
        self.prompt_tokens = Counter(
            "holdback_http_prompt_tokens", "Prompt tokens of requests that were run.", registry=self.registry
        )
        self.completion_tokens = Counter(
            "holdback_http_completion_tokens", "Tokens that were sampled.", registry=self.registry
        )
        self.time_to_first_token_s = Histogram(
            "holdback_http_time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            buckets=TIMES_S,
            registry=self.registry,
        )

    def count_request(self, route: str | None, method: str, status: int) -> None:
        """`route`: the pattern that matched; None for a path that is none of ours."""
        shown = method if method in METHODS else "other"
        self._requests.labels(route or OTHER_ROUTE, shown, str(status)).inc()
