"""/v1/completions: prompt forms, choices, echo, log probabilities, streams."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from minivllm.actors.openai.protocol.responses import CompletionChunk, CompletionResponse
from minivllm.core.text.tokenizer import Tokenizer
from tests.http.conftest import REPLIES
from tests.http.stand_ins import LocalServer
from tests.http.streams import joined_text, read_stream, streamed

PATH = "/v1/completions"


def ask(client: httpx.Client, prompt: Any = "Hello", **fields: Any) -> dict[str, Any]:
    answer = client.post(PATH, json={"prompt": prompt, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    CompletionResponse.model_validate(answer.json())
    complete: dict[str, Any] = answer.json()
    return complete


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def test_every_prompt_form_gives_the_same_answer(client: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Once upon a time")
    forms: list[Any] = ["Once upon a time", ids, ["Once upon a time"], [ids]]
    answers = [ask(client, form, max_tokens=6) for form in forms]
    assert len({tuple(texts(answer)) for answer in answers}) == 1
    assert all(answer["usage"]["prompt_tokens"] == len(ids) for answer in answers)


def test_choices_are_ordered_by_prompt_then_sample(scripted_client: httpx.Client) -> None:
    prompts = ["REPLY-LONG", "REPLY-SHORT", "REPLY-UNICODE"]
    answer = ask(scripted_client, prompts, n=2, max_tokens=100)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert texts(answer) == [REPLIES[prompt] for prompt in prompts for _ in range(2)]
    chunks = streamed(scripted_client, PATH, {"prompt": prompts, "n": 2, "max_tokens": 100})
    assert [joined_text(chunks, index) for index in range(6)] == texts(answer)


def test_usage_counts_each_prompt_once_and_every_sample(client: httpx.Client) -> None:
    answer = ask(client, ["one two", "three"], n=3, max_tokens=5, temperature=1, ignore_eos=True)
    alone = [ask(client, prompt, max_tokens=1)["usage"]["prompt_tokens"] for prompt in ("one two", "three")]
    assert answer["usage"]["prompt_tokens"] == sum(alone)
    assert answer["usage"]["completion_tokens"] == 30


def test_max_tokens_defaults_to_sixteen(client: httpx.Client) -> None:
    for fields in ({}, {"max_tokens": None}):
        assert ask(client, ignore_eos=True, **fields)["usage"]["completion_tokens"] == 16


def test_max_tokens_beyond_the_context_ends_with_length(client: httpx.Client) -> None:
    answer = ask(client, [5] * 1020, max_tokens=10**9, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 1024
    assert answer["choices"][0]["finish_reason"] == "length"


def test_usage_reports_cached_tokens_per_cache_salt(client: httpx.Client) -> None:
    prompt = [11, 12, 13, 14] * 16
    ask(client, prompt, max_tokens=1, cache_salt="same")
    again = ask(client, prompt, max_tokens=1, cache_salt="same")
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    other = ask(client, prompt, max_tokens=1, cache_salt="other")
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    "stop", ["lazy dog", "y dog, th", ["sun", "lazy"], ["The quick brown fox jumps over the lazy dog,"]], ids=str
)
def test_text_ends_before_the_stop_string(scripted_client: httpx.Client, stop: Any) -> None:
    text = REPLIES["REPLY-LONG"]
    first = min(text.index(one) for one in ([stop] if isinstance(stop, str) else stop))
    answer = ask(scripted_client, "REPLY-LONG", max_tokens=100, stop=stop)
    assert texts(answer) == [text[:first]]
    assert answer["choices"][0]["finish_reason"] == "stop"
    body = {"prompt": "REPLY-LONG", "max_tokens": 100, "stop": stop, "stream_options": {"include_usage": True}}
    chunks = streamed(scripted_client, PATH, body)
    assert joined_text(chunks) == text[:first]
    assert chunks[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]


def test_stop_string_ends_generation_in_the_engine(scripted: LocalServer, scripted_client: httpx.Client) -> None:
    before = scripted.snapshot().stats.generated_tokens_total
    for n in (1, 3):
        ask(scripted_client, "endless", max_tokens=900, n=n, stop="so on and so")
        ask(scripted_client, ["endless", "REPLY-SHORT"], max_tokens=900, n=n, stop="so on and so")
    scripted.until_idle(1.0)
    # Without the stop string there are eight samples of 900 tokens; how early they end depends on the machine.
    assert scripted.snapshot().stats.generated_tokens_total - before < 8 * 900 / 2


def test_stream_joins_to_the_complete_text_at_every_length(scripted_client: httpx.Client) -> None:
    for max_tokens in range(1, 40):
        body = {"prompt": "REPLY-UNICODE", "temperature": 0, "max_tokens": max_tokens}
        answer = ask(scripted_client, **body)
        chunks = streamed(scripted_client, PATH, body)
        assert joined_text(chunks) == answer["choices"][0]["text"]
        assert chunks[-1]["choices"][0]["finish_reason"] == answer["choices"][0]["finish_reason"]


def test_only_the_last_chunk_may_be_empty(scripted_client: httpx.Client) -> None:
    chunks = streamed(scripted_client, PATH, {"prompt": "REPLY-UNICODE", "max_tokens": 100})
    assert all(chunk["choices"][0]["text"] for chunk in chunks[:-1])


def test_stream_options_select_where_usage_appears(scripted_client: httpx.Client) -> None:
    body = {"prompt": "REPLY-LONG", "max_tokens": 5, "ignore_eos": True}
    plain = streamed(scripted_client, PATH, body)
    assert all("usage" not in chunk for chunk in plain)
    options = {"include_usage": True, "continuous_usage_stats": True}
    counted = streamed(scripted_client, PATH, {**body, "stream_options": options})
    totals = [chunk["usage"]["completion_tokens"] for chunk in counted]
    assert totals == sorted(totals)
    assert totals[-1] == 5
    assert counted[-1]["choices"] == []


# ---- log probabilities and echo ----


def lists(choice: dict[str, Any]) -> dict[str, list[Any]]:
    logprobs: dict[str, list[Any]] = choice["logprobs"]
    assert len({len(values) for values in logprobs.values()}) == 1
    return logprobs


def test_logprob_tokens_join_to_the_text(client: httpx.Client, scripted_client: httpx.Client) -> None:
    for one, prompt in ((client, "你好"), (scripted_client, "REPLY-UNICODE")):
        for max_tokens in (1, 7, 40):
            choice = ask(one, prompt, max_tokens=max_tokens, logprobs=2)["choices"][0]
            assert "".join(lists(choice)["tokens"]) == choice["text"]


def test_text_offsets_point_into_the_text(scripted_client: httpx.Client) -> None:
    choice = ask(scripted_client, "REPLY-LONG", max_tokens=12, logprobs=1)["choices"][0]
    found = lists(choice)
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)


def test_streamed_logprobs_equal_those_of_the_complete_answer(scripted_client: httpx.Client) -> None:
    for echo in (False, True):
        body = {"prompt": "REPLY-UNICODE", "max_tokens": 50, "logprobs": 2, "echo": echo}
        complete = lists(ask(scripted_client, **body)["choices"][0])
        joined: dict[str, list[Any]] = {name: [] for name in complete}
        for chunk in streamed(scripted_client, PATH, body):
            for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
                joined[name] += values
        assert joined == complete


def test_logprobs_zero_shows_only_the_sampled_token(client: httpx.Client) -> None:
    found = lists(ask(client, max_tokens=3, logprobs=0, ignore_eos=True)["choices"][0])
    assert [list(one) for one in found["top_logprobs"]] == [[token] for token in found["tokens"]]


def test_echo_prepends_the_prompt(client: httpx.Client, tokenizer: Tokenizer) -> None:
    prompt = "Once upon a time"
    plain = texts(ask(client, prompt, max_tokens=4))[0]
    assert texts(ask(client, prompt, max_tokens=4, echo=True)) == [prompt + plain]
    assert texts(ask(client, tokenizer.encode(prompt), max_tokens=4, echo=True)) == [prompt + plain]
    assert joined_text(streamed(client, PATH, {"prompt": prompt, "max_tokens": 4, "echo": True, "temperature": 0})) == (
        prompt + plain
    )


@pytest.mark.parametrize("n", [1, 2])
def test_echo_with_logprobs_includes_prompt_logprobs(client: httpx.Client, tokenizer: Tokenizer, n: int) -> None:
    prompt = "Once upon a time 🦊"
    count = len(tokenizer.encode(prompt))
    for choice in ask(client, prompt, max_tokens=3, echo=True, logprobs=1, n=n, ignore_eos=True)["choices"]:
        found = lists(choice)
        assert len(found["tokens"]) == count + 3
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        assert all(value <= 0 for value in found["token_logprobs"][1:])
        assert "".join(found["tokens"]) == choice["text"]


def test_partial_character_token_is_among_its_top_logprobs(client: httpx.Client, tokenizer: Tokenizer) -> None:
    inside = tokenizer.encode("𓀀")[-2]
    body = {"logit_bias": {str(inside): 100}, "max_tokens": 2, "ignore_eos": True}
    for logprobs in (0, 1, 3):
        found = lists(ask(client, logprobs=logprobs, **body)["choices"][0])
        assert found["tokens"][-1].endswith("\ufffd")
        for token, own, alternatives in zip(
            found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
        ):
            assert alternatives[token] == own


def test_max_tokens_zero_with_echo_returns_only_the_prompt(client: httpx.Client, tokenizer: Tokenizer) -> None:
    prompts = ["Once upon a time", "The end"]
    answer = ask(client, prompts, max_tokens=0, echo=True, logprobs=1)
    assert texts(answer) == prompts
    assert answer["usage"]["completion_tokens"] == 0
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        assert len(lists(choice)["tokens"]) == len(tokenizer.encode(prompt))
        assert choice["finish_reason"] == "length"
    longer = lists(ask(client, prompts[0], max_tokens=2, echo=True, logprobs=1)["choices"][0])
    assert longer["token_logprobs"][1:4] == pytest.approx(lists(answer["choices"][0])["token_logprobs"][1:4], abs=1e-4)
    silent = ask(client, "Once upon a time", max_tokens=0, echo=True)
    assert texts(silent) == ["Once upon a time"]
    assert silent["choices"][0]["logprobs"] is None


def test_hidden_stop_token_has_a_logprob_and_no_text(client: httpx.Client, tokenizer: Tokenizer) -> None:
    token = tokenizer.encode("x")[-1]
    body = {"logit_bias": {str(token): 100}, "stop_token_ids": [token], "logprobs": 1}
    answer = ask(client, max_tokens=9, **body)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["text"] == ""
    assert lists(answer["choices"][0])["tokens"] == [""]
    shown = ask(client, max_tokens=9, include_stop_str_in_output=True, **body)
    assert shown["choices"][0]["text"] == "x"


def test_stop_string_that_is_a_special_token_ends_the_text(client: httpx.Client, tokenizer: Tokenizer) -> None:
    token = tokenizer.special_token_id("<|im_start|>")
    body = {"logit_bias": {str(token): 100}, "stop": ["zq", "<|im_start|>"], "ignore_eos": True, "max_tokens": 30}
    answer = ask(client, **body)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["text"] == ""
    assert answer["usage"]["completion_tokens"] == 1
    shown = ask(client, include_stop_str_in_output=True, **body)
    assert shown["choices"][0]["text"] == "<|im_start|>"
    chunks = streamed(client, PATH, {"model": "tiny", "prompt": "Once", **body})
    assert joined_text(chunks) == ""
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


# ---- sampling parameters ----


def test_seeded_choices_are_reproducible_and_distinct(client: httpx.Client) -> None:
    body: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    first = texts(ask(client, n=3, seed=5, **body))
    assert texts(ask(client, n=3, seed=5, **body)) == first
    assert len(set(first)) == 3
    assert texts(ask(client, seed=6, **body)) == [first[1]]


def test_logit_bias_forces_and_bans_tokens(client: httpx.Client, tokenizer: Tokenizer) -> None:
    token = tokenizer.encode("x")[-1]
    assert texts(ask(client, max_tokens=4, logit_bias={str(token): 100})) == ["xxxx"]
    assert "x" not in texts(ask(client, max_tokens=4, logit_bias={str(token): -100}))[0]


def test_min_tokens_delays_the_stop_token(client: httpx.Client, tokenizer: Tokenizer) -> None:
    token = tokenizer.encode("x")[-1]
    body = {"logit_bias": {str(token): 90}, "stop_token_ids": [token], "min_tokens": 5, "max_tokens": 20}
    assert 5 <= ask(client, **body)["usage"]["completion_tokens"] <= 7


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"guided_choice": ["red", "green"]}, lambda text: text in ("red", "green")),
        ({"structured_outputs": {"choice": ["red", "green"]}}, lambda text: text in ("red", "green")),
        ({"guided_regex": "[0-9]{3}-[a-f]{2}"}, lambda text: len(text) == 6 and text[3] == "-"),
        ({"structured_outputs": {"regex": "a{4}"}}, lambda text: text == "aaaa"),
        ({"guided_json": {"enum": [1, 2]}}, lambda text: json.loads(text) in (1, 2)),
        ({"structured_outputs": {"json": '{"enum": ["a"]}'}}, lambda text: json.loads(text) == "a"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "boolean"}}}},
            lambda text: text in ("true", "false"),
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_answer_follows_its_structured_output(client: httpx.Client, fields: dict[str, Any], fits: Any) -> None:
    answer = ask(client, max_tokens=60, temperature=1, **fields)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert fits(answer["choices"][0]["text"])


def test_chunks_match_the_documented_schema(scripted_client: httpx.Client) -> None:
    body = {
        "prompt": ["REPLY-LONG", "REPLY-SHORT"],
        "max_tokens": 9,
        "logprobs": 1,
        "stream_options": {"include_usage": True},
    }
    stream = read_stream(scripted_client, PATH, body)
    assert stream.headers["content-type"].startswith("text/event-stream")
    for chunk in stream.chunks:
        CompletionChunk.model_validate(chunk)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in stream.chunks}) == 1
