"""A table of bad inputs: each is rejected with its status and field, and the next request succeeds."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from minivllm.actors.openai.protocol.responses import ErrorResponse
from tests.http.stand_ins import SAVED_VOCABULARY

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"model": "tiny", "prompt": "Hello", "max_tokens": 2, **fields}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": "tiny", "messages": [USER], "max_tokens": 2, **fields}


def without(request: tuple[str, dict[str, Any]], *names: str) -> tuple[str, dict[str, Any]]:
    path, body = request
    return path, {name: value for name, value in body.items() if name not in names}


def messages(*given: Any) -> tuple[str, dict[str, Any]]:
    return chat(messages=list(given))


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


NAN, INFINITY = float("nan"), float("inf")
ONE = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
NAMED_SCHEMA = {"name": "x", "schema": ONE}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}

# (request, status, the field that the error names)
BAD: list[tuple[tuple[str, Any], int, str | None]] = [
    # the prompt
    (without(completion(), "prompt"), 400, "prompt"),
    (completion(prompt=None), 400, "prompt"),
    (completion(prompt=""), 400, "prompt"),
    (completion(prompt=[]), 400, "prompt"),
    (completion(prompt=[[]]), 400, "prompt[0]"),
    (completion(prompt=["good", ""]), 400, "prompt[1]"),
    (completion(prompt=7), 400, "prompt"),
    (completion(prompt={"text": "x"}), 400, "prompt"),
    (completion(prompt=True), 400, "prompt"),
    (completion(prompt=[1, "two"]), 400, "prompt"),
    (completion(prompt=["one", 2]), 400, "prompt[1]"),
    (completion(prompt=[True]), 400, "prompt"),
    (completion(prompt=[1.5]), 400, "prompt[0]"),
    (completion(prompt=[-1]), 400, "prompt"),
    (completion(prompt=[SAVED_VOCABULARY]), 400, "prompt"),
    (completion(prompt=[1, 10**30]), 400, "prompt"),
    (completion(prompt=[[1], [2, -3]]), 400, "prompt[1]"),
    (completion(prompt=[5] * 1024), 400, "prompt"),
    (completion(prompt="river " * 1100), 400, "prompt"),
    (completion(prompt="x" * 150_000), 400, "prompt"),
    (completion(prompt=["a"] * 1025), 400, "prompt"),
    (completion(prompt=["a"] * 100, n=100), 400, "prompt"),
    (completion(suffix=" the end."), 400, "suffix"),
    # lengths
    (completion(max_tokens=-1), 400, "max_tokens"),
    (completion(max_tokens=0), 400, "max_tokens"),
    (completion(max_tokens=1.5), 400, "max_tokens"),
    (completion(max_tokens="lots"), 400, "max_tokens"),
    (completion(max_tokens=True), 400, "max_tokens"),
    (completion(max_tokens=[1]), 400, "max_tokens"),
    (completion(max_tokens=NAN), 400, "max_tokens"),
    (chat(max_tokens=0), 400, "max_tokens"),
    (chat(max_completion_tokens=-5), 400, "max_completion_tokens"),
    (completion(min_tokens=-1), 400, "min_tokens"),
    (completion(min_tokens=3), 400, "min_tokens"),
    # sampling
    (completion(temperature=-0.1), 400, "temperature"),
    (completion(temperature=2.1), 400, "temperature"),
    (completion(temperature="hot"), 400, "temperature"),
    (completion(temperature=NAN), 400, "temperature"),
    (completion(temperature=INFINITY), 400, "temperature"),
    (completion(temperature=True), 400, "temperature"),
    (completion(top_p=0), 400, "top_p"),
    (completion(top_p=1.1), 400, "top_p"),
    (completion(top_p=NAN), 400, "top_p"),
    (completion(top_k=-2), 400, "top_k"),
    (completion(top_k=1.5), 400, "top_k"),
    (completion(min_p=-0.1), 400, "min_p"),
    (completion(min_p=1.5), 400, "min_p"),
    (completion(presence_penalty=2.5), 400, "presence_penalty"),
    (completion(frequency_penalty=-2.5), 400, "frequency_penalty"),
    (completion(frequency_penalty=NAN), 400, "frequency_penalty"),
    (completion(repetition_penalty=0), 400, "repetition_penalty"),
    (completion(repetition_penalty=-1), 400, "repetition_penalty"),
    (completion(seed="lucky"), 400, "seed"),
    (completion(seed=2**64), 400, "seed"),
    (completion(seed=1.5), 400, "seed"),
    (completion(n=0), 400, "n"),
    (completion(n=-1), 400, "n"),
    (completion(n=129), 400, "n"),
    (completion(n="two"), 400, "n"),
    (completion(best_of=3), 400, "best_of"),
    (completion(use_beam_search=True), 400, "use_beam_search"),
    (completion(logit_bias={"abc": 1}), 400, "logit_bias"),
    (completion(logit_bias={"1": 5, "01": -5}), 400, "logit_bias"),
    (completion(logit_bias={"-1": 1}), 400, "logit_bias"),
    (completion(logit_bias={" 5": 1}), 400, "logit_bias"),
    (completion(logit_bias={"5": "much"}), 400, "logit_bias.5"),
    (completion(logit_bias={"5": 101}), 400, "logit_bias"),
    (completion(logit_bias={"5": NAN}), 400, "logit_bias[5]"),
    (completion(logit_bias={str(SAVED_VOCABULARY): 1}), 400, "logit_bias"),
    (completion(logit_bias={"9" * 50: 1}), 400, "logit_bias"),
    (completion(logit_bias=[1]), 400, "logit_bias"),
    # stopping
    (completion(stop=5), 400, "stop"),
    (completion(stop=""), 400, "stop"),
    (completion(stop=["a", ""]), 400, "stop"),
    (completion(stop=["a", 1]), 400, "stop"),
    (completion(stop=["x"] * 65), 400, "stop"),
    (completion(stop_token_ids=[-1]), 400, "stop_token_ids[0]"),
    (completion(stop_token_ids=[SAVED_VOCABULARY]), 400, "stop_token_ids"),
    (completion(stop_token_ids=["x"]), 400, "stop_token_ids[0]"),
    (completion(stop_token_ids=7), 400, "stop_token_ids"),
    (completion(ignore_eos="yes"), 400, "ignore_eos"),
    (completion(include_stop_str_in_output=1), 400, "include_stop_str_in_output"),
    (completion(skip_special_tokens="no"), 400, "skip_special_tokens"),
    # log probabilities
    (completion(logprobs=-1), 400, "logprobs"),
    (completion(logprobs=21), 400, "logprobs"),
    (completion(logprobs=True), 400, "logprobs"),
    (completion(logprobs="x"), 400, "logprobs"),
    (chat(logprobs=3), 400, "logprobs"),
    (chat(top_logprobs=2), 400, "top_logprobs"),
    (chat(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    (chat(logprobs=True, top_logprobs=-1), 400, "top_logprobs"),
    (completion(echo="please"), 400, "echo"),
    # streams
    (completion(stream="yes"), 400, "stream"),
    (completion(stream_options={"include_usage": True}), 400, "stream_options"),
    (chat(stream=False, stream_options={}), 400, "stream_options"),
    (chat(stream=True, stream_options=5), 400, "stream_options"),
    (chat(stream=True, stream_options={"include_usage": "x"}), 400, "stream_options.include_usage"),
    (completion(stream=True, temperature=-1), 400, "temperature"),
    (completion(stream=True, logit_bias={str(SAVED_VOCABULARY): 1}), 400, "logit_bias"),
    # messages
    (without(chat(), "messages"), 400, "messages"),
    (messages(), 400, "messages"),
    (chat(messages="Hi"), 400, "messages"),
    (chat(messages={"role": "user"}), 400, "messages"),
    (messages("Hi"), 400, "messages[0]"),
    (messages({"content": "Hi"}), 400, "messages[0].role"),
    (messages({"role": "alien", "content": "Hi"}), 400, "messages[0].role"),
    (messages({"role": 5, "content": "Hi"}), 400, "messages[0].role"),
    (messages({"role": "user"}), 400, "messages[0].content"),
    (messages(USER, {"role": "user", "content": None}), 400, "messages[1].content"),
    (messages({"role": "user", "content": 5}), 400, "messages[0].content"),
    (messages({"role": "user", "content": {"text": "Hi"}}), 400, "messages[0].content"),
    (messages({"role": "user", "content": ["Hi"]}), 400, "messages[0].content[0]"),
    (messages({"role": "user", "content": [{"type": "text"}]}), 400, "messages[0].content[0].text"),
    (
        messages({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}),
        400,
        "messages[0].content[0].type",
    ),
    (messages({"role": "assistant", "tool_calls": [{"id": "x"}]}, USER), 400, "messages[0].tool_calls[0].function"),
    (messages({"role": "assistant", "tool_calls": "f"}), 400, "messages[0].tool_calls"),
    (
        messages({**USER, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}),
        400,
        "messages[0].tool_calls",
    ),
    (messages({"role": "user", "content": "river " * 2000}), 400, "messages"),
    (chat(continue_final_message=True, add_generation_prompt=True), 400, "continue_final_message"),
    (chat(chat_template_kwargs=[]), 400, "chat_template_kwargs"),
    (chat(chat_template_kwargs={"tokenize": True}), 400, "chat_template_kwargs"),
    (chat(chat_template="{{ x }}"), 400, "chat_template"),
    # tools
    (chat(tools="f"), 400, "tools"),
    (chat(tools=[{"type": "function"}]), 400, "tools[0].function"),
    (chat(tools=[{"type": "magic", "function": {"name": "f"}}]), 400, "tools[0].type"),
    (chat(tools=[{"type": "function", "function": {"name": "no spaces"}}]), 400, "tools[0].function.name"),
    (
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": 5}}]),
        400,
        "tools[0].function.parameters",
    ),
    (chat(tools=[TOOL, TOOL]), 400, "tools[1].function.name"),
    (chat(tool_choice="required"), 400, "tool_choice"),
    (chat(tools=[TOOL], tool_choice="maybe"), 400, "tool_choice"),
    (chat(tools=[TOOL], tool_choice={"type": "function"}), 400, "tool_choice"),
    (
        chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
        400,
        "tool_choice.function.name",
    ),
    (
        chat(
            tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "banana"}}}],
            tool_choice="required",
        ),
        400,
        "tools",
    ),
    (chat(tools=[TOOL], tool_choice="required", response_format={"type": "json_object"}), 400, "response_format"),
    (chat(functions=[{"name": "f"}]), 400, "functions"),
    # structured output
    (chat(response_format=7), 400, "response_format"),
    (chat(response_format={}), 400, "response_format.type"),
    (chat(response_format={"type": "banana"}), 400, "response_format.type"),
    (chat(response_format={"type": "json_schema"}), 400, "response_format"),
    (
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x"}}),
        400,
        "response_format.json_schema.schema",
    ),
    (
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "banana"}}}),
        400,
        "response_format",
    ),
    (chat(response_format={"type": "text", "json_schema": NAMED_SCHEMA}), 400, "response_format"),
    (chat(response_format={"type": "text", "schema": {}}), 400, "response_format"),
    (chat(response_format={"type": "json_object", "json_schema": NAMED_SCHEMA}), 400, "response_format"),
    (chat(response_format={"type": "json_object", "schema": {"type": "array"}}), 400, "response_format"),
    (chat(response_format={"type": "json_object", "schema": {"not": {}}}), 400, "response_format"),
    (chat(response_format={"type": "json_schema", "json_schema": NAMED_SCHEMA, "schema": {}}), 400, "response_format"),
    (chat(tools=[TOOL], response_format=json_schema({"uniqueItems": True})), 400, "response_format"),
    (completion(guided_regex="("), 400, "guided_regex"),
    (completion(guided_json="{not json"), 400, "guided_json"),
    (completion(guided_choice=[]), 400, "guided_choice"),
    (completion(guided_choice=[1]), 400, "guided_choice[0]"),
    (completion(guided_regex="((a{100}){100}){100}"), 400, "guided_regex"),
    (completion(guided_regex="a", guided_choice=["b"]), 400, "guided_choice"),
    (completion(structured_outputs={}), 400, "structured_outputs"),
    (completion(structured_outputs={"regex": "a", "choice": ["b"]}), 400, "structured_outputs"),
    # unsupported fields
    (chat(modalities=["text", "audio"]), 400, "modalities"),
    (chat(audio={"voice": "x"}), 400, "audio"),
    (chat(prediction={"type": "content"}), 400, "prediction"),
    (chat(web_search_options={}), 400, "web_search_options"),
    (completion(prompt_logprobs=1), 400, "prompt_logprobs"),
    # other fields
    (completion(priority="high"), 400, "priority"),
    (completion(priority=2**40), 400, "priority"),
    (completion(cache_salt=""), 400, "cache_salt"),
    (completion(cache_salt=5), 400, "cache_salt"),
    (completion(user=5), 400, "user"),
    (completion(model=5), 400, "model"),
    (completion(model="no-such-model"), 404, "model"),
    (chat(model="no/such/model"), 404, "model"),
    # tokenizer routes
    (("/tokenize", {}), 400, "prompt"),
    (("/tokenize", {"prompt": 5}), 400, "prompt"),
    (("/tokenize", {"prompt": "x", "messages": [USER]}), 400, "prompt"),
    (("/tokenize", {"model": "other", "prompt": "x"}), 404, "model"),
    (("/detokenize", {}), 400, "tokens"),
    (("/detokenize", {"tokens": "x"}), 400, "tokens"),
    (("/detokenize", {"tokens": [-1]}), 400, "tokens[0]"),
    (("/detokenize", {"tokens": [SAVED_VOCABULARY]}), 400, "tokens"),
    (("/detokenize", {"tokens": [1.5]}), 400, "tokens[0]"),
    # malformed bodies
    ((CHAT, b""), 400, None),
    ((CHAT, b"not json"), 400, None),
    ((CHAT, b'{"model": '), 400, None),
    ((CHAT, b"[]"), 400, None),
    ((CHAT, b"null"), 400, None),
    ((COMPLETIONS, b'"text"'), 400, None),
    ((COMPLETIONS, b"[" * 100_000 + b"]" * 100_000), 400, None),
    ((COMPLETIONS, b'{"prompt":' + b'{"a":' * 5000 + b"1" + b"}" * 5001), 400, None),
    ((COMPLETIONS, b'{"prompt": "broken \\ud83d text"}'), 400, None),
    ((COMPLETIONS, b'{"prompt": "x", "stop": "\\udc00"}'), 400, None),
    ((COMPLETIONS, b'{"prompt": "bad utf-8 \xff"}'), 400, None),
    ((COMPLETIONS, b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}"), 400, None),
    ((COMPLETIONS, b'{"prompt": "' + b"x" * 300_000 + b'"}'), 413, None),
]


def post(client: httpx.Client, path: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post(path, content=content, headers={"content-type": "application/json"})


@pytest.mark.parametrize(
    ("request_", "status", "param"), BAD, ids=[f"{status}-{param}-{n}" for n, (_, status, param) in enumerate(BAD)]
)
def test_bad_input_is_rejected_by_field_and_the_next_request_succeeds(
    client: httpx.Client, request_: tuple[str, Any], status: int, param: str | None
) -> None:
    answer = post(client, *request_)
    assert answer.status_code == status, answer.text[:500]
    error = ErrorResponse.model_validate(answer.json()).error
    assert error.param == param, error
    assert len(answer.content) < 6000
    assert "Traceback" not in error.message
    assert "/minivllm/" not in error.message
    assert post(client, *completion(max_tokens=1)).status_code == 200


def test_table_has_at_least_sixty_rows() -> None:
    assert len(BAD) >= 60


def test_too_long_prompt_error_shows_length_and_limit(client: httpx.Client) -> None:
    message = post(client, *completion(prompt=[5] * 1500)).json()["error"]["message"]
    assert "1500" in message
    assert "1024" in message


def test_at_most_ten_errors_are_listed(client: httpx.Client) -> None:
    names = [
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "echo",
        "user",
        "logprobs",
        "priority",
        "model",
    ]
    message = post(client, *completion(**{name: [{}] for name in names})).json()["error"]["message"]
    assert message.count("(got ") == 10
    assert re.search(r"; and \d+ more$", message)


def test_error_messages_truncate_large_values(client: httpx.Client) -> None:
    for fields in ({"temperature": "x" * 100_000}, {"max_tokens": list(range(20_000))}, {"model": "m" * 100_000}):
        answer = post(client, *completion(**fields))
        assert answer.status_code in (400, 404)
        assert len(answer.content) < 1500


def test_body_without_json_content_type_is_rejected(client: httpx.Client) -> None:
    for headers in ({"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
        answer = client.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
        assert answer.status_code == 415
        assert ErrorResponse.model_validate(answer.json()).error.code == "unsupported_media_type"


def test_too_large_body_without_content_length_is_rejected(client: httpx.Client) -> None:
    def pieces() -> Any:
        for _ in range(100):
            yield b"x" * 10_000

    answer = client.post(COMPLETIONS, content=pieces(), headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert "200000" in ErrorResponse.model_validate(answer.json()).error.message


def test_null_fields_take_their_defaults(client: httpx.Client) -> None:
    from minivllm.actors.openai.protocol.requests import ChatCompletionRequest, CompletionRequest

    for (path, body), kind in ((completion(), CompletionRequest), (chat(), ChatCompletionRequest)):
        required = {"prompt", "messages", "model"}
        nulls = {name: None for name in kind.model_fields if name not in required}
        answer = post(client, path, {**body, **nulls, "temperature": 0})
        assert answer.status_code == 200, answer.text


def test_unknown_fields_and_neutral_unsupported_values_are_accepted(client: httpx.Client) -> None:
    extra = {"made_up": {"a": [1]}, "suffix": "", "use_beam_search": False, "service_tier": "auto", "user": "me"}
    assert post(client, *completion(**extra)).status_code == 200
    extra = {"made_up": 1, "metadata": {"a": "b"}, "store": False, "modalities": ["text"], "functions": []}
    assert post(client, *chat(**extra)).status_code == 200


INTEGERS = [
    *[(completion, name) for name in ("max_tokens", "min_tokens", "n", "best_of", "seed", "top_k", "logprobs")],
    *[(chat, name) for name in ("max_completion_tokens", "priority", "seed", "max_tokens")],
]


@pytest.mark.parametrize(("request_", "name"), INTEGERS, ids=lambda value: getattr(value, "__name__", value))
def test_whole_float_is_an_integer_and_a_fraction_is_rejected_by_field(
    client: httpx.Client, request_: Any, name: str
) -> None:
    fixed = {"temperature": 0, "max_tokens": 2} | ({"n": 1} if name == "best_of" else {})
    answers = [post(client, *request_(**{**fixed, name: value})) for value in (1, 1.0)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    assert answers[0].json()["choices"] == answers[1].json()["choices"]
    assert answers[0].json()["usage"] == answers[1].json()["usage"]
    refused = post(client, *request_(**{**fixed, name: 4.5}))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


def same_text_as(client: httpx.Client, plain: tuple[str, Any], request_: tuple[str, Any]) -> None:
    answers = [post(client, path, {**body, "temperature": 0}) for path, body in (plain, request_)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    choices, others = [answer.json()["choices"] for answer in answers]
    assert choices == others


PLAIN_PROMPT, PLAIN_CHAT = completion(prompt=[5, 6], max_tokens=3), chat(max_tokens=3)

# (the same without what asks for nothing, request)
SAME: list[tuple[tuple[str, Any], tuple[str, Any]]] = [
    *[
        (PLAIN_PROMPT, completion(**{"prompt": [5, 6], "max_tokens": 3, **fields}))
        for fields in (
            {"prompt": [5.0, 6.0]},
            {"prompt": [[5.0, 6]]},
            {"stop": []},
            {"stop": None, "stop_token_ids": []},
            {"logit_bias": {}},
            {"stream_options": None, "response_format": None, "suffix": None, "metadata": None},
            {"logits_processors": [], "bad_words": [], "kv_transfer_params": {}},
            {"response_format": {"type": "text", "json_schema": None, "schema": None}},
        )
    ],
    (completion(stop_token_ids=[7]), completion(stop_token_ids=[7.0])),
    (completion(logit_bias={"9": 100}), completion(logit_bias={"9": 100.0})),
    (chat(logprobs=True, top_logprobs=2), chat(logprobs=True, top_logprobs=2.0)),
    *[
        (PLAIN_CHAT, chat(max_tokens=3, **fields))
        for fields in (
            {"tools": [], "tool_choice": None},
            {"tools": None, "tool_choice": "none", "parallel_tool_calls": None},
            {"functions": [], "function_call": None},
            {"functions": None, "modalities": None, "documents": None, "chat_template_kwargs": {}},
            {"modalities": [], "mm_processor_kwargs": {}},
            {"metadata": None, "stream_options": None, "audio": None, "prediction": None},
            {"messages": [{**USER, "name": None, "tool_calls": [], "tool_call_id": None}]},
            {"messages": [{**USER, "tool_calls": None, "refusal": None}]},
        )
    ],
    (
        messages(USER, {"role": "assistant", "content": "Yes"}, USER),
        messages(USER, {"role": "assistant", "content": "Yes", "tool_calls": []}, USER),
    ),
    (
        messages(USER, {"role": "assistant", "tool_calls": [CALL]}, USER),
        messages(
            USER, {"role": "assistant", "content": None, "tool_calls": [{**CALL, "type": None, "id": None}]}, USER
        ),
    ),
    (
        chat(tools=[TOOL]),
        chat(tools=[{**TOOL, "function": {**TOOL["function"], "description": None, "strict": None}}]),
    ),
    (
        chat(response_format=json_schema(ONE), max_tokens=20),
        chat(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": None, "description": None, "schema": ONE, "strict": None},
                "schema": None,
            },
            max_tokens=20,
        ),
    ),
    (
        chat(response_format=json_schema(ONE), max_tokens=20),
        chat(response_format={"type": "json_object", "schema": ONE, "json_schema": None}, max_tokens=20.0),
    ),
]


@pytest.mark.parametrize(("plain", "request_"), SAME, ids=lambda value: json.dumps(value[1])[-60:])
def test_what_asks_for_nothing_changes_nothing(
    client: httpx.Client, plain: tuple[str, Any], request_: tuple[str, Any]
) -> None:
    same_text_as(client, plain, request_)


def test_tokenizer_routes_take_whole_floats_and_nothings(client: httpx.Client) -> None:
    for body in ({"tokens": [5, 6]}, {"tokens": [5.0, 6.0], "skip_special_tokens": None}):
        assert post(client, "/detokenize", body).json() == post(client, "/detokenize", {"tokens": [5, 6]}).json()
    plain = post(client, "/tokenize", {"prompt": "Hello"}).json()
    assert post(client, "/tokenize", {"prompt": "Hello", "messages": [], "tools": None}).json() == plain
    assert post(client, "/tokenize", {"prompt": None, "messages": []}).status_code == 400


@pytest.mark.parametrize("seed", range(3))
def test_schema_beside_json_object_is_followed(client: httpx.Client, seed: int) -> None:
    fields = {"temperature": 1, "seed": seed, "max_tokens": 40}
    answer = post(client, *chat(response_format={"type": "json_object", "schema": ONE}, **fields))
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) == {"a": 1}
