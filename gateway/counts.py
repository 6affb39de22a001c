"""What a gateway counts as it happens, in plain numbers; `metrics` shows them to Prometheus.

A request here is one choice, which is what a scheduler calls a request. Its times are those of this gateway's loop, so
they hold whatever happened behind it: executors that moved it, schedulers that it was submitted to again.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from holdback.distribution import Distribution
from holdback.types import FinishReason

TIME_TO_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
REQUEST_TOKENS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
"""vLLM's bounds, for the times to the digit; it cuts those of tokens at the model's length."""

_OF_REQUEST = partial(Distribution, REQUEST_S)
_OF_TOKENS = partial(Distribution, REQUEST_TOKENS)


@dataclass(slots=True)
class PoolCounts:
    """Of one pool since the start of the process.

    Attributes:
        num_prompt_tokens: of requests that have an output; those that a client resumes were counted before.
        num_cached_tokens: of these, from cached blocks.
        num_generation_tokens: outputs, those that a client resumed with left out.
        num_ended: choices, by how they ended.
        time_to_first_token_s: from the arrival of the request.
        between_tokens_s: between two arrivals of tokens.
        per_token_s: mean of one request, without its first token; this and what follows leave out what did not end
            with `stop` or `length`.
        whole_s: from the arrival of the request to its end.
        queue_s: until it was first bound to an executor.
        prefill_s: from then to the first token.
        decode_s: from the first token to the last.
        inference_s: both.
        prompt_tokens: of a request.
        generation_tokens: of a request.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    num_ended: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
    time_to_first_token_s: Distribution = field(default_factory=partial(Distribution, TIME_TO_FIRST_TOKEN_S))
    between_tokens_s: Distribution = field(default_factory=partial(Distribution, BETWEEN_TOKENS_S))
    per_token_s: Distribution = field(default_factory=partial(Distribution, BETWEEN_TOKENS_S))
    whole_s: Distribution = field(default_factory=_OF_REQUEST)
    queue_s: Distribution = field(default_factory=_OF_REQUEST)
    prefill_s: Distribution = field(default_factory=_OF_REQUEST)
    decode_s: Distribution = field(default_factory=_OF_REQUEST)
    inference_s: Distribution = field(default_factory=_OF_REQUEST)
    prompt_tokens: Distribution = field(default_factory=_OF_TOKENS)
    generation_tokens: Distribution = field(default_factory=_OF_TOKENS)

    def end(self, reason: FinishReason, times: RequestTimes, num_prompt: int, num_outputs: int) -> None:
        """A choice is over. To be told once of each.

        Args:
            reason: why.
            times: of it.
            num_prompt: tokens of its prompt.
            num_outputs: tokens that it produced here.
        """
        self.num_ended[reason] += 1
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        self.prompt_tokens.observe(num_prompt)
        self.generation_tokens.observe(num_outputs)
        if times.ended_at is not None:
            self.whole_s.observe(times.ended_at - times.arrived_at)
        if times.started_at is None or times.first_token_at is None or times.last_token_at is None:
            return
        decode_s = times.last_token_at - times.first_token_at
        self.queue_s.observe(times.queued_s)
        self.prefill_s.observe(times.first_token_at - times.started_at)
        self.decode_s.observe(decode_s)
        self.inference_s.observe(times.last_token_at - times.started_at)
        if num_outputs > 1:
            self.per_token_s.observe(decode_s / (num_outputs - 1))


@dataclass(slots=True)
class RequestTimes:
    """When what happened to one choice, in seconds of `clock`; None for what has not.

    Attributes:
        counts: of its pool, told of each token's time at once.
        clock: of the gateway's loop.
        arrived_at: the request.
        started_at: it was first bound to an executor.
        queued_s: how long it had waited then, by the scheduler's clock.
        first_token_at: arrived here.
        last_token_at: the same.
        ended_at: the scheduler or the gateway ended it.
    """

    counts: PoolCounts
    clock: Callable[[], float]
    arrived_at: float
    started_at: float | None = None
    queued_s: float = 0.0
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended_at: float | None = None

    def start(self, queued_s: float) -> None:
        """It was bound; the first time counts."""
        if self.started_at is None:
            self.started_at, self.queued_s = self.clock(), queued_s

    def add_tokens(self) -> None:
        """New tokens are here, one or several at once."""
        now = self.clock()
        if self.last_token_at is None:
            self.first_token_at = now
            self.counts.time_to_first_token_s.observe(now - self.arrived_at)
        else:
            self.counts.between_tokens_s.observe(now - self.last_token_at)
        self.last_token_at = now

    def end(self) -> None:
        self.ended_at = self.clock()


class HttpCounts:
    """Of the HTTP API. What a client can choose freely is in none of them.

    Attributes:
        num_requests: that have ended, by route, method and status.
        num_streams: answers that are being streamed.
    """

    OTHER = "other"
    METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

    def __init__(self) -> None:
        self.num_requests = Counter[tuple[str, str, str]]()
        self.num_streams = 0

    def count_request(self, route: str | None, method: str, status: int) -> None:
        """`route`: the pattern that matched; None for a path that is none of ours."""
        shown = method if method in self.METHODS else self.OTHER
        self.num_requests[route or self.OTHER, shown, str(status)] += 1

    @contextlib.contextmanager
    def streaming(self) -> Iterator[None]:
        """An answer is being streamed."""
        self.num_streams += 1
        try:
            yield
        finally:
            self.num_streams -= 1
