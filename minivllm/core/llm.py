"""LLM: generates text from prompts in this process, without a server."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeGuard

from tqdm import tqdm

from minivllm.core.config import DEFAULT_MODEL, EngineConfig
from minivllm.core.engine import LLMEngine
from minivllm.core.errors import EngineDeadError, EngineOverloadedError, InvalidRequestError, MinivllmError
from minivllm.core.outputs import RequestOutput, TokenLogprobs
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.sequence import FinishReason
from minivllm.core.text.detokenizer import IncrementalDetokenizer
from minivllm.core.text.tokenizer import Tokenizer, load_tokenizer

Prompt: TypeAlias = str | list[int]
Message: TypeAlias = dict[str, Any]


@dataclass(slots=True)
class Completion:
    """One sample of a prompt. `token_ids` and `logprobs` end with the text; see `IncrementalDetokenizer`."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None = None
    stop_reason: str | int | None = None
    num_tokens: int = 0
    error: MinivllmError | None = None


@dataclass(slots=True)
class GenerationResult:
    """All samples of one prompt. `text`, `token_ids`, ... are those of the first sample."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion] = field(default_factory=list)
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.outputs[0].logprobs


@dataclass(slots=True)
class _Job:
    """A prompt, and the outputs of its samples so far."""

    result: GenerationResult
    params: SamplingParams
    texts: list[IncrementalDetokenizer]
    errors: dict[int, MinivllmError] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return all(text.finished for text in self.texts)

    def take(self, output: RequestOutput) -> bool:
        """Adds an output. Returns True if its text has reached a stop string, so the sample must be aborted."""
        text = self.texts[output.index]
        if text.finished:
            return False  # sampled before the abort took effect
        if output.index == 0:
            self.result.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.result.prompt_logprobs = (self.result.prompt_logprobs or []) + output.prompt_logprobs
        if output.error is not None:
            self.errors[output.index] = output.error
        delta = text.push(
            output.new_token_ids,
            output.logprobs,
            finish_reason=output.finish_reason,
            stop_token_id=output.stop_token_id,
        )
        return delta.finish_reason is not None and not output.finished

    def finish(self) -> GenerationResult:
        self.result.outputs = [
            Completion(
                index=index,
                text=text.text,
                token_ids=text.token_ids,
                finish_reason=text.finish_reason or FinishReason.ABORT,
                logprobs=text.logprobs if self.params.logprobs is not None else None,
                stop_reason=text.stop_reason,
                num_tokens=text.num_tokens,
                error=self.errors.get(index),
            )
            for index, text in enumerate(self.texts)
        ]
        return self.result


class LLM:
    """Generates text from prompts, all in one batch, in this process. Not safe to use from several threads at once.

    `model` is a hub id, folder, `.gguf` file, or the packaged model. `engine_config` are fields of `EngineConfig`;
    unlike a server, the queue has no limit unless one is given. Raises pydantic's ValidationError (a ValueError) on a
    wrong name or value, ModelLoadError if the model cannot be served.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **engine_config: Any) -> None:
        config = EngineConfig(**{"max_waiting_requests": None, **engine_config, "model": model})
        self.tokenizer: Tokenizer = load_tokenizer(config)
        self.engine = LLMEngine(config)
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Prompt | Items[Prompt],
        sampling_params: SamplingParams | Items[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[GenerationResult]:
        """Completes prompts: a text or a list of token ids, or a list of these.

        Returns one result per prompt, in order. A sample that failed alone has finish_reason "error" and `error`.
        Raises InvalidRequestError if a prompt or its parameters cannot be served, and then aborts all prompts of the
        call; EngineDeadError if the engine failed.

        Args:
            sampling_params: one for all prompts, or one per prompt.
            use_tqdm: show a progress bar with tokens/s.
        """
        items = _as_prompts(prompts)
        token_ids = [self.tokenizer.encode(item) if isinstance(item, str) else list(item) for item in items]
        return self._run(items, token_ids, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Items[Message] | Items[Items[Message]],
        sampling_params: SamplingParams | Items[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[GenerationResult]:
        """Completes one conversation (a list of messages in OpenAI's format) or a list of conversations.

        `template_options` are `add_generation_prompt`, `continue_final_message`, `tools`, `chat_template_kwargs`.
        Returns and raises the same as `generate`; InvalidRequestError also if the chat template rejects the messages.
        """
        conversations = _as_conversations(messages)
        texts = [self.tokenizer.render_chat(list(talk), **template_options) for talk in conversations]
        token_ids = [self.tokenizer.encode(text, add_special_tokens=False, param="messages") for text in texts]
        return self._run(texts, token_ids, sampling_params, use_tqdm)

    def _run(
        self,
        prompts: Items[Prompt],
        token_ids: list[list[int]],
        sampling_params: SamplingParams | Items[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[GenerationResult]:
        """Adds all prompts and steps until they have ended. On an exception all of them are aborted."""
        jobs: dict[str, _Job] = {}
        for prompt, ids, params in zip(prompts, token_ids, _as_params(sampling_params, len(prompts)), strict=True):
            name = f"llm-{next(self._numbers)}"
            result = GenerationResult(name, prompt if isinstance(prompt, str) else None, ids)
            jobs[name] = _Job(result, params, [IncrementalDetokenizer(self.tokenizer, params) for _ in range(params.n)])
        try:
            with tqdm(
                total=len(jobs), desc="Generating", unit="prompt", disable=not use_tqdm, dynamic_ncols=True
            ) as bar:
                live, progress = dict(jobs), _Progress(bar)
                for job in jobs.values():
                    self._add(job, live, progress)
                while self.engine.has_unfinished_requests():
                    self._step(live, progress)
        except BaseException:
            for name in jobs:
                self.engine.abort_request(name)
            while self.engine.has_unfinished_requests():  # until their blocks are free
                self.engine.step()
            raise
        return [job.finish() for job in jobs.values()]

    def _add(self, job: _Job, live: dict[str, _Job], progress: _Progress) -> None:
        while True:
            try:
                self.engine.add_request(job.result.request_id, job.result.prompt_token_ids, job.params)
                return
            except EngineOverloadedError:
                if not self.engine.has_unfinished_requests():
                    raise
                self._step(live, progress)

    def _step(self, live: dict[str, _Job], progress: _Progress) -> None:
        for output in self.engine.step():
            if isinstance(output.error, EngineDeadError):
                raise output.error
            job = live.get(output.request_id)
            if job is None:
                continue  # of an earlier call that was interrupted, or sampled before an abort took effect
            progress.num_output_tokens += len(output.new_token_ids)
            if job.take(output):
                self.engine.abort_request(output.request_id, output.index)
            if job.is_done:
                del live[output.request_id]
                progress.finish_one(job)


@dataclass(slots=True)
class _Progress:
    """A progress bar: completed prompts, and tokens/s."""

    bar: tqdm
    num_input_tokens: int = 0
    num_output_tokens: int = 0

    def finish_one(self, job: _Job) -> None:
        self.num_input_tokens += len(job.result.prompt_token_ids)
        seconds = max(self.bar.format_dict["elapsed"], 1e-9)
        rates = self.num_input_tokens / seconds, self.num_output_tokens / seconds
        self.bar.set_postfix_str("in: {:.1f} tokens/s, out: {:.1f} tokens/s".format(*rates), refresh=False)
        self.bar.update(1)


def _as_prompts(prompts: Prompt | Items[Prompt]) -> list[Prompt]:
    """Returns one prompt or several as a list."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise InvalidRequestError("prompt: must be a text, a list of token ids, or a list of such", param="prompt")
    if prompts and _are_token_ids(prompts):
        return [list(prompts)]
    for place, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and not _are_token_ids(prompt):
            raise InvalidRequestError(f"prompt[{place}]: must be a text or a list of token ids", param="prompt")
    return list(prompts)


def _are_token_ids(prompt: object) -> TypeGuard[Items[int]]:
    return isinstance(prompt, (list, tuple)) and all(type(item) is int for item in prompt)


def _as_conversations(messages: Items[Message] | Items[Items[Message]]) -> list[list[Message]]:
    """Returns one conversation or several as a list."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequestError("messages: must be a list of messages, not empty", param="messages")
    if all(isinstance(message, dict) for message in messages):
        return [list(messages)]
    if all(isinstance(talk, (list, tuple)) for talk in messages):
        return [list(talk) for talk in messages]
    raise InvalidRequestError("messages: must be a list of messages, or a list of such lists", param="messages")


def _as_params(params: SamplingParams | Items[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, (list, tuple)) or not all(isinstance(one, SamplingParams) for one in params):
        raise InvalidRequestError(
            "sampling_params: must be SamplingParams, or a list of them, one per prompt", param="sampling_params"
        )
    if len(params) != count:
        message = f"sampling_params: {len(params)} for {count} prompts; give one, or one per prompt"
        raise InvalidRequestError(message, param="sampling_params")
    return list(params)
