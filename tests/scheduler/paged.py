"""An executor whose answers come from its KV memory, and that hears nothing but the wire.

It writes (token, position) where a block table says, and reads its context back through the table; a decode takes its
input from `last_token` by slot. So a wrong block, a slot or a block given out too early, a step out of order or a late
write into somebody else's block gives another answer than `paged_answer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from holdback import codec
from holdback.types import ModelRunnerOutput, NewRequestData, Phase, RequestSpec, SchedulerOutput, TokenLogprobs
from holdback.v1 import executor_pb2


def paged_answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The first outputs of a correct system: the next is 16 + (sum over p of (token_p + p) * (p + 1)) % 100."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(16 + sum((token + p) * (p + 1) for p, token in enumerate(tokens)) % 100)
    return tokens[len(prompt) :]


@dataclass
class _Known:
    """What the executor keeps of a request."""

    spec: RequestSpec
    slot: int
    num_computed: int
    block_ids: list[int] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [*self.spec.prompt_token_ids, *self.spec.output_token_ids]


class PagedExecutor:
    """Runs steps strictly in the order in which it is given them."""

    def __init__(self, block_size: int = 4, max_num_seqs: int = 4) -> None:
        self._block_size = block_size
        self._memory: dict[tuple[int, int], tuple[int, int]] = {}
        self._last_token: list[int | None] = [None] * max_num_seqs
        self._known: dict[str, _Known] = {}
        self._encoder, self._decoder = codec.StepEncoder(), codec.StepDecoder()

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        sent = self._encoder.encode(output).SerializeToString()
        result = self._run_step(self._decoder.decode(executor_pb2.SchedulerOutput.FromString(sent)))
        answered = codec.encode_runner_output(result).SerializeToString()
        return codec.decode_runner_output(executor_pb2.ModelRunnerOutput.FromString(answered))

    def _run_step(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for name in output.finished_req_ids:
            del self._known[name]
        for new in output.scheduled_new_reqs:
            self._start(new)
        cached = output.scheduled_cached_reqs
        for name, num_computed, block_ids in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            assert num_computed == self._known[name].num_computed
            self._known[name].block_ids += block_ids or ()
        result = ModelRunnerOutput(output.step)
        # All rows read and write KV memory before any writes its last token, as in one batch.
        sampled = [(name, self._run_row(name, count, output.phase)) for name, count in _rows(output)]
        for name, token_id in sampled:
            if token_id is not None:
                self._sample(self._known[name], token_id, result)
        return result

    def _start(self, new: NewRequestData) -> None:
        assert new.req_id not in self._known
        in_use = [known.slot for known in self._known.values()]
        assert new.slot not in in_use, f"slot {new.slot} is in use"
        self._known[new.req_id] = _Known(new.spec, new.slot, new.num_computed_tokens, list(new.block_ids))

    def _run_row(self, name: str, count: int, phase: Phase | None) -> int | None:
        """Writes what the row computes; returns the token that it samples."""
        known = self._known[name]
        start, end = known.num_computed, known.num_computed + count
        if phase is Phase.DECODE:
            token_ids = [self._last_token[known.slot]]
        else:
            token_ids = list(known.token_ids[start:end])
        for position, token_id in zip(range(start, end), token_ids, strict=True):
            assert token_id is not None
            self._memory[self._place(known, position)] = token_id, position
        known.num_computed = end
        if phase is Phase.PREFILL and end < len(known.token_ids):
            return None
        context = (self._memory[self._place(known, p)] for p in range(end))
        return 16 + sum((token + position) * (p + 1) for p, (token, position) in enumerate(context)) % 100

    def _place(self, known: _Known, position: int) -> tuple[int, int]:
        return known.block_ids[position // self._block_size], position % self._block_size

    def _sample(self, known: _Known, token_id: int, result: ModelRunnerOutput) -> None:
        self._last_token[known.slot] = token_id
        result.sampled_token_ids.append(token_id)
        wanted = known.spec.sampling.num_logprobs is not None
        result.logprobs.append(TokenLogprobs(token_id, -0.5) if wanted else None)


def _rows(output: SchedulerOutput) -> list[tuple[str, int]]:
    return list(output.num_scheduled_tokens.items())
