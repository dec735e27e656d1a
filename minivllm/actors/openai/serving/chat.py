"""/v1/chat/completions: one answer or a stream of chunks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

from minivllm.actors.openai.protocol.fields import parse
from minivllm.actors.openai.protocol.requests import ChatCompletionRequest
from minivllm.actors.openai.protocol.sampling import make_sampling_params
from minivllm.actors.openai.protocol.sse import ChunkWriter
from minivllm.actors.openai.serving.chat_prompt import chat_prompt, chat_template
from minivllm.actors.openai.serving.generation import ChoiceDelta, Generation, Prompt, naming_grammar_field
from minivllm.actors.openai.serving.logprobs import chat_logprobs
from minivllm.actors.openai.serving.service import GenerationService, new_answer_id
from minivllm.actors.openai.tools.parsers import Parsed, ToolCallDelta
from minivllm.actors.openai.tools.tools import ToolUse
from minivllm.core.errors import InvalidRequestError
from minivllm.core.sampling_params import SamplingParams


class Chat:
    """One checked request; ask it once for either `whole()` or `chunks()`."""

    def __init__(
        self,
        service: GenerationService,
        body: ChatCompletionRequest,
        prompt: Prompt,
        params: SamplingParams,
        tool_use: ToolUse,
    ) -> None:
        self._service = service
        self._body = body
        self._params = params
        self._id = new_answer_id("chatcmpl")
        self._created = int(time.time())
        self._grammar_field = "tools" if tool_use.is_forced else body.structured()[1]
        self._choices = [_Choice(tool_use) for _ in range(params.n)]
        self.generation: Generation = service.generation(self._id, [prompt], params, body)

    @classmethod
    async def prepare(cls, service: GenerationService, fields: object) -> Chat:
        """Checks all of a request before anything is submitted. Raises InvalidRequestError."""
        body = parse(ChatCompletionRequest, fields)
        service.check_model(body.model)
        tool_use = ToolUse(body, chat_template(service.tokenizer) if body.tools else "")
        params = _sampling_params(service, body, tool_use)
        prompt = await chat_prompt(service, body, tool_use.tools)
        service.check_length(len(prompt.token_ids), "messages")
        return cls(service, body, prompt, params, tool_use)

    @property
    def is_stream(self) -> bool:
        return bool(self._body.stream)

    async def whole(self) -> dict[str, Any]:
        """The answer, when all choices have ended."""
        async with contextlib.aclosing(self._deltas()) as batches:
            async for deltas in batches:
                for delta in deltas:
                    self._choices[delta.index].keep(delta, self._logprobs(delta))
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._service.model_name,
            "choices": [choice.as_dict(index) for index, choice in enumerate(self._choices)],
            "usage": self.generation.usage(),
        }

    async def chunks(self) -> AsyncGenerator[list[str], None]:
        """Chunks as JSON texts, those of one moment together."""
        body = self._body
        writer = ChunkWriter(
            self._id,
            "chat.completion.chunk",
            self._created,
            self._service.model_name,
            announces_usage=body.include_usage,
        )
        async with contextlib.aclosing(self._deltas()) as batches:
            async for deltas in batches:
                chunks: list[str] = []
                for delta in deltas:
                    self._write(writer, delta, chunks)
                if chunks:
                    yield chunks
        if body.include_usage:
            yield [writer.usage(self.generation.usage())]

    def _write(self, writer: ChunkWriter, delta: ChoiceDelta, chunks: list[str]) -> None:
        """The chunks of one delta: the role first of all, and the reason at the very end."""
        choice = self._choices[delta.index]
        usage = self.generation.usage() if self._body.continuous_usage else None
        if not choice.has_begun:
            choice.has_begun = True
            chunks.append(writer.delta(delta.index, {"role": "assistant", "content": ""}, usage=usage))
        parsed, finish_reason = choice.read(delta)
        logprobs = self._logprobs(delta)
        if parsed.calls:
            fields: dict[str, Any] = {"tool_calls": [_call_chunk(call) for call in parsed.calls]}
            if parsed.content:
                fields["content"] = parsed.content
            chunks.append(writer.delta(delta.index, fields, logprobs, finish_reason, usage))
        elif parsed.content or finish_reason is not None or logprobs is not None:
            chunks.append(writer.content(delta.index, parsed.content, logprobs, finish_reason, usage))

    def _deltas(self) -> AsyncGenerator[list[ChoiceDelta], None]:
        return naming_grammar_field(self.generation.deltas(), self._grammar_field)

    def _logprobs(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        content = chat_logprobs(
            self._service.tokenizer,
            delta.logprobs or [],
            num_top=self._body.top_logprobs or 0,
            skip_special_tokens=self._params.skip_special_tokens,
            hides_last=delta.hides_last_token,
        )
        return {"content": content}


class _Choice:
    """One choice, as it grows."""

    def __init__(self, tool_use: ToolUse) -> None:
        self.has_begun = False
        self._parser = tool_use.parser()
        self._is_named = tool_use.is_named
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] | None = None
        self._finish_reason: str | None = None

    def read(self, delta: ChoiceDelta) -> tuple[Parsed, str | None]:
        """What a delta says, calls told from content, and why the choice ends if it does."""
        if self._parser is None:
            return Parsed(delta.text), delta.finish_reason
        parsed = self._parser.feed(delta.text)
        reason = delta.finish_reason
        if reason is not None:
            rest = self._parser.finish()
            parsed = Parsed(parsed.content + rest.content, parsed.calls + rest.calls)
            # A named function is what the client wanted, and no decision of the model: there OpenAI says "stop".
            if reason == "stop" and self._parser.num_calls and not self._is_named:
                reason = "tool_calls"
        return parsed, reason

    def keep(self, delta: ChoiceDelta, logprobs: dict[str, Any] | None) -> None:
        parsed, self._finish_reason = self.read(delta)
        self._content.append(parsed.content)
        for call in parsed.calls:
            if call.name is not None:
                self._calls.append(
                    {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": ""}}
                )
            self._calls[call.index]["function"]["arguments"] += call.arguments
        if logprobs is not None:
            self._logprobs = (self._logprobs or []) + logprobs["content"]

    def as_dict(self, index: int) -> dict[str, Any]:
        content: str | None = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self._calls:
            message = {"role": "assistant", "content": content or None, "tool_calls": self._calls}
        return {
            "index": index,
            "message": message,
            "logprobs": None if self._logprobs is None else {"content": self._logprobs},
            "finish_reason": self._finish_reason,
        }


def _call_chunk(call: ToolCallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.call_id, "type": "function", "function": function}


def _sampling_params(service: GenerationService, body: ChatCompletionRequest, tool_use: ToolUse) -> SamplingParams:
    structured, field = body.structured()
    if tool_use.is_forced:
        if structured is not None:
            raise InvalidRequestError(f"{field}: excludes a tool_choice that forces a call", param=field)
        structured = tool_use.grammar()
    defaults = service.info.generation_defaults
    newer = body.max_completion_tokens
    max_tokens = newer if newer is not None else body.max_tokens
    return make_sampling_params(
        body,
        defaults,
        max_tokens=defaults.get("max_tokens") if max_tokens is None else max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structured_output=structured,
        renamed={} if newer is None else {"max_tokens": "max_completion_tokens"},
    )
