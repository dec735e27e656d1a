"""/v1/completions: one answer or a stream of chunks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from minivllm.actors.openai.protocol.errors import shorten
from minivllm.actors.openai.protocol.fields import parse
from minivllm.actors.openai.protocol.requests import CompletionRequest
from minivllm.actors.openai.protocol.sampling import make_sampling_params
from minivllm.actors.openai.protocol.sse import ChunkWriter
from minivllm.actors.openai.serving.generation import ChoiceDelta, Generation, Prompt, naming_grammar_field
from minivllm.actors.openai.serving.logprobs import CompletionLogprobs, merge_lists
from minivllm.actors.openai.serving.service import GenerationService, new_answer_id
from minivllm.core.errors import InvalidRequestError
from minivllm.core.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 16
MAX_CHOICES = 1024
"""Prompts times n of one request."""


class Completion:
    """One checked request; ask it once for either `whole()` or `chunks()`."""

    def __init__(
        self, service: GenerationService, body: CompletionRequest, prompts: list[Prompt], params: SamplingParams
    ) -> None:
        self._service = service
        self._body = body
        self._prompts = prompts
        self._params = params
        self._id = new_answer_id("cmpl")
        self._created = int(time.time())
        self._choices = [_Choice(self, number) for number in range(len(prompts) * params.n)]
        self.generation: Generation = service.generation(self._id, prompts, params, body)

    @classmethod
    async def prepare(cls, service: GenerationService, fields: object) -> Completion:
        """Checks all of a request, its last prompt too, before anything is submitted. Raises InvalidRequestError."""
        body = parse(CompletionRequest, fields)
        service.check_model(body.model)
        params = _sampling_params(service, body)
        prompts = await _prompts(service, body)
        if len(prompts) * params.n > MAX_CHOICES:
            raise InvalidRequestError(
                f"prompt: {len(prompts)} prompts with n = {params.n} are more than {MAX_CHOICES} choices",
                param="prompt",
            )
        return cls(service, body, prompts, params)

    @property
    def is_stream(self) -> bool:
        return bool(self._body.stream)

    async def whole(self) -> dict[str, Any]:
        """The answer, when all choices have ended."""
        async with contextlib.aclosing(self._deltas()) as batches:
            async for deltas in batches:
                for delta in deltas:
                    self._choices[delta.index].keep(delta)
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._service.model_name,
            "choices": [choice.as_dict() for choice in self._choices],
            "usage": self.generation.usage(),
        }

    async def chunks(self) -> AsyncGenerator[list[str], None]:
        """Chunks as JSON texts, those of one moment together."""
        body = self._body
        writer = ChunkWriter(
            self._id, "text_completion", self._created, self._service.model_name, announces_usage=body.include_usage
        )
        async with contextlib.aclosing(self._deltas()) as batches:
            async for deltas in batches:
                usage = self.generation.usage() if body.continuous_usage else None
                chunks = []
                for delta in deltas:
                    text, logprobs = self._choices[delta.index].news(delta)
                    chunks.append(writer.text(delta.index, text, logprobs, delta.finish_reason, usage))
                yield chunks
        if body.include_usage:
            yield [writer.usage(self.generation.usage())]

    def _deltas(self) -> AsyncGenerator[list[ChoiceDelta], None]:
        return naming_grammar_field(self.generation.deltas(), self._body.structured()[1])

    def prompt_text(self, number: int) -> str:
        """The text of a prompt, for echo."""
        prompt = self._prompts[number]
        if prompt.text is not None:
            return prompt.text
        return self._service.tokenizer.decode(prompt.token_ids, self._params.skip_special_tokens)

    def new_logprobs(self) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        return CompletionLogprobs(
            self._service.tokenizer,
            num_top=self._body.logprobs,
            skip_special_tokens=self._params.skip_special_tokens,
        )

    def echo(self, index: int, logprobs: CompletionLogprobs | None) -> tuple[str, dict[str, Any] | None]:
        """What stands before the output of a choice, if the client wants the prompt there."""
        if not self._body.echo:
            return "", None
        number = index // self._params.n
        text = self.prompt_text(number)
        if logprobs is None:
            return text, None
        token_ids = self._prompts[number].token_ids
        return text, logprobs.prompt(token_ids, self.generation.prompt_logprobs(index), text)


class _Choice:
    """One choice, as it grows."""

    def __init__(self, completion: Completion, index: int) -> None:
        self._completion = completion
        self._index = index
        self._logprobs = completion.new_logprobs()
        self._has_begun = False
        self._texts: list[str] = []
        self._lists: dict[str, Any] | None = None
        self._finish_reason: str | None = None

    def news(self, delta: ChoiceDelta) -> tuple[str, dict[str, Any] | None]:
        """Text and log probabilities that a delta adds; the first one also brings the echo."""
        text, lists = "", None
        if not self._has_begun:
            self._has_begun = True
            text, lists = self._completion.echo(self._index, self._logprobs)
        if self._logprobs is not None:
            new = self._logprobs.output(
                delta.logprobs or [], is_last=delta.finish_reason is not None, hides_last=delta.hides_last_token
            )
            if lists is None:
                lists = new
            else:
                merge_lists(lists, new)
        return text + delta.text, lists

    def keep(self, delta: ChoiceDelta) -> None:
        text, lists = self.news(delta)
        self._texts.append(text)
        if self._lists is None:
            self._lists = lists
        elif lists is not None:
            merge_lists(self._lists, lists)
        self._finish_reason = delta.finish_reason

    def as_dict(self) -> dict[str, Any]:
        return {
            "index": self._index,
            "text": "".join(self._texts),
            "logprobs": self._lists,
            "finish_reason": self._finish_reason,
        }


# ----------------------------------------------------------------------------------------------------------------
# Checking
# ----------------------------------------------------------------------------------------------------------------


def _sampling_params(service: GenerationService, body: CompletionRequest) -> SamplingParams:
    scores_prompt = body.echo and (body.logprobs is not None or body.max_tokens == 0)
    return make_sampling_params(
        body,
        _without_max_tokens(service.info.generation_defaults),
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=(body.logprobs or 0) if scores_prompt else None,
        structured_output=body.structured()[0],
    )


def _without_max_tokens(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The API has a default of its own for that."""
    return {name: value for name, value in defaults.items() if name != "max_tokens"}


