"""/v1/chat/completions: the prompt by the model's chat template, and the choices with their tool calls."""

from __future__ import annotations

import contextlib
import json
from functools import partial
from typing import Any

from minivllm.actors.openai.protocol.errors import shorten, wrong_field
from minivllm.actors.openai.protocol.requests import ChatCompletionRequest, ChatMessage, TokenizeRequest, ToolCall
from minivllm.actors.openai.protocol.sse import ChunkWriter
from minivllm.actors.openai.serving.generation import ChoiceDelta, Generation, Prompt
from minivllm.actors.openai.serving.logprobs import chat_logprobs
from minivllm.actors.openai.serving.service import GenerationService
from minivllm.actors.openai.tools.parsers import Parsed, ToolCallDelta
from minivllm.actors.openai.tools.tools import ToolUse, with_tools_in_text
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.text.tokenizer import Tokenizer

INLINE_MESSAGES = 100
"""A conversation of this length is checked and rendered in about a millisecond."""


async def chat_completion(service: GenerationService, body: ChatCompletionRequest) -> Generation:
    """Checks a request and tokenizes its conversation, without submitting it. Raises InvalidRequestError."""
    service.check_model(body.model)
    template = service.tokenizer.chat_template(with_tools=True) if body.tools else None
    tool_use = ToolUse(body, template or "")
    grammar, grammar_field = body.structured()
    if tool_use.is_forced:
        if grammar is not None:
            raise wrong_field(grammar_field, "excludes a tool_choice that forces a call")
        grammar, grammar_field = tool_use.grammar(), "tools"
    elif grammar is not None:
        grammar = tool_use.or_calls(grammar, service.tokenizer.has_added_token)
    params = body.to_sampling_params(service.info.generation_defaults, grammar)
    prompt = await chat_prompt(service, body, tool_use.tools)
    service.check_length(len(prompt.token_ids), "messages")
    choices = [_ChatChoice(service.tokenizer, params, tool_use) for _ in range(params.n)]
    kinds = "chatcmpl", "chat.completion", "chat.completion.chunk"
    return Generation(service, body, [prompt], params, choices, grammar_field, kinds)


