"""From the messages of a chat to the tokens of its prompt."""

from __future__ import annotations

import json
from typing import Any

from minivllm.actors.openai.protocol.errors import shorten
from minivllm.actors.openai.protocol.requests import ChatCompletionRequest, ChatMessage, TokenizeRequest, ToolCall
from minivllm.actors.openai.serving.generation import Prompt
from minivllm.actors.openai.serving.service import GenerationService
from minivllm.actors.openai.tools.tools import with_tools_in_text
from minivllm.core.errors import InvalidRequestError
from minivllm.core.text.tokenizer import Tokenizer


def chat_template(tokenizer: Tokenizer) -> str:
    """The model's template, empty if it has none; of several, the one for tools."""
    try:
        return str(tokenizer.hf_tokenizer.get_chat_template(None, tools=[{}]))
    except ValueError:
        return ""


async def chat_prompt(
    service: GenerationService,
    body: ChatCompletionRequest | TokenizeRequest,
    tools: list[dict[str, Any]] | None,
) -> Prompt:
    """The conversation as the model's template writes it, in tokens.

    Raises InvalidRequestError: a message is malformed, the template is missing or refuses the messages.
    """
    tokenizer = service.tokenizer
    template = chat_template(tokenizer)
    messages = [_message(message, place) for place, message in enumerate(body.messages or [])]
    if "tools" not in template:
        messages, tools = with_tools_in_text(messages, tools), None
    continues = bool(body.continue_final_message)
    text = tokenizer.render_chat(
        messages,
        tools=tools,
        continue_final_message=continues,
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        chat_template_kwargs=_template_variables(body),
    )
    token_ids = await service.encode(
        text,
        add_special_tokens=bool(body.add_special_tokens),
        param="messages",
        is_prompt=isinstance(body, ChatCompletionRequest),
    )
    if not token_ids:
        raise InvalidRequestError("messages: the model's chat template makes no tokens of these", param="messages")
    return Prompt(token_ids, text)


def _template_variables(body: ChatCompletionRequest | TokenizeRequest) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    if isinstance(body, ChatCompletionRequest) and body.documents is not None:
        variables["documents"] = body.documents
    return variables


def _message(message: ChatMessage, place: int) -> dict[str, Any]:
    """A message as templates expect it: content checked, arguments of tool calls as objects."""
    where = f"messages[{place}]"
    _check_content(message, where)
    fields = message.model_dump(exclude_none=True)
    if message.tool_calls is not None and message.role != "assistant":
        raise InvalidRequestError(
            f"{where}.tool_calls: only allowed in messages of the assistant", param=f"{where}.tool_calls"
        )
    if message.tool_calls:
        fields["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    fields.setdefault("content", "")
    return fields


def _check_content(message: ChatMessage, where: str) -> None:
    content = message.content
    if content is None:
        # An assistant that only called tools has said nothing.
        if message.role != "assistant":
            raise InvalidRequestError(f"{where}.content: is missing", param=f"{where}.content")
        return
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"{where}.content: must be a string or a list of parts, not {shorten(content)}", param=f"{where}.content"
        )
    for number, part in enumerate(content):
        here = f"{where}.content[{number}]"
        if not isinstance(part, dict):
            raise InvalidRequestError(f"{here}: must be an object, not {shorten(part)}", param=here)
        if part.get("type") != "text":
            raise InvalidRequestError(
                f"{here}.type: only text is supported by this model, not {shorten(part.get('type'))}",
                param=f"{here}.type",
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError(f"{here}.text: must be a string", param=f"{here}.text")


def _tool_call(call: ToolCall) -> dict[str, Any]:
    """Templates print arguments as JSON, so they want the object. A model's own malformed JSON is shown as it was."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, dict):
            arguments = parsed
    fields: dict[str, Any] = {
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments or {}},
    }
    return fields if call.id is None else {"id": call.id, **fields}
