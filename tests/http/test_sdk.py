"""The openai package as a client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.http.conftest import REPLIES
from tests.http.stand_ins import LocalServer, ScriptedRunner

USER: Any = [{"role": "user", "content": "REPLY-LONG"}]


@pytest.fixture
def sdk(scripted: LocalServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=scripted.base_url + "/v1", api_key="none", max_retries=0, timeout=30)


@pytest.fixture
def real_sdk(tiny: LocalServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=tiny.base_url + "/v1", api_key="none", max_retries=0, timeout=30)


def test_sdk_lists_models_and_gets_completions_and_chats(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["scripted"]
    assert sdk.models.retrieve("scripted").id == "scripted"
    completion = sdk.completions.create(model="scripted", prompt="REPLY-SHORT", logprobs=1)
    assert completion.choices[0].text == "Yes."
    assert completion.choices[0].logprobs is not None
    chat = sdk.chat.completions.create(model="scripted", messages=USER, logprobs=True, top_logprobs=2)
    assert chat.choices[0].message.content == REPLIES["REPLY-LONG"]
    assert chat.usage is not None
    assert chat.usage.prompt_tokens_details is not None


def test_sdk_streams_chats_and_completions(sdk: openai.OpenAI) -> None:
    chunks = list(
        sdk.chat.completions.create(
            model="scripted", messages=USER, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == REPLIES["REPLY-LONG"]
    assert chunks[-1].usage is not None
    texts = [
        chunk.choices[0].text
        for chunk in sdk.completions.create(model="scripted", prompt="REPLY-LONG", stream=True, max_tokens=50)
    ]
    assert "".join(texts) == REPLIES["REPLY-LONG"]


def test_sixty_four_concurrent_streams_complete(scripted: LocalServer) -> None:
    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model="scripted", messages=USER, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=scripted.base_url + "/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client) for _ in range(64)))

    assert set(asyncio.run(all_of_them())) == {REPLIES["REPLY-LONG"]}


def test_sdk_raises_its_error_classes(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.chat.completions.create(model="scripted", messages=USER, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.chat.completions.create(model="other", messages=USER)
    assert missing.value.code == "model_not_found"


def test_sdk_streaming_helper_returns_tool_calls(sdk: openai.OpenAI, runner: ScriptedRunner) -> None:
    runner.replies["weather?"] = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    messages: Any = [{"role": "user", "content": "weather?"}]
    with sdk.chat.completions.stream(model="scripted", messages=messages, tools=tools) as stream:
        final = stream.get_final_completion()
    del runner.replies["weather?"]
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.choices[0].message.tool_calls
    assert json.loads(final.choices[0].message.tool_calls[0].function.arguments) == {"city": "Rome"}


class Answer(BaseModel):
    ok: bool
    kind: int


def test_sdk_parses_structured_answers(real_sdk: openai.OpenAI) -> None:
    parsed = real_sdk.chat.completions.parse(
        model="tiny", messages=USER, response_format=Answer, seed=2, max_completion_tokens=200, temperature=1
    )
    assert isinstance(parsed.choices[0].message.parsed, Answer)
