"""Tools of a chat request: their description in the prompt, the grammar of a forced call, the parser of calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

from minivllm.actors.openai.protocol.errors import wrong_field
from minivllm.actors.openai.protocol.requests import ChatCompletionRequest, NamedToolChoice, Tool
from minivllm.actors.openai.tools.parsers import (
    CLOSE_TAG,
    OPEN_TAG,
    PYTHON_TAG,
    ArgumentsParser,
    HermesParser,
    JsonParser,
    ToolParser,
)
from minivllm.core.errors import InvalidRequestError
from minivllm.core.json_schema import JSON_OPTIONS, closed, embedded
from minivllm.core.sampling_params import StructuredOutput

CallFormat = Literal["hermes", "llama"]


def call_format(template: str) -> CallFormat:
    """Returns the format of the calls that a model with this chat template writes; Hermes by default."""
    if OPEN_TAG in template:
        return "hermes"
    return "llama" if PYTHON_TAG in template or '{"name": function name, "parameters"' in template else "hermes"


class ToolUse:
    """How one chat request uses tools. The model's chat `template` shows the format of its calls.

    Raises InvalidRequestError when the tools and the tool_choice of the request contradict each other.
    """

    def __init__(self, body: ChatCompletionRequest, template: str) -> None:
        tools = body.tools or []
        choice = body.tool_choice or ("auto" if tools else "none")
        if not tools and choice not in ("none", "auto"):
            raise wrong_field("tool_choice", "there are no tools to choose from")
        names = [tool.function.name for tool in tools]
        for place, name in enumerate(names):
            if name in names[:place]:
                raise wrong_field(f"tools[{place}].function.name", f"{name!r} is given twice")
        self._format = call_format(template)
        self._tools = tools if choice != "none" else []
        self._choice = choice
        # A forced call is one call unless the client asks for more: a small model does not end a list by itself.
        self._one_call = body.parallel_tool_calls is False
        self._forced_list = choice == "required" and body.parallel_tool_calls is True

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """The tools for the chat template; None when the model must not see any."""
        return [tool.model_dump(exclude_none=True) for tool in self._tools] or None

    @property
    def is_forced(self) -> bool:
        return bool(self._tools) and self._choice not in ("none", "auto")

    @property
    def is_named(self) -> bool:
        return isinstance(self._choice, NamedToolChoice)

    def grammar(self) -> StructuredOutput:
        """Returns the grammar of a forced call. Raises InvalidRequestError for a name that no tool has."""
        if isinstance(self._choice, NamedToolChoice):
            name = self._choice.function.name
            named = next((tool for tool in self._tools if tool.function.name == name), None)
            if named is None:
                message = f"tool_choice: there is no tool of the name {name[:100]!r} in tools"
                raise InvalidRequestError(message, param="tool_choice.function.name")
            schema = _parameters(named)
        else:
            schema = self._any_call()
        return StructuredOutput(kind="json_schema", value=json.dumps(schema))

    def _any_call(self) -> dict[str, Any]:
        """Returns the schema of a call of any tool, or of a list of calls."""
        key = "parameters" if self._format == "llama" else "arguments"
        calls, parameters = [], {}
        for number, tool in enumerate(self._tools):
            place = f"#/$defs/{number}"
            parameters[f"{number}"] = _parameters(tool, place)
            calls.append(_call_schema(tool, key, place))
        schema: dict[str, Any] = {"anyOf": calls}
        if self._forced_list:
            schema = {"type": "array", "items": schema, "minItems": 1}
        return {**schema, "$defs": parameters}

    def or_calls(self, answer: StructuredOutput, has_token: Callable[[str], bool]) -> StructuredOutput:
        """Returns the grammar of a text answer, widened by calls where the model may make some instead.

        A Lark grammar of the client's stays as it is: it may contain calls itself. `has_token` tells whether the
        tokenizer has a token for a tag.
        """
        if not self._tools or answer.kind == "grammar":
            return answer

        def tag(text: str) -> str:
            # llguidance knows a token for a tag by its name only, not by its characters.
            return f'({text} | "{text}")' if has_token(text) else f'"{text}"'

        is_llama = self._format == "llama"
        if is_llama:
            calls = f"{tag(PYTHON_TAG)}? call" + ("" if self._one_call else " (/ ?[;,]?[ \\n]?/ call)*")
        else:
            spaces = r"/[ \n]{0,2}/"
            calls = f"({spaces} {tag(OPEN_TAG)} {spaces} call {spaces} {tag(CLOSE_TAG)} {spaces})"
            calls += "" if self._one_call else "+"
        schema = _free_call([tool.function.name for tool in self._tools], "parameters" if is_llama else "arguments")
        return answer.model_copy(update={"calls": f"calls: {calls}\ncall: %json {json.dumps(schema)}\n"})

    def parser(self) -> ToolParser | None:
        """Returns a new parser for the text of one choice, None when all of it is content."""
        if not self._tools:
            return None
        if isinstance(self._choice, NamedToolChoice):
            return ArgumentsParser(self._choice.function.name)
        names = {tool.function.name for tool in self._tools}
        kind = JsonParser if self._format == "llama" else HermesParser
        if self._choice == "required":
            return JsonParser(names=names, arguments_key=kind.arguments_key)
        return kind(max_calls=1 if self._one_call else None, names=names)


def _parameters(tool: Tool, place: str | None = None) -> dict[str, Any]:
    """Returns the schema of a tool's arguments, perhaps to stand at `place` in another schema.

    It is closed: a small model that may invent arguments does so until its tokens are used up.
    """
    try:
        schema = closed(tool.function.parameters or {"type": "object", "properties": {}})
        return schema if place is None else embedded(schema, place)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise wrong_field("tools", f"the parameters of {tool.function.name} cannot be used: {reason}") from error


def _call_schema(tool: Tool, arguments_key: str, place: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, arguments_key: {"$ref": place}},
        "required": ["name", arguments_key],
        "additionalProperties": False,
    }


def _free_call(names: list[str], arguments_key: str) -> dict[str, Any]:
    """Returns the schema of a call of one of these functions with any arguments."""
    fields = {"name": {"enum": names}, arguments_key: {"type": "object"}}
    orders = [fields, dict(reversed(fields.items()))]
    closed_object = {"type": "object", "required": list(fields), "additionalProperties": False}
    return {"anyOf": [{**closed_object, "properties": order} for order in orders], "x-guidance": JSON_OPTIONS}


# ---- templates without tools


def with_tools_in_text(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Returns the conversation for a template that ignores tools: the system message describes them, and messages of
    the assistant contain earlier calls as text."""
    messages = [_with_calls_in_text(message) for message in messages]
    if not tools:
        return messages
    preamble = (
        "You may call functions to help with the user's request. These are the functions, one a line:\n"
        + "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        + f"\nTo call one, write its name and its arguments as JSON between tags:\n{OPEN_TAG}"
        + '{"name": "...", "arguments": {...}}'
        + CLOSE_TAG
    )
    if messages and messages[0]["role"] in ("system", "developer") and isinstance(messages[0].get("content"), str):
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{preamble}".strip()}, *messages[1:]]
    return [{"role": "system", "content": preamble}, *messages]


def _with_calls_in_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [f"{OPEN_TAG}{json.dumps(call['function'], ensure_ascii=False)}{CLOSE_TAG}" for call in calls]
    return {**message, "content": "\n".join(filter(None, [message.get("content") or "", *written]))}
