"""Admission by the peak over time: the worst cases of all requests fit, at each decode step to come.

Requests that run beside each other are rarely at their largest at the same time. So what each may hold is followed over
the decode steps of the lane (`profile.py`), and a request is let in if at no step more blocks may be needed than there
are. With n computed tokens, those in flight included, and r decode steps left, a request holds
`ceil((n + min(s, r)) / block_size)` blocks after s more decode steps, up to s = r + L, then none. L is the number of
steps in flight beside the newest, as the result that frees the blocks comes so much later. A candidate has n = its
prefill tokens, and holds up to r + L + D, where D is the number of decode steps that may come between its chunks. A
block that several hold counts once, while any of them counts; a hit on a cached block that nobody holds counts as
taken. What is needed at once (s = 0) is asked by the scheduler itself (K3).

It is sound as long as five things hold. Each is how the scheduler is built; where code could break one, it is checked
here before harm is done:

- every decode step has every request that is not at its last token: `count_decode_step` compares the numbers;
- at most one decode step comes between two chunks, none between check and first chunk: `count_decode_step` counts them,
  and `bind` takes only the request that was let in by the last check, with no decode step since;
- one request prefills at a time, and none is let in meanwhile: `bind` and `why_not`;
- a request that is at its last token is gone L `schedule()`s later: `count_decode_step`;
- an abort, a stop or an error only gives blocks back earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdback.errors import InternalError
from scheduler_svc.core.admission import AdmissionPolicy, last_computed
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.hits import Hit, HitFinder
from scheduler_svc.core.profile import Curve, Overflow, Profile
from scheduler_svc.core.request import Request


class Candidate(NamedTuple):
    """A request that asks to be let in.

    Attributes:
        request: which.
        hit: what it hits.
        curve: the blocks that it may hold.
        num_decodes_between: decode steps that may come between its chunks.
    """

    request: Request
    hit: Hit
    curve: Curve
    num_decodes_between: int


class Refusal(NamedTuple):
    """Why the head was refused, and for how long that is sure.

    It stands while nobody leaves early, the hit gets no longer, and the decode step is at most `until`: the step that
    lacks blocks comes nearer, and what the head holds there gets less. Who comes meanwhile makes it lack no fewer.
    """

    request: Request
    hit: Hit
    until: int
    reason: str


class PhasedAdmission(AdmissionPolicy):
    """The peak over time of the worst cases fits the pool.

    A first answer costs as much as there are requests running; asked again for a head that it has refused it costs next
    to nothing.
    """

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool[Request], hits: HitFinder, *, num_late_steps: int
    ) -> None:
        self._config = config
        self._pool = pool
        self._hits = hits
        self._num_late_steps = num_late_steps
        # Decode steps so far.
        self._now = 0
        # Requests that decode and are not at their last token; and by the decode step that computes it.
        self._profile = Profile(config.block_size)
        self._by_last: dict[int, dict[Request, None]] = {}
        # Requests that only wait for their last token, with the decode step at which it was scheduled.
        self._at_last: dict[Request, int] = {}
        # Of blocks that several requests of the profile hold or held: the last end among those that do.
        self._latest: dict[int, int] = {}
        self._prefilling: Request | None = None
        self._num_decodes_left = 0
        self._let_in: Candidate | None = None
        self._refusal: Refusal | None = None

    # ---- the question ----

    def why_not(self, request: Request, running: Sequence[Request]) -> str | None:
        refusal = self._refusal
        if (
            refusal is not None
            and refusal.request is request
            and self._now <= refusal.until
            and not self._hits.may_be_longer(refusal.hit)
        ):
            return refusal.reason
        if self._prefilling is not None or len(running) != len(self._profile.curves) + len(self._at_last):
            known = f"{len(self._profile.curves)} that decode and {len(self._at_last)} at their last token"
            return f"{len(running)} requests run; admission knows of {known}"
        candidate = self._candidate(request)
        ends = map(self._latest_end, candidate.hit.block_ids)
        shared_until = sorted(end for end in ends if end is not None)
        overflow = self._profile.find_overflow(candidate.curve, shared_until, self._pool.num_usable)
        if overflow is None:
            self._let_in = candidate
            return None
        self._refusal = self._refuse(candidate, overflow)
        return self._refusal.reason

    def peak_blocks(self, running: Sequence[Request]) -> int:
        """Of those that decode; one that prefills counts with the blocks that it holds now."""
        num_held = self._pool.num_usable - self._pool.num_free
        return max(num_held, *self._profile.used) if self._profile.used else num_held

    def _candidate(self, request: Request) -> Candidate:
        hit = self._hits.find(request)
        num_decodes_between = 0
        if self._config.max_decode_stall_ms is not None:
            num_to_compute = request.num_prefill_tokens - len(hit.block_ids) * self._config.block_size
            num_decodes_between = -(-num_to_compute // self._config.max_num_batched_tokens) - 1
        curve = self._curve(request, request.num_prefill_tokens, num_decodes_between)
        return Candidate(request, hit, curve, num_decodes_between)

    def _curve(self, request: Request, num_computed: int, num_decodes_between: int = 0) -> Curve:
        """From now on, with that many tokens computed."""
        last = self._now + last_computed(request, self._config.max_model_len) - num_computed
        offset = num_computed - self._now + self._config.block_size - 1
        return Curve(offset, last, last + self._num_late_steps + num_decodes_between)

    def _latest_end(self, block_id: int) -> int | None:
        """The last end among the holders of a block; None where no request of the profile holds it."""
        latest = self._latest.get(block_id)
        if latest is not None:
            return latest
        curves = self._profile.curves
        return max((curves[holder].end for holder in self._pool.holders(block_id) if holder in curves), default=None)

    def _refuse(self, candidate: Candidate, overflow: Overflow) -> Refusal:
        request, hit, curve, _ = candidate
        usable, step = self._pool.num_usable, overflow.step
        if overflow.valid_before > step:
            # It lacks blocks at its own end, which moves on with each decode step, as long as nobody ends before it.
            until = self._now + overflow.valid_before - step - 1
        else:
            # It has fewer tokens at that step with each decode step that comes first. Up to this many it lacks blocks.
            num_needed = self._profile.blocks_at(curve, step) - (overflow.num_blocks - usable) + 1
            num_tokens = (num_needed - 1) * self._config.block_size + 1
            until = step - max(num_tokens - request.num_prefill_tokens, self._num_late_steps + 1)
        reason = f"with this request up to {overflow.num_blocks} blocks may be needed at once; {usable} are usable"
        return Refusal(request, hit, until, reason)

    # ---- what happens to the running requests ----

    def bind(self, request: Request) -> None:
        let_in, self._let_in = self._let_in, None
        if let_in is None or let_in.request is not request or self._prefilling is not None:
            raise InternalError(f"{request!r} is bound without having been let in just before")
        self._prefilling = request
        self._num_decodes_left = let_in.num_decodes_between
        # The check has counted these as gone by the next decode step.
        self._at_last = dict.fromkeys(self._at_last, self._now - self._num_late_steps)

    def start_decode(self, request: Request) -> None:
        if self._prefilling is not request:
            raise InternalError(f"{request!r} starts to decode; prefilling is {self._prefilling!r}")
        self._prefilling = None
        curve = self._curve(request, request.num_computed_tokens)
        if curve.last == self._now:
            self._at_last[request] = self._now
            return
        shared_until = []
        for block_id in request.block_ids[: request.num_hit_blocks]:
            latest = self._latest_end(block_id)
            if latest is not None:
                shared_until.append(latest)
                self._latest[block_id] = max(latest, curve.end)
        self._profile.add(request, curve, sorted(shared_until))
        self._by_last.setdefault(curve.last, {})[request] = None

    def count_decode_step(self, num_rows: int) -> None:
        curves = self._profile.curves
        if num_rows != len(curves):
            raise InternalError(f"a decode step has {num_rows} rows; {len(curves)} requests have tokens left to decode")
        if self._at_last:
            request, last = next(iter(self._at_last.items()))
            if last <= self._now - self._num_late_steps:
                raise InternalError(f"{request!r} still has its blocks, too late after its last token")
        if self._prefilling is not None:
            self._num_decodes_left -= 1
            if self._num_decodes_left < 0:
                raise InternalError(f"{self._prefilling!r} is prefilling, and this decode step was not expected then")
        self._let_in = None
        self._now += 1
        for request in list(self._by_last.get(self._now, ())):
            self._leave(request)
            self._at_last[request] = self._now

    def release(self, request: Request) -> None:
        if request is self._prefilling:
            self._prefilling = None
        elif request in self._profile.curves:
            self._leave(request)
            self._refusal = None
        else:
            self._at_last.pop(request, None)
        self._let_in = None

    def _leave(self, request: Request) -> None:
        """Takes a request out of the profile; it still holds its blocks."""
        curves, latest = self._profile.curves, self._latest
        end, last = curves[request].end, curves[request].last
        shared_until = []
        for block_id in request.block_ids:
            if block_id not in latest:
                continue
            if latest[block_id] == end:
                others = [curves[h].end for h in self._pool.holders(block_id) if h is not request and h in curves]
                if not others:
                    del latest[block_id]
                    continue
                latest[block_id] = max(others)
            shared_until.append(latest[block_id])
        self._profile.remove(request, sorted(shared_until))
        del self._by_last[last][request]
        if not self._by_last[last]:
            del self._by_last[last]

    # ---- what must always hold ----

    def check_integrity(self, running: Sequence[Request]) -> None:
        decoding = [request for request in running if not request.is_prefill]
        unfinished = {r: self._curve(r, r.num_computed_tokens) for r in decoding if r.num_steps_left}
        at_last = {request for request in decoding if request not in unfinished}
        if unfinished != self._profile.curves or at_last != set(self._at_last):
            known = f"{self._profile.curves}, and {list(self._at_last)} are at their last token"
            raise InternalError(f"curves are {known}; they should be {unfinished}, {at_last}")
        prefilling = [request for request in running if request.is_prefill]
        if prefilling != [self._prefilling] * (self._prefilling is not None):
            raise InternalError(f"{prefilling} are prefilling; admission knows of {self._prefilling}")
        for step, used in zip(self._profile.ends, self._profile.used, strict=True):
            expected = self._used_at(step)
            if not used == expected <= self._pool.num_usable:
                found = f"{used} blocks are counted at step {step}, block tables say {expected}"
                raise InternalError(f"{found}; {self._pool.num_usable} are usable")

    def _used_at(self, step: int) -> int:
        """Blocks at a decode step, from the block tables of all requests of the profile."""
        alive = {request: curve for request, curve in self._profile.curves.items() if curve.end >= step}
        held = {block_id for request in alive for block_id in request.block_ids}
        grown = (self._profile.blocks_at(curve, step) - len(request.block_ids) for request, curve in alive.items())
        return len(held) + sum(grown)
