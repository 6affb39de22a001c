"""Choices of a generation to responses of the engine protocol.

With `stream` each new piece of a choice is a chunk that holds only what is new, tokens, log-probabilities and
`completion_tokens` alike; then one `complete` per choice repeats all its tokens, and not the log-probabilities, which
its reader has added up. Without `stream` there is one `complete` per choice that holds all.
"""

from __future__ import annotations

from collections.abc import Sequence

from smg_grpc_proto import vllm_engine_pb2

from gateway.choice import Choice, ChoiceEnd, Delta
from gateway.generation import GenerationRun
from holdback.types import TokenLogprobs


class Responses:
    """Makes the responses of one generation from its deltas, in order."""

    def __init__(self, run: GenerationRun, *, stream: bool) -> None:
        self._run = run
        self._stream = stream
        self._token_ids: list[list[int]] = [[] for _ in run.choices]
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in run.choices]

    def add(self, choice: Choice, delta: Delta) -> list[vllm_engine_pb2.GenerateResponse]:
        """What is to be sent after a delta: a chunk if it has tokens, and `complete` if the choice has ended."""
        responses = []
        self._token_ids[choice.index] += delta.token_ids
        if not self._stream:
            self._logprobs[choice.index] += delta.logprobs
        elif delta.token_ids:
            responses.append(vllm_engine_pb2.GenerateResponse(chunk=self._chunk(choice, delta)))
        if choice.end is not None and choice.error is None:
            responses.append(vllm_engine_pb2.GenerateResponse(complete=self._complete(choice, choice.end)))
        return responses

    def _chunk(self, choice: Choice, delta: Delta) -> vllm_engine_pb2.GenerateStreamChunk:
        return vllm_engine_pb2.GenerateStreamChunk(
            index=choice.index,
            token_ids=delta.token_ids,
            prompt_tokens=len(self._run.prompt_token_ids),
            completion_tokens=len(delta.token_ids),
            cached_tokens=self._run.num_cached_tokens,
            output_logprobs=_encode_logprobs(delta.logprobs),
        )

    def _complete(self, choice: Choice, end: ChoiceEnd) -> vllm_engine_pb2.GenerateComplete:
        return vllm_engine_pb2.GenerateComplete(
            index=choice.index,
            output_ids=self._token_ids[choice.index],
            finish_reason=end.finish_reason.value,
            prompt_tokens=len(self._run.prompt_token_ids),
            completion_tokens=choice.num_outputs,
            cached_tokens=self._run.num_cached_tokens,
            output_logprobs=_encode_logprobs(self._logprobs[choice.index]),
            matched_token_id=end.stop_token_id,
            matched_stop_str=end.stop_string,
        )


def _encode_logprobs(logprobs: Sequence[TokenLogprobs]) -> vllm_engine_pb2.OutputLogProbs | None:
    """Parallel lists, one entry per token; None where none were asked for."""
    if not logprobs:
        return None
    message = vllm_engine_pb2.OutputLogProbs(
        token_ids=[entry.token_id for entry in logprobs], token_logprobs=[entry.logprob for entry in logprobs]
    )
    if any(entry.top_token_ids for entry in logprobs):
        for entry in logprobs:
            message.top_logprobs.add(token_ids=entry.top_token_ids, values=entry.top_logprobs)
    return message
