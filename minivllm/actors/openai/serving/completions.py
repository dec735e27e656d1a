"""/v1/completions: prompts, echo, and the choices with their log probabilities."""

from __future__ import annotations

import asyncio
from typing import Any

from minivllm.actors.openai.protocol.errors import shorten, wrong_field
from minivllm.actors.openai.protocol.requests import CompletionRequest, whole
from minivllm.actors.openai.protocol.sse import ChunkWriter
from minivllm.actors.openai.serving.generation import ChoiceDelta, Generation, Prompt
from minivllm.actors.openai.serving.logprobs import CompletionLogprobs
from minivllm.actors.openai.serving.service import GenerationService
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.text.tokenizer import Tokenizer

MAX_CHOICES = 1024
"""Prompts times n of one request."""


async def completion(service: GenerationService, body: CompletionRequest) -> Generation:
    """Checks a request and tokenizes its prompts, without submitting any. Raises InvalidRequestError."""
    service.check_model(body.model)
    grammar, grammar_field = body.structured()
    params = body.to_sampling_params(service.info.generation_defaults, grammar)
    prompts = await _prompts(service, body)
    if len(prompts) * params.n > MAX_CHOICES:
        raise wrong_field("prompt", f"{len(prompts)} prompts with n = {params.n} are more than {MAX_CHOICES} choices")
    choices = [
        _TextChoice(service.tokenizer, prompts[index // params.n], params, bool(body.echo))
        for index in range(len(prompts) * params.n)
    ]
    kinds = "cmpl", "text_completion", "text_completion"
    return Generation(service, body, prompts, params, choices, grammar_field, kinds)


class _TextChoice:
    """A choice of /v1/completions."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, params: SamplingParams, must_echo: bool) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._params = params
        self._must_echo = must_echo
        self._logprobs = None if params.logprobs is None else CompletionLogprobs(tokenizer, params)

    def to_dict(self, whole: ChoiceDelta) -> dict[str, Any]:
        text, lists = self._read(whole)
        return {"index": whole.index, "text": text, "logprobs": lists, "finish_reason": whole.finish_reason}

    def chunks(self, delta: ChoiceDelta, writer: ChunkWriter, usage: dict[str, Any] | None) -> list[str]:
        text, lists = self._read(delta)
        return [writer.text(delta.index, text, lists, delta.finish_reason, usage)]

    def _read(self, delta: ChoiceDelta) -> tuple[str, dict[str, list[Any]] | None]:
        """Returns the text and the log probabilities of a delta; of the first one with the echoed prompt before it."""
        echo, lists = "", None
        if self._must_echo:
            self._must_echo = False
            token_ids, text = self._prompt.token_ids, self._prompt.text
            echo = self._tokenizer.decode(token_ids, self._params.skip_special_tokens) if text is None else text
            if self._logprobs is not None:
                lists = self._logprobs.prompt(token_ids, delta.prompt_logprobs, echo)
        if self._logprobs is not None:
            is_last = delta.finish_reason is not None
            output = self._logprobs.output(delta.logprobs, is_last=is_last, hides_last=delta.hides_last_token)
            lists = output if lists is None else {name: lists[name] + values for name, values in output.items()}
        return echo + delta.text, lists


async def _prompts(service: GenerationService, body: CompletionRequest) -> list[Prompt]:
    """Returns the prompts of any of the four forms, tokenized. Raises InvalidRequestError for another form."""
    given = whole(body.prompt)
    if isinstance(given, list) and not (given and isinstance(given[0], int)):
        if not given:
            raise wrong_field("prompt", "must not be empty")
        if len(given) > MAX_CHOICES:
            raise wrong_field("prompt", f"more than {MAX_CHOICES} prompts in one request")
        prompts = []
        for place, item in enumerate(given):
            prompts.append(await _prompt(service, item, body, f"prompt[{place}]"))
            await asyncio.sleep(0)  # other requests do not wait for a thousand prompts
        return prompts
    if isinstance(given, str | list):
        return [await _prompt(service, given, body, "prompt")]
    kinds = "a string, a list of strings, a list of token ids or a list of such lists"
    raise wrong_field("prompt", f"must be {kinds}, not {shorten(given)}")


async def _prompt(service: GenerationService, item: object, body: CompletionRequest, param: str) -> Prompt:
    if not isinstance(item, str | list):
        raise wrong_field(param, f"must be a string or a list of token ids, not {shorten(item)}")
    text = item if isinstance(item, str) else None
    token_ids = whole(item) if isinstance(item, list) else []
    if text:
        adds = body.add_special_tokens is not False
        token_ids = await service.encode(text, add_special_tokens=adds, param=param)
    service.check_token_ids(token_ids, param)
    return Prompt(token_ids, text)
