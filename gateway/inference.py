"""`holdback.v1.InferenceService`: what applications call.

Whatever ends a call ends what it submitted: an error, a deadline, a client that went away.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from gateway.calls import Context, answering, current_caller, generating
from gateway.choice import Choice, ChoiceEnd, Delta
from gateway.generation import GenerationRun, prompt_text
from gateway.generations import Generations
from gateway.limits import MAX_MODEL_NAME_BYTES, check_input, check_num_tokens, check_vocabulary
from gateway.pool import Pool
from holdback import codec
from holdback.request_limits import check_bytes
from holdback.v1 import inference_pb2, inference_pb2_grpc, scheduler_pb2


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Serves the pools of one gateway."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._pools = generations.pools

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        async with (
            answering(context, self._generations.counting_refusals),
            generating(self._generations, request.generation, context, is_stream=False) as run,
        ):
            response = _response(run)
            response.choices.extend(inference_pb2.Choice(index=choice.index) for choice in run.choices)
            if request.generation.echo:
                await _echo(run, request.generation, response)
            texts = [[choice.text] for choice in response.choices]
            async for choice, delta in run.deltas():
                texts[choice.index].append(delta.text)
                _extend(response.choices[choice.index], choice, delta)
            for message, parts in zip(response.choices, texts, strict=True):
                message.text = "".join(parts)
            response.usage.CopyFrom(codec.encode_usage(run.usage))
            return response

    async def GenerateStream(  # noqa: N802
        self, request: inference_pb2.GenerateStreamRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateStreamResponse]:
        async with (
            answering(context, self._generations.counting_refusals),
            generating(self._generations, request.generation, context, is_stream=True) as run,
        ):
            yield inference_pb2.GenerateStreamResponse(started=_started(run))
            if request.generation.echo:
                prompt = await prompt_text(run, request.generation)
                for choice in run.choices:
                    yield _delta_response(choice, Delta(prompt, (), ()))
            async for choice, delta in run.deltas():
                if delta.text or delta.token_ids:
                    yield _delta_response(choice, delta)
                if choice.end is not None and choice.error is None:
                    yield inference_pb2.GenerateStreamResponse(end=_end(choice.index, choice.end))
            finished = inference_pb2.GenerationFinished(usage=codec.encode_usage(run.usage))
            yield inference_pb2.GenerateStreamResponse(finished=finished)

    async def Abort(  # noqa: N802
        self, request: inference_pb2.AbortRequest, context: Context
    ) -> inference_pb2.AbortResponse:
        async with answering(context):
            self._generations.abort(request.request_id, owner=current_caller().name)
            return inference_pb2.AbortResponse()

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        async with self._answering_unless_draining(context):
            pool = self._select(request.model)
            check_input(request)
            token_ids = await pool.tokenize(request)
            model = pool.engine.status.model
            return inference_pb2.TokenizeResponse(
                token_ids=token_ids, max_model_len=0 if model is None else model.max_model_len
            )

    async def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        async with self._answering_unless_draining(context):
            pool = self._select(request.model)
            check_num_tokens("token_ids", len(request.token_ids))
            model = pool.engine.status.model
            vocab_size = pool.tokenizer.largest_token_id + 1 if model is None else model.vocab_size
            token_ids = list(request.token_ids)  # once, for each walk over the message's own takes as long as this
            check_vocabulary("token_ids", token_ids, vocab_size)
            text = await pool.tokenizer.decode(token_ids, keep_special_tokens=request.keep_special_tokens)
            return inference_pb2.DetokenizeResponse(text=text)

    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        async with self._answering_unless_draining(context):
            return inference_pb2.ListModelsResponse(models=[pool.describe() for pool in self._pools])

    async def GetModel(  # noqa: N802
        self, request: inference_pb2.GetModelRequest, context: Context
    ) -> inference_pb2.GetModelResponse:
        async with self._answering_unless_draining(context):
            return inference_pb2.GetModelResponse(model=self._select(request.model).describe())

    async def GetLoad(  # noqa: N802
        self, request: inference_pb2.InferenceServiceGetLoadRequest, context: Context
    ) -> inference_pb2.InferenceServiceGetLoadResponse:
        async with self._answering_unless_draining(context):
            pool = self._select(request.model)
            return _load(pool, await pool.engine.load.read())

    @contextlib.asynccontextmanager
    async def _answering_unless_draining(self, context: Context) -> AsyncIterator[None]:
        async with answering(context):
            self._generations.check_open()
            with self._generations.short_calls.one():
                yield

    def _select(self, name: str) -> Pool:
        check_bytes("model", name, MAX_MODEL_NAME_BYTES)
        return self._pools.select(name)


def _load(pool: Pool, load: scheduler_pb2.GetLoadResponse) -> inference_pb2.InferenceServiceGetLoadResponse:
    return inference_pb2.InferenceServiceGetLoadResponse(
        model=pool.names[0],
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_waiting_tokens=load.num_waiting_tokens,
        num_slots=load.num_slots,
        num_executors=load.num_executors,
        kv_usage=load.kv_usage,
        queue_ms=load.queue_ms if load.HasField("queue_ms") else None,
    )


async def _echo(
    run: GenerationRun, message: inference_pb2.Generation, response: inference_pb2.GenerateResponse
) -> None:
    prompt = await prompt_text(run, message)
    for choice in response.choices:
        choice.text = prompt


def _response(run: GenerationRun) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(request_id=run.request_id, model=run.pool.names[0], seed=run.seed)


def _started(run: GenerationRun) -> inference_pb2.GenerationStarted:
    return inference_pb2.GenerationStarted(
        request_id=run.request_id,
        model=run.pool.names[0],
        seed=run.seed,
        prompt_tokens=len(run.prompt_token_ids),
    )


def _extend(message: inference_pb2.Choice, choice: Choice, delta: Delta) -> None:
    message.token_ids.extend(delta.token_ids)
    message.logprobs.extend(map(codec.encode_logprobs, delta.logprobs))
    if choice.end is not None:
        end = _end(choice.index, choice.end)
        message.finish_reason = end.finish_reason
        if end.HasField("stop_reason"):
            message.stop_reason.CopyFrom(end.stop_reason)


def _delta_response(choice: Choice, delta: Delta) -> inference_pb2.GenerateStreamResponse:
    return inference_pb2.GenerateStreamResponse(
        delta=inference_pb2.ChoiceDelta(
            index=choice.index,
            text=delta.text,
            token_ids=delta.token_ids,
            logprobs=map(codec.encode_logprobs, delta.logprobs),
        )
    )


def _end(index: int, end: ChoiceEnd) -> inference_pb2.ChoiceEnd:
    message = inference_pb2.ChoiceEnd(index=index, finish_reason=codec.encode_finish_reason(end.finish_reason))
    if end.stop_string is not None:
        message.stop_reason.stop_string = end.stop_string
    elif end.stop_token_id is not None:
        message.stop_reason.stop_token_id = end.stop_token_id
    return message
