"""What of a streamed answer has come, and the request for the rest of it.

A stream that broke goes on at any gateway of the same model: the request is sent again with the seed of its first
message and the tokens that came, and the gateway sends only what follows them. It computes the text of those tokens as
the first gateway did, and leaves out what that had sent, so the texts of all pieces concatenate as if nothing had
happened; and it counts those tokens, so the usage at the end is that of the whole answer.
"""

from __future__ import annotations

from holdback import codec
from holdback.answers import Piece, stop_string, stop_token_id
from holdback.errors import FailedPreconditionError
from holdback.types import Usage
from holdback.v1 import inference_pb2


class Progress:
    """One streamed answer, over all the calls that it took.

    Attributes:
        has_started: the first message of the answer has come.
        started: that message; empty until it has come.
        usage: of the whole answer; None until that is complete.
    """

    def __init__(self, request: inference_pb2.Generation) -> None:
        self.has_started = False
        self.started = inference_pb2.GenerationStarted()
        self.usage: Usage | None = None
        self._request = request
        self._new_token_ids: list[int] = []
        self._has_text = False
        self._num_outputs = len(request.output_token_ids)
        self._num_ended = 0

    @property
    def num_choices(self) -> int:
        return self._request.n if self._request.HasField("n") else 1

    @property
    def has_ended(self) -> bool:
        """Every choice has its end; what may be missing is the usage."""
        return self._num_ended >= self.num_choices

    def take(self, response: inference_pb2.GenerateStreamResponse) -> Piece | None:
        """Notes one message; the piece that it brings, if it brings one.

        Raises:
            FailedPreconditionError: the rest of the answer comes from a gateway that reads the prompt differently.
        """
        event = response.WhichOneof("event")
        if event == "started":
            self._start(response.started)
        elif event == "delta":
            return self._add(response.delta)
        elif event == "end":
            self._num_ended += 1
            return _last_piece(response.end)
        elif event == "finished":
            self.usage = codec.decode_usage(response.finished.usage)
        return None

    def rest(self) -> inference_pb2.Generation:
        """The request for what has not come; before the first message that is the request itself."""
        request = inference_pb2.Generation()
        request.CopyFrom(self._request)
        if self.has_started:
            request.request_id, request.model = self.started.request_id, self.started.model
            request.sampling.seed = self.started.seed
        request.output_token_ids.extend(self._new_token_ids)
        if self._has_text:
            request.ClearField("echo")
        return request

    def finish(self) -> None:
        """Completes an answer that has ended, where the last message was lost with its stream.

        How many tokens of the prompt were cached is lost, too.
        """
        if self.usage is None:
            self.usage = Usage(self.started.prompt_tokens, self._num_outputs, cached_tokens=0)

    def _start(self, started: inference_pb2.GenerationStarted) -> None:
        first = self.started
        if self.has_started and started.prompt_tokens != first.prompt_tokens:
            raise FailedPreconditionError(
                f"the gateway that shall go on with request {first.request_id!r} makes {started.prompt_tokens} tokens "
                f"of its prompt, the first one made {first.prompt_tokens}; allowed: gateways of the same tokenizer"
            )
        self.has_started, self.started = True, started

    def _add(self, delta: inference_pb2.ChoiceDelta) -> Piece:
        self._has_text = True
        self._num_outputs += len(delta.token_ids)
        if self.num_choices == 1:
            self._new_token_ids += delta.token_ids
        logprobs = tuple(map(codec.decode_logprobs, delta.logprobs))
        return Piece(delta.text, delta.index, tuple(delta.token_ids), logprobs)


def _last_piece(end: inference_pb2.ChoiceEnd) -> Piece:
    return Piece(
        index=end.index,
        finish_reason=codec.decode_finish_reason(end.finish_reason),
        stop_string=stop_string(end.stop_reason),
        stop_token_id=stop_token_id(end.stop_reason),
    )
