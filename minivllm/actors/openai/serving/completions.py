"""/v1/completions: prompts, echo, and the choices with their log probabilities."""

from __future__ import annotations

from typing import Any

from minivllm.actors.openai.protocol.errors import shorten, wrong_field
from minivllm.actors.openai.protocol.requests import CompletionRequest
from minivllm.actors.openai.protocol.sse import ChunkWriter
from minivllm.actors.openai.serving.generation import ChoiceDelta, Generation, Prompt
from minivllm.actors.openai.serving.logprobs import CompletionLogprobs, merge_lists
from minivllm.actors.openai.serving.service import GenerationService
from minivllm.core.sampling_params import SamplingParams

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
        _TextChoice(service, body, prompts[index // params.n], params, index)
        for index in range(len(prompts) * params.n)
    ]
    return Generation(
        service,
        body,
        prompts,
        params,
        choices,
        id_prefix="cmpl",
        kind="text_completion",
        chunk_kind="text_completion",
        grammar_field=grammar_field,
    )


class _TextChoice:
    """A choice of /v1/completions."""

    def __init__(
        self, service: GenerationService, body: CompletionRequest, prompt: Prompt, params: SamplingParams, index: int
    ) -> None:
        self._index = index
        self._tokenizer = service.tokenizer
        self._prompt = prompt
        self._skip_special_tokens = params.skip_special_tokens
        self._logprobs: CompletionLogprobs | None = None
        if body.logprobs is not None:
            self._logprobs = CompletionLogprobs(
                service.tokenizer, num_top=body.logprobs, skip_special_tokens=params.skip_special_tokens
            )
        self._must_echo = bool(body.echo)
        self._text: list[str] = []
        self._lists: dict[str, Any] | None = None
        self._finish_reason: str | None = None

    def add(self, delta: ChoiceDelta) -> None:
        text, lists = self._read(delta)
        self._text.append(text)
        self._lists = merge_lists(self._lists, lists)
        self._finish_reason = delta.finish_reason

    def to_dict(self) -> dict[str, Any]:
        return {
            "index": self._index,
            "text": "".join(self._text),
            "logprobs": self._lists,
            "finish_reason": self._finish_reason,
        }

    def chunks(self, delta: ChoiceDelta, writer: ChunkWriter, usage: dict[str, Any] | None) -> list[str]:
        text, lists = self._read(delta)
        return [writer.text(self._index, text, lists, delta.finish_reason, usage)]

    def _read(self, delta: ChoiceDelta) -> tuple[str, dict[str, Any] | None]:
        """Returns the text and the log probabilities of a delta; of the first one with the echoed prompt before it."""
        text, lists = self._echo(delta) if self._must_echo else ("", None)
        self._must_echo = False
        if self._logprobs is not None:
            output = self._logprobs.output(
                delta.logprobs or [], is_last=delta.finish_reason is not None, hides_last=delta.hides_last_token
            )
            lists = merge_lists(lists, output)
        return text + delta.text, lists

    def _echo(self, delta: ChoiceDelta) -> tuple[str, dict[str, Any] | None]:
        prompt = self._prompt
        text = prompt.text
        if text is None:
            text = self._tokenizer.decode(prompt.token_ids, self._skip_special_tokens)
        if self._logprobs is None:
            return text, None
        return text, self._logprobs.prompt(prompt.token_ids, delta.prompt_logprobs, text)


async def _prompts(service: GenerationService, body: CompletionRequest) -> list[Prompt]:
    """Returns the prompts of any of the four forms, tokenized. Raises InvalidRequestError for another form."""
    given = body.prompt
    if isinstance(given, list):
        if not given:
            raise wrong_field("prompt", "must not be empty")
        if isinstance(given[0], int):
            return [await _prompt(service, given, body, "prompt")]
        if len(given) > MAX_CHOICES:
            raise wrong_field("prompt", f"more than {MAX_CHOICES} prompts in one request")
        return [await _prompt(service, item, body, f"prompt[{place}]") for place, item in enumerate(given)]
    if isinstance(given, str):
        return [await _prompt(service, given, body, "prompt")]
    kinds = "a string, a list of strings, a list of token ids or a list of such lists"
    raise wrong_field("prompt", f"must be {kinds}, not {shorten(given)}")


async def _prompt(service: GenerationService, item: object, body: CompletionRequest, param: str) -> Prompt:
    if isinstance(item, list):
        service.check_token_ids(item, param)
        return Prompt(item)
    if not isinstance(item, str):
        raise wrong_field(param, f"must be a string or a list of token ids, not {shorten(item)}")
    if not item:
        raise wrong_field(param, "must not be empty")
    token_ids = await service.encode(item, add_special_tokens=body.add_special_tokens is not False, param=param)
    service.check_token_ids(token_ids, param)
    return Prompt(token_ids, item)
