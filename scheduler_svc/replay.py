"""Runs a recorded trace through the scheduler, with an executor that answers by arithmetic.

A trace is a configuration and a list of events: requests that arrive, aborts, steps. Tokens follow from the id of the
request and the number of the output, so the result is a function of the trace alone and can be compared with one
recorded elsewhere. With one step in flight a step is `schedule()` and its update; with two it is `schedule()` and the
update of the step before.

Not here: time, transport, more than one executor, and every policy that is not the specification's.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from holdback.errors import ConfigError, InvalidArgumentError
from holdback.types import FinishReason, ModelRunnerOutput, RequestSpec, SamplingParams, SchedulerOutput
from scheduler_svc.core.async_scheduling import NeuronAsyncScheduler
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.neuron_scheduler import NeuronScheduler
from scheduler_svc.core.output import RequestUpdate
from scheduler_svc.core.request import Request

Json = dict[str, Any]

MAX_TRACE_BYTES = 64 << 20
DEFAULT_EOS_TOKEN_ID = 2
RANGE_VOCAB_SIZE = 32000
FIRST_SAMPLED_TOKEN_ID = 16
NUM_SAMPLED_TOKEN_IDS = 31984


def load_trace(path: str) -> Json:
    """Reads a trace file: the trace itself, or an object that has it under `trace`.

    Raises:
        InvalidArgumentError: it cannot be read, is too large, is not JSON, or lacks `config` or `events`.
    """
    try:
        file = Path(path)
        if file.stat().st_size > MAX_TRACE_BYTES:
            raise InvalidArgumentError.of("TRACE", f"{file.stat().st_size} bytes", f"at most {MAX_TRACE_BYTES}")
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgumentError.of("TRACE", path, f"a file that can be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError.of("TRACE", path, f"a JSON document ({error})") from error
    trace = document.get("trace", document) if isinstance(document, dict) else None
    if not isinstance(trace, dict) or not isinstance(trace.get("config"), dict):
        raise InvalidArgumentError.of("TRACE", path, "an object with `config` and `events`")
    if not isinstance(trace.get("events"), list):
        raise InvalidArgumentError.of("TRACE", path, "an object with `config` and `events`")
    return trace


def replay_trace(trace: Json) -> Json:
    """Runs a trace and returns the result, unpacked.

    Returns:
        `init`, `error`, `unfinished` and `steps`. A configuration that is refused gives `init` None, an `error` and no
        step.

    Raises:
        InvalidArgumentError: the trace lacks a field or has one of the wrong kind.
    """
    try:
        config = dict(trace["config"])
        is_async = bool(config.pop("async_scheduling"))
        buckets = config.pop("num_batched_tokens_buckets")
        scheduler_config = SchedulerConfig(
            num_batched_tokens_buckets=None if buckets is None else tuple(buckets), **config
        )
    except ConfigError as error:
        return {"init": None, "error": error.message, "unfinished": [], "steps": []}
    except (KeyError, TypeError) as error:
        raise InvalidArgumentError.of("config", trace.get("config"), f"the fields of a trace ({error!r})") from error
    replay = Replay(NeuronAsyncScheduler(scheduler_config) if is_async else NeuronScheduler(scheduler_config))
    init = replay.describe_start()
    for index, fields in enumerate(trace["events"]):
        try:
            event = read_event(fields, scheduler_config.max_model_len)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            limit = f"an event of a trace ({error!r})"
            raise InvalidArgumentError.of(f"events[{index}]", str(fields), limit) from error
        replay.run_event(event)
    scheduler = replay.scheduler
    unfinished = [request.req_id for request in (*scheduler.running, *scheduler.waiting)]
    return {"init": init, "error": None, "unfinished": unfinished, "steps": replay.steps}


@dataclass(frozen=True)
class Event:
    """One event of a trace: a request that arrives, or an abort, or steps.

    Attributes:
        request: that arrives.
        planned: its outputs that are fixed: number, from 1, to token.
        aborted: id of the request to abort.
        num_steps: steps to run.
    """

    request: Request | None = None
    planned: Mapping[int, int] = field(default_factory=dict)
    aborted: str | None = None
    num_steps: int = 0


def read_event(fields: Mapping[str, Any], max_model_len: int) -> Event:
    if "add" in fields:
        return _read_add(fields["add"], max_model_len)
    if "abort" in fields:
        return Event(aborted=str(fields["abort"]))
    return Event(num_steps=int(fields["step"].get("n", 1)))


def _read_add(add: Mapping[str, Any], max_model_len: int) -> Event:
    eos_token_id = int(add.get("eos_token_id", DEFAULT_EOS_TOKEN_ID))
    stop_token_ids = tuple(add.get("stop_token_ids") or ())
    sampling = SamplingParams(
        max_tokens=int(add["max_tokens"]), ignore_eos=bool(add.get("ignore_eos")), stop_token_ids=stop_token_ids
    )
    planned = {}
    if add.get("stop_at") is not None:
        planned[int(add["stop_at"])] = int(stop_token_ids[0])
    if add.get("eos_at") is not None:
        planned[int(add["eos_at"])] = eos_token_id
    # A prompt of max_model_len tokens is already refused, however long it would be.
    prompt_token_ids = tuple(islice(_prompt(add), max_model_len))
    return Event(
        Request(str(add["id"]), RequestSpec(str(add["id"]), prompt_token_ids, sampling), (eos_token_id,)), planned
    )


def _prompt(add: Mapping[str, Any]) -> Iterator[int]:
    """The prompt as ids, or as `[[start, count], ...]` of ascending ids."""
    if "prompt_token_ids" in add:
        yield from add["prompt_token_ids"]
        return
    for start, count in add["prompt_ranges"]:
        yield from (token_id % RANGE_VOCAB_SIZE for token_id in range(start, start + count))


class Replay:
    """One run of a trace.

    Attributes:
        scheduler: its `max_steps_in_flight` says how many steps run ahead of their updates.
        steps: the steps so far, as they are printed.
    """

    def __init__(self, scheduler: NeuronScheduler) -> None:
        self.scheduler = scheduler
        self.steps: list[Json] = []
        self._executor = ArithmeticExecutor()
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    def describe_start(self) -> Json:
        return {
            "num_batched_tokens_buckets": list(self.scheduler.num_batched_tokens_buckets),
            "max_kv_concurrent": self.scheduler.max_kv_concurrent,
            "num_free_blocks": self.scheduler.num_free_blocks,
        }

    def run_event(self, event: Event) -> None:
        if event.request is not None:
            self._executor.plan(event.request.req_id, event.planned)
            self.scheduler.add_request(event.request)
        if event.aborted is not None:
            self.scheduler.finish_request(event.aborted, FinishReason.ABORT)
        for _ in range(event.num_steps):
            self.steps.append(self._step())

    def _step(self) -> Json:
        scheduler = self.scheduler
        output = scheduler.schedule()
        num_free_after_schedule = scheduler.num_free_blocks
        state = scheduler.state
        self._in_flight.append((output, self._executor.run(output)))
        updates: Sequence[RequestUpdate] = []
        if len(self._in_flight) >= scheduler.max_steps_in_flight:
            updates = scheduler.update_from_output(*self._in_flight.popleft())
        cached = output.scheduled_cached_reqs
        return {
            "index": len(self.steps),
            "state": state.value,
            "scheduled_new_reqs": [
                {"id": new.req_id, "num_computed_tokens": new.num_computed_tokens, "block_ids": new.block_ids}
                for new in output.scheduled_new_reqs
            ],
            "scheduled_cached_reqs": {
                "req_ids": cached.req_ids,
                "num_computed_tokens": cached.num_computed_tokens,
                "new_block_ids": cached.new_block_ids,
            },
            "num_scheduled_tokens": output.num_scheduled_tokens,
            "num_scheduled_tokens_padded": output.num_scheduled_tokens_padded,
            "finished_req_ids": output.finished_req_ids,
            "num_free_blocks_after_schedule": num_free_after_schedule,
            "outputs": [_describe_update(update) for update in updates],
            "waiting": [request.req_id for request in scheduler.waiting],
            "running": [request.req_id for request in scheduler.running],
            "num_free_blocks": scheduler.num_free_blocks,
            "total_padding_tokens": scheduler.total_padding_tokens,
        }


class ArithmeticExecutor:
    """Samples tokens that a person can work out, knowing only what a `SchedulerOutput` says, as an executor does."""

    def __init__(self) -> None:
        self._planned: dict[str, dict[int, int]] = {}
        self._num_prefill: dict[str, int] = {}
        self._num_sampled: dict[str, int] = {}

    def plan(self, req_id: str, token_ids: Mapping[int, int]) -> None:
        """Fixes outputs of a request: number, from 1, to token."""
        self._planned[req_id] = dict(token_ids)

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for req_id in output.finished_req_ids:
            self._num_prefill.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            self._num_prefill[new.req_id] = len(new.spec.prompt_token_ids) + len(new.spec.output_token_ids)
        sampled = [
            self._sample(req_id)
            for req_id, num_computed in _num_computed(output)
            if num_computed + output.num_scheduled_tokens[req_id] >= self._num_prefill[req_id]
        ]
        return ModelRunnerOutput(output.step, sampled)

    def _sample(self, req_id: str) -> int:
        index = self._num_sampled.get(req_id, 0)
        self._num_sampled[req_id] = index + 1
        planned = self._planned[req_id].get(index + 1)
        if planned is not None:
            return planned
        return FIRST_SAMPLED_TOKEN_ID + fnv1a_32(f"{req_id}:{index}".encode()) % NUM_SAMPLED_TOKEN_IDS


def fnv1a_32(data: bytes) -> int:
    """The 32-bit FNV-1a hash."""
    value = 0x811C9DC5
    for byte in data:
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value


def _num_computed(output: SchedulerOutput) -> Iterator[tuple[str, int]]:
    """(req_id, computed before the step) in schedule order."""
    cached = output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    yield from ((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs)


def _describe_update(update: RequestUpdate) -> Json:
    return {
        "id": update.req_id,
        "new_token_ids": update.new_token_ids,
        "finish_reason": update.finish_reason and update.finish_reason.value,
        "stop_reason": update.stop_token_id,
    }