class _ChatChoice:
    """A choice of /v1/chat/completions."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, tool_use: ToolUse) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._parser = tool_use.parser()
        self._is_named = tool_use.is_named
        self._has_begun = False

    def to_dict(self, whole: ChoiceDelta) -> dict[str, Any]:
        parsed, finish_reason = self._parse(whole, is_whole=True)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.calls:
            calls = [_call_fields(call) for call in parsed.calls]
            message |= {"content": parsed.content or None, "tool_calls": calls}
        logprobs = self._logprobs(whole)
        return {"index": whole.index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}

    def chunks(self, delta: ChoiceDelta, writer: ChunkWriter, usage: dict[str, Any] | None) -> list[str]:
        """Formats the role before the first delta, and the finish reason in the last one."""
        chunks: list[str] = []
        if not self._has_begun:
            self._has_begun = True
            chunks.append(writer.delta(delta.index, {"role": "assistant", "content": ""}, usage=usage))
        parsed, finish_reason = self._parse(delta)
        logprobs = self._logprobs(delta)
        if parsed.calls:
            calls = [{"index": call.index, **_call_fields(call)} for call in parsed.calls]
            fields = {"tool_calls": calls} | ({"content": parsed.content} if parsed.content else {})
            chunks.append(writer.delta(delta.index, fields, logprobs, finish_reason, usage))
        elif parsed.content or finish_reason is not None or logprobs is not None:
            chunks.append(writer.content(delta.index, parsed.content, logprobs, finish_reason, usage))
        return chunks

    def _parse(self, delta: ChoiceDelta, *, is_whole: bool = False) -> tuple[Parsed, str | None]:
        """Returns content and tool calls of a delta or of the whole, and the finish reason of the last one."""
        reason = delta.finish_reason
        if self._parser is None:
            return Parsed(delta.text), reason
        if is_whole:
            parsed = self._parser.parse(delta.text)
        else:
            parsed = self._parser.feed(delta.text, is_last=reason is not None)
        # As in OpenAI's API, "stop" for a function that the client named: the model did not decide to call it.
        if reason == "stop" and self._parser.ends_with_calls and not self._is_named:
            reason = "tool_calls"
        return parsed, reason

    def _logprobs(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        if self._params.logprobs is None:
            return None
        hides_last = delta.hides_last_token
        return {"content": chat_logprobs(self._tokenizer, delta.logprobs, self._params, hides_last=hides_last)}


def _call_fields(call: ToolCallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


# ---- prompt


async def chat_prompt(
    service: GenerationService, body: ChatCompletionRequest | TokenizeRequest, tools: list[dict[str, Any]] | None
) -> Prompt:
    """Renders the conversation by the model's template and tokenizes it.

    Raises InvalidRequestError: a message is malformed, the template is missing or rejects the messages.
    """
    if not body.is_large and len(body.messages or []) <= INLINE_MESSAGES:
        text = _render(service.tokenizer, body, tools)
    else:
        text = await service.in_thread(partial(_render, service.tokenizer, body, tools), is_long=True)
    adds, is_prompt = bool(body.add_special_tokens), isinstance(body, ChatCompletionRequest)
    token_ids = await service.encode(text, add_special_tokens=adds, param="messages", is_prompt=is_prompt)
    if not token_ids:
        raise wrong_field("messages", "the model's chat template makes no tokens of these")
    return Prompt(token_ids, text)


def _render(
    tokenizer: Tokenizer, body: ChatCompletionRequest | TokenizeRequest, tools: list[dict[str, Any]] | None
) -> str:
    messages = [_message(message, f"messages[{place}]") for place, message in enumerate(body.messages or [])]
    if "tools" not in (tokenizer.chat_template(with_tools=True) or ""):
        messages, tools = with_tools_in_text(messages, tools), None
    continues = bool(body.continue_final_message)
    variables = dict(body.chat_template_kwargs or {})
    if isinstance(body, ChatCompletionRequest) and body.documents is not None:
        variables["documents"] = body.documents
    return tokenizer.render_chat(
        messages,
        tools=tools,
        continue_final_message=continues,
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        chat_template_kwargs=variables,
    )


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    """Returns a checked message in the form that templates expect."""
    _check_content(message, where)
    fields = message.model_dump(exclude_none=True)
    if not message.tool_calls:
        fields.pop("tool_calls", None)  # templates may ask whether there are any by the field's presence
    elif message.role != "assistant":
        raise wrong_field(f"{where}.tool_calls", "only allowed in messages of the assistant")
    else:
        fields["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    fields.setdefault("content", "")
    return fields


def _check_content(message: ChatMessage, where: str) -> None:
    """Raises InvalidRequestError unless the content is a text, a list of text parts, or null of the assistant."""
    content, where = message.content, f"{where}.content"
    if content is None and message.role != "assistant":
        raise wrong_field(where, "is missing")
    if not isinstance(content, str | list | None):
        raise wrong_field(where, f"must be a string or a list of parts, not {shorten(content)}")
    for number, part in enumerate(content if isinstance(content, list) else []):
        here = f"{where}[{number}]"
        if not isinstance(part, dict):
            raise wrong_field(here, f"must be an object, not {shorten(part)}")
        if part.get("type") != "text":
            raise wrong_field(f"{here}.type", f"only text is supported by this model, not {shorten(part.get('type'))}")
        if not isinstance(part.get("text"), str):
            raise wrong_field(f"{here}.text", "must be a string")


def _tool_call(call: ToolCall) -> dict[str, Any]:
    """Parses the arguments, which templates format as JSON themselves. Malformed ones stay text."""
    arguments = call.function.arguments or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            parsed = json.loads(arguments.strip() or "{}")
            arguments = parsed if isinstance(parsed, dict) else arguments
    fields = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return fields if call.id is None else {"id": call.id, **fields}
