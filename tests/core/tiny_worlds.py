"""Tiny schedulers: what one may be set up with, one state of it, and which states go on equally."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from holdback.buckets import check_kv_memory
from holdback.types import FinishReason, ModelRunnerOutput, RequestSpec, SamplingParams, SchedulerOutput
from scheduler_svc.core.async_scheduling import NeuronAsyncScheduler
from scheduler_svc.core.config import KvAdmission, SchedulerConfig
from scheduler_svc.core.neuron_scheduler import NeuronScheduler
from scheduler_svc.core.request import Request
from tests.core.builders import EOS, FIRST_OUTPUT

BLOCK_SIZE = 2
MAX_PROMPT = 5
MAX_TOKENS = 6
BOUND_US = 50

# Prompts of one kind are beginnings of one of these, or share nothing. The second goes on from what a request with one
# token of the first has answered, so it hits blocks with outputs.
STREAMS = {"shared": (100, 101, 102, 103, 104), "continued": (100, 50, 51, 52, 53)}


class Kind(NamedTuple):
    """What may arrive."""

    prompt: int
    max_tokens: int
    stream: str = "own"


class TinyConfig(SchedulerConfig):
    """A configuration that may have fewer tokens per step than requests, which K2 refuses."""

    def __post_init__(self) -> None:
        check_kv_memory(self.num_blocks, self.max_model_len, self.block_size)


@dataclass(frozen=True)
class Setup:
    """What one search varies: everything but the requests.

    Attributes:
        num_usable: blocks, of 2 tokens.
        chunk: most tokens of a prefill chunk.
        depth: steps in flight.
        may_decode_between: there is a stall bound, so a decode step may come between two chunks.
        max_num_seqs: requests that run at once.
        kv_admission: the policy.
        streams: of the prompts; without any but "own" there is no prefix cache.
        max_requests: that arrive in all; None for any number.
        model_len_share: `max_model_len` is this part of KV memory: 1, or 2 so that two of that length fit.
    """

    num_usable: int
    chunk: int = 2
    depth: int = 1
    may_decode_between: bool = False
    max_num_seqs: int = 2
    kv_admission: KvAdmission = KvAdmission.PHASED
    streams: tuple[str, ...] = ("own",)
    max_requests: int | None = None
    model_len_share: int = 1

    @property
    def max_model_len(self) -> int:
        return min(self.num_usable // self.model_len_share * BLOCK_SIZE, MAX_PROMPT + MAX_TOKENS)

    @property
    def is_sharing(self) -> bool:
        return self.streams != ("own",)

    def kinds(self) -> list[Kind]:
        """All that fit: a longer prompt is refused on arrival, and a higher `max_tokens` is cut."""
        lengths = [
            (prompt, max_tokens)
            for prompt in range(1, MAX_PROMPT + 1)
            for max_tokens in range(1, MAX_TOKENS + 1)
            if prompt + max_tokens <= self.max_model_len
        ]
        return [Kind(*length, stream) for stream in self.streams for length in lengths]

    def build(self, scheduler_class: type[NeuronScheduler] | None = None) -> NeuronScheduler:
        config = TinyConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.chunk,
            max_model_len=self.max_model_len,
            block_size=BLOCK_SIZE,
            num_blocks=self.num_usable + 1,
            num_batched_tokens_buckets=(self.chunk,),
            enable_prefix_caching=self.is_sharing,
            kv_admission=self.kv_admission,
            max_decode_stall_ms=BOUND_US / 1000 if self.may_decode_between else None,
        )
        if scheduler_class is None:
            scheduler_class = NeuronAsyncScheduler if self.depth == 2 else NeuronScheduler
        return scheduler_class(config, expected_time=lambda phase, size, context: size)


# ---- one state ----


@dataclass
class World:
    """A scheduler, what is in flight, and how many requests there were."""

    scheduler: NeuronScheduler
    in_flight: list[SchedulerOutput] = field(default_factory=list)
    num_requests: int = 0

    def offer(self, kind: Kind) -> Request:
        """A new request, in no queue yet."""
        number = self.num_requests
        own = tuple(range(1000 * (number + 2), 1000 * (number + 2) + MAX_PROMPT))
        prompt = STREAMS.get(kind.stream, own)[: kind.prompt]
        spec = RequestSpec(f"r{number}", prompt, SamplingParams(max_tokens=kind.max_tokens))
        return Request(spec.request_id, spec, (EOS,))

    def schedule(self, kind: Kind | None = None, decode_first: bool = False) -> None:
        """One step, with a request of that kind at the head, which must be let in; or with nothing waiting."""
        scheduler = self.scheduler
        # Any sum of expected times may have come together.
        scheduler._stall._stall.total_us = BOUND_US if decode_first else 0
        was_idle = not self.in_flight
        if kind is not None:
            scheduler.add_request(self.offer(kind))
            self.num_requests += 1
        output = scheduler.schedule()
        assert kind is None or output.scheduled_new_reqs, "let in and not bound"
        if output.num_scheduled_tokens:
            self.in_flight.append(output)
        assert output.num_scheduled_tokens or not (was_idle and scheduler.running), "nothing is scheduled"

    def update(self, eos_row: int | None = None) -> None:
        """The result of the oldest step in flight."""
        output = self.in_flight.pop(0)
        rows = self.scheduler._steps[0].sampling_rows
        tokens = [FIRST_OUTPUT + len(request.output_token_ids) for request in rows]
        if eos_row is not None:
            tokens[eos_row] = EOS
        self.scheduler.update_from_output(output, ModelRunnerOutput(output.step, tokens))

    def abort(self, req_id: str) -> None:
        self.scheduler.finish_request(req_id, FinishReason.ABORT)

    def may_decode_between(self) -> bool:
        """Whether a stall bound may make the next step a decode step although somebody prefills."""
        scheduler = self.scheduler
        if scheduler.config.max_decode_stall_ms is None or not scheduler.has_prefill_in_running:
            return False
        return scheduler._stall.num_prefill_steps > 0 and scheduler._can_decode(scheduler.running)

    def may_bind(self) -> bool:
        """Whether the next step may bind somebody, KV memory aside."""
        scheduler = self.scheduler
        has_room = not scheduler.at_capacity and not scheduler.has_prefill_in_running
        return has_room and len(self.in_flight) < scheduler.max_steps_in_flight

    def key(self, is_hit_possible: bool = True) -> tuple[Any, ...]:
        """Equal for states that go on equally.

        Args:
            is_hit_possible: somebody may still arrive who hits cached blocks. If not, it makes no difference what
                blocks hold, nor in which order requests run: only which blocks they share.
        """
        return self._key_by_content() if is_hit_possible else self._key_by_number()

    def _key_by_content(self) -> tuple[Any, ...]:
        scheduler, pool, cache = self.scheduler, self.scheduler.block_pool, self.scheduler.prefix_cache
        position = {request: index for index, request in enumerate(scheduler.running)}
        labels: dict[int, int] = {}
        running = tuple(
            (
                *_progress(request),
                tuple((labels.setdefault(b, len(labels)), _content(cache, b)) for b in request.block_ids),
                _future(request),
            )
            for request in scheduler.running
        )
        in_flight = tuple(
            (tuple(position.get(request) for request in record.rows), record.num_prefill_rows > 0)
            for record in scheduler._steps
        )
        free_cached = tuple(_content(cache, block_id) for block_id in pool._free_cached)
        return running, in_flight, free_cached, len(pool._free_plain), self._is_after_prefill

    def _key_by_number(self) -> tuple[Any, ...]:
        scheduler, pool, steps = self.scheduler, self.scheduler.block_pool, self.scheduler._steps
        known = [
            (*_progress(request), len(request.block_ids), tuple(request in step.rows for step in steps), number)
            for number, request in enumerate(scheduler.running)
        ]
        known.sort()
        labels: dict[int, int] = {}
        tables = tuple(
            tuple(labels.setdefault(block_id, len(labels)) for block_id in scheduler.running[number].block_ids)
            for *_, number in known
        )
        in_flight = tuple((len(step.rows), step.num_prefill_rows > 0) for step in steps)
        num_free = len(pool._free_cached) + len(pool._free_plain)
        return tuple(entry[:-1] for entry in known), tables, in_flight, num_free, self._is_after_prefill

    @property
    def _is_after_prefill(self) -> bool:
        """Whether a stall bound has a prefill step to count."""
        scheduler = self.scheduler
        return scheduler.config.max_decode_stall_ms is not None and scheduler._stall.num_prefill_steps > 0


def _progress(request: Request) -> tuple[int, int, int, int]:
    return (
        request.num_computed_tokens,
        request.num_steps_left,
        request.num_prefill_tokens if request.is_prefill else 0,
        request.num_output_placeholders,
    )


def _known_keys() -> dict[bytes, str]:
    keys: dict[bytes, str] = {}
    for name, tokens in STREAMS.items():
        request = Request("", RequestSpec("", tokens), (EOS,))
        for index in range(MAX_PROMPT // BLOCK_SIZE):
            keys.setdefault(request.block_key(index, BLOCK_SIZE), f"{name}{index}")
    return keys


KNOWN_KEYS = _known_keys()


def _content(cache: Any, block_id: int) -> str:
    """What a block offers. What no prompt can hit is all the same."""
    key = cache._keys.get(block_id)
    if key is None:
        return ""
    name = KNOWN_KEYS.get(key)
    if name is None:
        return "x"
    return name if cache.find(key) == block_id else f"{name} copy {list(cache._copies[key]).index(block_id)}"


def _future(request: Request) -> tuple[str, ...]:
    """What its blocks will offer once they are full."""
    tokens = [*request.spec.prompt_token_ids, *range(FIRST_OUTPUT, FIRST_OUTPUT + request.max_tokens)]
    if tokens[0] != STREAMS["shared"][0]:
        return ()
    whole = Request("", RequestSpec("", tuple(tokens)), (EOS,))
    num_blocks = min(MAX_PROMPT, len(tokens)) // BLOCK_SIZE
    return tuple(KNOWN_KEYS.get(whole.block_key(index, BLOCK_SIZE), "x") for index in range(num_blocks))