async def _prompts(service: GenerationService, body: CompletionRequest) -> list[Prompt]:
    """Each of the four forms of a prompt, with its tokens. Raises InvalidRequestError for any other."""
    given = body.prompt
    if isinstance(given, str):
        return [await _text_prompt(service, given, body, "prompt")]
    if not isinstance(given, list):
        raise InvalidRequestError(
            "prompt: must be a string, a list of strings, a list of token ids or a list of such lists, "
            f"not {shorten(given)}",
            param="prompt",
        )
    if not given:
        raise InvalidRequestError("prompt: must not be empty", param="prompt")
    if isinstance(given[0], int):
        service.check_token_ids(given, "prompt")
        return [Prompt(given)]
    if len(given) > MAX_CHOICES:
        raise InvalidRequestError(f"prompt: more than {MAX_CHOICES} prompts in one request", param="prompt")
    return [await _listed_prompt(service, item, body, f"prompt[{place}]") for place, item in enumerate(given)]


async def _listed_prompt(service: GenerationService, item: object, body: CompletionRequest, param: str) -> Prompt:
    if isinstance(item, str):
        return await _text_prompt(service, item, body, param)
    if isinstance(item, list):
        service.check_token_ids(item, param)
        return Prompt(item)
    raise InvalidRequestError(f"{param}: must be a string or a list of token ids, not {shorten(item)}", param=param)


async def _text_prompt(service: GenerationService, text: str, body: CompletionRequest, param: str) -> Prompt:
    if not text:
        raise InvalidRequestError(f"{param}: must not be empty", param=param)
    adds = body.add_special_tokens is not False
    token_ids = await service.encode(text, add_special_tokens=adds, param=param)
    service.check_token_ids(token_ids, param)
    return Prompt(token_ids, text)
