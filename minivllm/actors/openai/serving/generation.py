"""Generation: one request of a client on its way through the engine, from token ids to deltas of text.

A request may have several prompts, each with n samples; choice `prompt x n + k` is sample k of it. They begin together,
and however the iteration ends, all that still runs is aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from minivllm.actors.transport.messages import EngineInfo, EngineSnapshot, GenerateRequest
from minivllm.actors.transport.output_router import RequestStream
from minivllm.core.errors import InvalidRequestError, RequestFailedError
from minivllm.core.outputs import RequestOutput, TokenLogprobs
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.sequence import FinishReason
from minivllm.core.text.detokenizer import IncrementalDetokenizer


class EngineApi(Protocol):
    """What this layer needs of an engine. `actors.engine_client.EngineClient` is one; tests have one without Ray."""

    async def submit(self, request: GenerateRequest) -> RequestStream: ...
    async def abort(self, request_id: str, index: int | None = None) -> None: ...
    async def info(self) -> EngineInfo: ...
    async def stats(self) -> EngineSnapshot: ...
    def count_never_fits(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its tokens, and the text it came from if it came as text."""

    token_ids: list[int]
    text: str | None = None


@dataclass(slots=True)
class ChoiceDelta:
    """What is new of one choice. `finish_reason` is set in its last delta."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    hides_last_token: bool = False
    """The last token is a stop token whose text was left out."""


@dataclass(slots=True)
class _PromptState:
    """What is known of one prompt and its samples."""

    request: GenerateRequest
    first_index: int
    texts: list[IncrementalDetokenizer]
    open_samples: set[int]
    ended_early: bool = False
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    held: list[ChoiceDelta] = field(default_factory=list)

    @property
    def is_ended_early(self) -> bool:
        """Whether the rest of the stream is of no interest. Else the engine ends it itself."""
        return self.ended_early and not self.open_samples

    @property
    def is_scored(self) -> bool:
        """Whether the log probabilities of the prompt, if asked for, are all here. The first token has none."""
        if self.request.sampling_params.prompt_logprobs is None:
            return True
        return len(self.prompt_logprobs) >= len(self.request.prompt_token_ids) - 1


class Generation:
    """Submits the prompts when `deltas()` is first asked for something.

    Args:
        engine: where they go.
        answer_id: unique; the engine's request ids are made of it.
        prompts: valid ones; all are submitted together.
        params: the same for all.
        new_text: makes the detokenizer of one sample.
    """

    def __init__(
        self,
        engine: EngineApi,
        answer_id: str,
        prompts: list[Prompt],
        params: SamplingParams,
        *,
        new_text: Callable[[], IncrementalDetokenizer],
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        self._engine = engine
        self._params = params
        self._ended_early: list[tuple[_PromptState, int]] = []
        self._prompts = [
            _PromptState(
                GenerateRequest(f"{answer_id}-{number}", prompt.token_ids, params, priority, cache_salt),
                number * params.n,
                [new_text() for _ in range(params.n)],
                set(range(params.n)),
            )
            for number, prompt in enumerate(prompts)
        ]

    def usage(self) -> dict[str, Any]:
        """Tokens so far, as OpenAI counts them: each prompt once, however many samples it has."""
        prompt_tokens = sum(len(prompt.request.prompt_token_ids) for prompt in self._prompts)
        completion_tokens = sum(text.num_tokens for prompt in self._prompts for text in prompt.texts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(prompt.cached_tokens for prompt in self._prompts)},
        }

    def prompt_logprobs(self, choice_index: int) -> list[TokenLogprobs]:
        """Those of all tokens but the first of the choice's prompt. Complete before the choice's first delta."""
        return self._prompts[choice_index // self._params.n].prompt_logprobs

    async def deltas(self) -> AsyncGenerator[list[ChoiceDelta], None]:
        """What is new, whenever something is; ends after the last choice's last delta.

        The first `anext` raises what the engine says to a request that it refuses; later ones RequestFailedError,
        EngineDeadError, or InvalidRequestError for a grammar that proves too complex. Close it (`aclose`) when leaving
        early.
        """
        async with contextlib.aclosing(self._batches()) as batches:
            async for batch in batches:
                deltas: list[ChoiceDelta] = []
                for prompt, outputs in batch:
                    self._take(prompt, outputs, deltas)
                if deltas:
                    yield deltas
                await self._end_early()

    async def _end_early(self) -> None:
        """Tells the engine of samples whose stop string was found. A prompt's last one ends with its stream."""
        for prompt, index in self._ended_early:
            if prompt.open_samples:
                await self._engine.abort(prompt.request.request_id, index)
        self._ended_early.clear()

    # ---------------------------------------------------------------- outputs of the engine

    def _batches(self) -> AsyncGenerator[list[tuple[_PromptState, list[RequestOutput]]], None]:
        if len(self._prompts) == 1:
            return self._single(self._prompts[0])
        return self._merged()

    async def _single(
        self, prompt: _PromptState
    ) -> AsyncGenerator[list[tuple[_PromptState, list[RequestOutput]]], None]:
        async with contextlib.aclosing(_outputs(self._engine, prompt.request)) as stream:
            async for outputs in stream:
                yield [(prompt, outputs)]
                if prompt.is_ended_early:
                    return

    async def _merged(self) -> AsyncGenerator[list[tuple[_PromptState, list[RequestOutput]]], None]:
        """The streams of all prompts as one; a stream is asked for more only after what it gave was taken."""
        streams = [_outputs(self._engine, prompt.request) for prompt in self._prompts]
        tasks = {asyncio.create_task(_next(stream)): number for number, stream in enumerate(streams)}
        try:
            while tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                batch = []
                asked_again = []
                for task in done:
                    number = tasks.pop(task)
                    outputs = task.result()
                    if outputs is not None:
                        batch.append((self._prompts[number], outputs))
                        asked_again.append(number)
                yield batch
                for number in asked_again:
                    if self._prompts[number].is_ended_early:
                        await streams[number].aclose()
                    else:
                        tasks[asyncio.create_task(_next(streams[number]))] = number
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(stream.aclose() for stream in streams), return_exceptions=True)

    # ---------------------------------------------------------------- from tokens to text

    def _take(self, prompt: _PromptState, outputs: list[RequestOutput], deltas: list[ChoiceDelta]) -> None:
        was_scored = prompt.is_scored
        for output in outputs:
            delta = self._delta(prompt, output)
            if delta is not None:
                # A sample may be ahead of the one that scores the prompt, but scores come before any output.
                (deltas if prompt.is_scored else prompt.held).append(delta)
        if prompt.is_scored and not was_scored:
            deltas[:0] = prompt.held
            prompt.held = []

    def _delta(self, prompt: _PromptState, output: RequestOutput) -> ChoiceDelta | None:
        if output.error is not None:
            raise output.error
        if output.prompt_logprobs:
            prompt.prompt_logprobs.extend(output.prompt_logprobs)
        if output.index not in prompt.open_samples:
            return None  # its stop string was found before the engine knew
        if output.finish_reason is FinishReason.ABORT:
            raise RequestFailedError("the request was aborted by the server, since nobody took its output in time")
        if output.index == 0:
            prompt.cached_tokens = output.num_cached_tokens
        text = prompt.texts[output.index]
        new = text.push(
            output.new_token_ids,
            output.logprobs,
            finish_reason=output.finish_reason,
            stop_token_id=output.stop_token_id,
        )
        if not new:
            return None
        if new.finish_reason is not None:
            prompt.open_samples.discard(output.index)
            if not output.finished:
                prompt.ended_early = True
                self._ended_early.append((prompt, output.index))
        return ChoiceDelta(
            index=prompt.first_index + output.index,
            text=new.text,
            token_ids=new.token_ids,
            logprobs=new.logprobs,
            # Plain: the answer to a handle call is to be read by programs that do not have this package.
            finish_reason=None if new.finish_reason is None else str(new.finish_reason.value),
            hides_last_token=isinstance(text.stop_reason, int) and not self._params.include_stop_str_in_output,
        )


async def _outputs(engine: EngineApi, request: GenerateRequest) -> AsyncGenerator[list[RequestOutput], None]:
    stream = await engine.submit(request)
    try:
        while outputs := await stream.take():
            yield outputs
    finally:
        stream.close()


async def _next(stream: AsyncIterator[list[RequestOutput]]) -> list[RequestOutput] | None:
    """The next item, or None at the end: a task cannot end with StopAsyncIteration."""
    return await anext(stream, None)


_GRAMMAR_PARAMS = frozenset({"response_format", "structured_outputs"})


async def naming_grammar_field(
    batches: AsyncGenerator[list[ChoiceDelta], None], field_name: str
) -> AsyncGenerator[list[ChoiceDelta], None]:
    """The same deltas; the engine's refusal of a grammar names the field that the client wrote it in."""
    try:
        async with contextlib.aclosing(batches):
            async for deltas in batches:
                yield deltas
    except InvalidRequestError as error:
        if error.param not in _GRAMMAR_PARAMS:
            raise
        raise InvalidRequestError(f"{field_name}: {error.message}", param=field_name) from error
