"""Generation: a checked request of a client, from token ids to its response or to the chunks of its stream.

A request has one or several prompts, each with n samples; choice `prompt * n + k` is sample k of that prompt. Each
prompt is one request to the engine. They are submitted together and closed together, which aborts those still running.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from minivllm.actors.openai.protocol.errors import wrong_field
from minivllm.actors.openai.protocol.requests import GenerationBody
from minivllm.actors.openai.protocol.sse import ChunkWriter
from minivllm.actors.openai.serving.service import EngineApi, GenerationService
from minivllm.actors.transport.messages import GenerateRequest
from minivllm.actors.transport.output_router import RequestStream
from minivllm.core.errors import InvalidRequestError, RequestFailedError
from minivllm.core.outputs import RequestOutput, TokenLogprobs
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.sequence import FinishReason
from minivllm.core.text.detokenizer import IncrementalDetokenizer, TextDelta

_GRAMMAR_PARAMS = frozenset({"response_format", "structured_outputs"})


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt, and its text if it came as text."""

    token_ids: list[int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """New text of one choice, or all of it. `finish_reason` is set in the last delta."""

    index: int
    text: str
    prompt_logprobs: list[TokenLogprobs]
    """Of all prompt tokens but the first, if requested; complete in the first delta."""
    logprobs: list[TokenLogprobs]
    finish_reason: str | None
    hides_last_token: bool
    """The last token is a stop token whose text was left out."""


class Choice(Protocol):
    """Formats one choice of a response, either at once or delta by delta."""

    def to_dict(self, whole: ChoiceDelta) -> dict[str, Any]:
        """Returns the choice in the API's form."""

    def chunks(self, delta: ChoiceDelta, writer: ChunkWriter, usage: dict[str, Any] | None) -> list[str]:
        """Formats a delta as chunks of a stream."""


@dataclass(slots=True, eq=False)
class _PromptState:
    """One prompt in the engine, with the detokenizers of its samples."""

    request: GenerateRequest
    first_index: int
    detokenizers: list[IncrementalDetokenizer]
    open_samples: set[int]
    stream: RequestStream | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    waiting_deltas: list[ChoiceDelta] = field(default_factory=list)
    """Deltas of samples that are ahead of the sample that scores the prompt."""

    async def take(self, engine: EngineApi) -> list[RequestOutput]:
        """Waits for outputs. Submits the prompt on the first call, which raises the refusal."""
        if self.stream is None:
            self.stream = await engine.submit(self.request)
        return await self.stream.take()

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()

    def read(self, outputs: list[RequestOutput]) -> tuple[list[ChoiceDelta], list[int]]:
        """Returns the new deltas, and the samples that a stop string has ended. Raises the error of an output."""
        stopped: list[int] = []
        for output in outputs:
            if output.error is not None:
                raise output.error
            self.prompt_logprobs += output.prompt_logprobs or []
            if output.index not in self.open_samples:
                continue  # a stop string ended it before the engine knew
            if output.finish_reason is FinishReason.ABORT:
                raise RequestFailedError(
                    "the request was aborted by the server because its output was not read in time"
                )
            if output.index == 0:
                self.num_cached_tokens = output.num_cached_tokens
            new = self.detokenizers[output.index].push(
                output.new_token_ids,
                output.logprobs,
                finish_reason=output.finish_reason,
                stop_token_id=output.stop_token_id,
            )
            if new.finish_reason is not None:
                self.open_samples.discard(output.index)
                if not output.finished:
                    stopped.append(output.index)
            if new:
                self.waiting_deltas.append(self.delta(output.index, new))
        num_scores = (
            0 if self.request.sampling_params.prompt_logprobs is None else len(self.request.prompt_token_ids) - 1
        )
        if len(self.prompt_logprobs) < num_scores:
            return [], stopped
        deltas, self.waiting_deltas = self.waiting_deltas, []
        return deltas, stopped

    def delta(self, sample: int, new: TextDelta | IncrementalDetokenizer) -> ChoiceDelta:
        is_stop_token = isinstance(self.detokenizers[sample].stop_reason, int)
        return ChoiceDelta(
            self.first_index + sample,
            new.text,
            self.prompt_logprobs,
            new.logprobs or [],
            # A plain string: programs that read a handle call's response need not have this package.
            None if new.finish_reason is None else str(new.finish_reason.value),
            is_stop_token and not self.request.sampling_params.include_stop_str_in_output,
        )


class Generation:
    """Runs one request; call either `response` or `stream`, once.

    Args:
        prompts: checked prompts.
        params: the same for all prompts.
        choices: one per sample of each prompt.
        grammar_field: the field that asked for a grammar, which the engine's refusal of it names.
        kinds: the prefix of the response's `id`, its `object`, and the `object` of chunks.
    """

    def __init__(
        self,
        service: GenerationService,
        body: GenerationBody,
        prompts: list[Prompt],
        params: SamplingParams,
        choices: Sequence[Choice],
        grammar_field: str,
        kinds: tuple[str, str, str],
    ) -> None:
        id_prefix, self._kind, self._chunk_kind = kinds
        # Unique whatever ids clients send: the engine's request ids contain it.
        self._id = f"{id_prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._engine = service.engine
        self._model_name = service.model_name
        self._body = body
        self._choices = choices
        self._grammar_field = grammar_field
        self._prompts = [
            _PromptState(
                GenerateRequest(f"{self._id}-{number}", prompt.token_ids, params, body.priority or 0, body.cache_salt),
                number * params.n,
                [IncrementalDetokenizer(service.tokenizer, params) for _ in range(params.n)],
                set(range(params.n)),
            )
            for number, prompt in enumerate(prompts)
        ]

    @property
    def is_stream(self) -> bool:
        return bool(self._body.stream)

    async def response(self) -> dict[str, Any]:
        """Runs to the end and returns the response body."""
        async for _ in self._deltas():
            pass
        wholes = [prompt.delta(*sample) for prompt in self._prompts for sample in enumerate(prompt.detokenizers)]
        return {
            "id": self._id,
            "object": self._kind,
            "created": self._created,
            "model": self._model_name,
            "choices": [self._choices[whole.index].to_dict(whole) for whole in wholes],
            "usage": self._usage(),
        }

    async def stream(self) -> AsyncGenerator[list[str], None]:
        """Yields chunks as JSON texts; those of one list are sent together."""
        body = self._body
        writer = ChunkWriter(
            self._id, self._chunk_kind, self._created, self._model_name, announces_usage=body.include_usage
        )
        async with contextlib.aclosing(self._deltas()) as batches:
            async for deltas in batches:
                usage = self._usage() if body.continuous_usage else None
                parts = [self._choices[delta.index].chunks(delta, writer, usage) for delta in deltas]
                if chunks := [chunk for part in parts for chunk in part]:
                    yield chunks
        if body.include_usage:
            yield [writer.usage(self._usage())]

    def _usage(self) -> dict[str, Any]:
        """Returns the tokens so far as OpenAI counts them: each prompt once for all its samples."""
        prompt_tokens = sum(len(prompt.request.prompt_token_ids) for prompt in self._prompts)
        completion_tokens = sum(one.num_tokens for prompt in self._prompts for one in prompt.detokenizers)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(prompt.num_cached_tokens for prompt in self._prompts)},
        }

    async def _deltas(self) -> AsyncGenerator[list[ChoiceDelta], None]:
        """Yields new deltas until every choice has ended.

        Raises the refusal before the first delta; RequestFailedError, EngineDeadError, or InvalidRequestError for a
        grammar that proves too complex, at any time. The request ends with this generator: closing it aborts what runs.
        """
        takes: dict[_PromptState, asyncio.Task[list[RequestOutput]]] = {}
        try:
            while any(prompt.open_samples for prompt in self._prompts):
                deltas: list[ChoiceDelta] = []
                for prompt, outputs in await self._take(takes):
                    new, stopped = prompt.read(outputs)
                    deltas += new
                    if not outputs or not prompt.open_samples:
                        prompt.open_samples.clear()
                        prompt.close()
                    else:
                        for index in stopped:
                            await self._engine.abort(prompt.request.request_id, index)
                if deltas:
                    yield deltas
        except InvalidRequestError as error:
            if error.param not in _GRAMMAR_PARAMS:
                raise
            raise wrong_field(self._grammar_field, error.message) from error
        finally:
            for task in takes.values():
                task.cancel()
            for prompt in self._prompts:
                prompt.close()
            if takes:
                await asyncio.gather(*takes.values(), return_exceptions=True)

    async def _take(
        self, takes: dict[_PromptState, asyncio.Task[list[RequestOutput]]]
    ) -> list[tuple[_PromptState, list[RequestOutput]]]:
        """Waits for outputs of any open prompt. `takes` are the tasks that wait for one prompt each."""
        if len(self._prompts) == 1:
            return [(self._prompts[0], await self._prompts[0].take(self._engine))]
        for prompt in self._prompts:
            if prompt.open_samples and prompt not in takes:
                takes[prompt] = asyncio.create_task(prompt.take(self._engine))
        await asyncio.wait(takes.values(), return_when=asyncio.FIRST_COMPLETED)
        done = [prompt for prompt, task in takes.items() if task.done()]
        return [(prompt, takes.pop(prompt).result()) for prompt in done]
