"""Every state that a tiny scheduler can get into, whatever arrives, ends or is aborted at whatever moment.

A state is expanded by everything that may happen next: the next step with nothing waiting, or with any kind of request
at the head that admission lets in; a decode step between two chunks, or none; the result of the oldest step in flight,
with or without an EOS in one of its rows; an abort of any request. States that differ only in names (of requests, of
blocks with equal content, of blocks without content), and where nobody can hit a block any more in what blocks hold
and in which order requests run, are one state: a test compares what comes after them. So the search ends although any
number of requests may come one after the other; at most `max_num_seqs` run at once.

A head that is refused changes nothing: a step with it is a step without it. So a request that waits until it is let in
is found as one that arrives then, and every moment of arrival is covered.

In each state and for each kind of request the answers of the three policies are compared, and the answer of the policy
that runs with a literal reading of the rule. In each step the scheduler must find its blocks, keep its integrity, and
schedule something if nothing is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from scheduler_svc.core.config import KvAdmission
from scheduler_svc.core.neuron_scheduler import NeuronScheduler
from scheduler_svc.core.request import Request
from tests.core.copies import clone
from tests.core.reference import max_model_len_admits, phased_admits, reserved_admits
from tests.core.tiny_worlds import Kind, Setup, World


class FlawError(AssertionError):
    """What went wrong, and what led to it."""


@dataclass
class Counts:
    """What a search has seen."""

    states: int = 0
    steps: int = 0
    questions: int = 0
    is_complete: bool = True

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.states + other.states,
            self.steps + other.steps,
            self.questions + other.questions,
            self.is_complete and other.is_complete,
        )


class Search:
    """Walks all states of a setup, depth first.

    Args:
        kinds: of requests that may arrive; all that fit if None.
        scheduler: one with a fault in it, whose answers are compared with nothing.
        max_states: stops there.
    """

    def __init__(
        self,
        setup: Setup,
        kinds: Sequence[Kind] | None = None,
        scheduler: NeuronScheduler | None = None,
        max_states: int | None = None,
    ) -> None:
        self.setup = setup
        self.kinds = setup.kinds() if kinds is None else list(kinds)
        self.max_states = max_states
        self.counts = Counts()
        self._compares = scheduler is None
        self._seen: set[int] = set()
        self._root = World(setup.build() if scheduler is None else scheduler)
        # They have prompts that nobody else has, where nothing is to be shared.
        nobody = World(self._root.scheduler, num_requests=-1)
        self._asked = {nobody.offer(kind): kind for kind in self.kinds}

    def run(self) -> Counts:
        """Raises FlawError with the first path that leads to one."""
        self._seen.add(self._key(self._root))
        path = [(self._root, self._actions(self._root), "start")]
        while path and (self.max_states is None or len(self._seen) < self.max_states):
            world, actions, _ = path[-1]
            if not actions:
                path.pop()
                continue
            action = actions.pop()
            following = clone(world, {}) if actions else world
            try:
                action.apply(following)
                self.counts.steps += 1
                key = self._key(following)
                if key not in self._seen:
                    self._seen.add(key)
                    following.scheduler.check_integrity()
                    path.append((following, self._actions(following), action.name))
            except Exception as error:
                names = [*(name for *_, name in path[1:]), action.name]
                raise FlawError(f"{self.setup}: {', '.join(names)}: {error}") from error
        self.counts.states = len(self._seen)
        self.counts.is_complete = not path
        return self.counts

    def _key(self, world: World) -> int:
        num_left = self._num_to_arrive(world)
        return hash((world.key(self.setup.is_sharing and num_left != 0), num_left))

    def _num_to_arrive(self, world: World) -> int | None:
        """None for any number."""
        return None if self.setup.max_requests is None else self.setup.max_requests - world.num_requests

    def _actions(self, world: World) -> list[Action]:
        scheduler = world.scheduler
        actions = [Action(f"abort {request.req_id}", "abort", (request.req_id,)) for request in scheduler.running]
        if world.in_flight:
            sampling_rows = enumerate(scheduler._steps[0].sampling_rows)
            eos_rows = [row for row, request in sampling_rows if request.slot is not None]
            actions.append(Action("update", "update", ()))
            actions += [Action(f"update with EOS in row {row}", "update", (row,)) for row in eos_rows]
        if len(world.in_flight) < scheduler.max_steps_in_flight:
            actions.append(Action("schedule", "schedule", ()))
            if world.may_decode_between():
                actions.append(Action("decode", "schedule", (None, True)))
        if self._num_to_arrive(world) != 0 and world.may_bind():
            actions += [Action(f"schedule {tuple(kind)}", "schedule", (kind,)) for kind in self._let_in(world)]
        return actions

    def _let_in(self, world: World) -> list[Kind]:
        """Kinds that the next step would bind. All answers must agree."""
        scheduler = world.scheduler
        scheduler._stall._stall.total_us = 0
        # Who was refused in an earlier state is asked first, while that is remembered.
        refusal = getattr(scheduler.admission, "_refusal", None)
        asked = self._different(world)
        requests = asked if refusal is None else [refusal.request, *asked]
        answers = [(request, scheduler.why_not(request) is None) for request in requests]
        self.counts.questions += len(answers)
        if self._compares:
            for request, is_let_in in answers:
                self._compare(scheduler, request, is_let_in)
        let_in = [self._asked[request] for request, is_let_in in answers[-len(asked) :] if is_let_in]
        if not scheduler.running and len(let_in) < len(asked):
            raise FlawError(f"an empty lane lets in {let_in} and nobody else")
        return let_in

    def _different(self, world: World) -> list[Request]:
        """One request of each kind; of the last that arrives only those that differ in lengths or in what they hit."""
        if self._num_to_arrive(world) != 1:
            return [*self._asked]
        found: dict[tuple[Any, ...], Request] = {}
        for request, kind in self._asked.items():
            hit = world.scheduler._hits.find(request).block_ids
            found.setdefault((kind.prompt, kind.max_tokens, *hit), request)
        return [*found.values()]

    def _compare(self, scheduler: NeuronScheduler, request: Request, is_let_in: bool) -> None:
        by_policy = {policy: rule(scheduler, request) for policy, rule in RULES.items()}
        if [*by_policy.values()] != sorted(by_policy.values()):
            raise FlawError(f"{by_policy} for {self._asked[request]}")
        if is_let_in != by_policy[self.setup.kv_admission]:
            raise FlawError(f"let in: {is_let_in}, but {by_policy} for {self._asked[request]}")


class Action(NamedTuple):
    """Something that may happen next: a method of `World`."""

    name: str
    method: str
    arguments: tuple[Any, ...]

    def apply(self, world: World) -> None:
        getattr(world, self.method)(*self.arguments)


RULES: dict[KvAdmission, Callable[[NeuronScheduler, Request], bool]] = {
    KvAdmission.MAX_MODEL_LEN: max_model_len_admits,
    KvAdmission.RESERVED: reserved_admits,
    KvAdmission.PHASED: phased_admits,
}
"""From the strictest on."""
