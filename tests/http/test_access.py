"""API keys, CORS, request ids, and the routes besides generation."""

from __future__ import annotations

import concurrent.futures
import re
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import minivllm
from minivllm.actors.config import AppArgs
from minivllm.actors.openai.protocol import responses
from minivllm.core.engine import LLMEngine
from minivllm.core.text.tokenizer import Tokenizer
from tests.http.conftest import REPLIES
from tests.http.stand_ins import LocalServer, ScriptedRunner

KEYS = ("first-key", "second-key")


@pytest.fixture(scope="module")
def guarded(tokenizer: Tokenizer) -> Iterator[LocalServer]:
    args = AppArgs(
        served_model_name="org/guarded",
        api_keys=KEYS,
        cors_origins=("https://friend.example",),
        max_model_len=256,
        max_waiting_requests=2,
        max_num_seqs=1,
    )
    runner = ScriptedRunner(tokenizer, dict(REPLIES), step_s=0.002)
    with LocalServer(args, tokenizer, lambda: LLMEngine(args.engine_config(), model_runner=runner)) as server:
        yield server


@pytest.fixture(scope="module")
def loading(tokenizer: Tokenizer) -> Iterator[LocalServer]:
    with LocalServer(AppArgs(served_model_name="late"), tokenizer, None) as server:
        yield server


@pytest.fixture(scope="module")
def door(guarded: LocalServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.base_url, timeout=60) as client:
        yield client


def key(value: str) -> dict[str, str]:
    return {"authorization": f"Bearer {value}"}


def error(answer: httpx.Response) -> responses.ErrorDetail:
    return responses.ErrorResponse.model_validate(answer.json()).error


# ---- API keys ----


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        key("wrong"),
        key("first-key2"),
        key("first-ke"),
        {"authorization": "first-key"},
        {"authorization": "Basic first-key"},
    ],
    ids=["no header", "no key", "wrong key", "key with suffix", "prefix of a key", "no scheme", "wrong scheme"],
)
def test_requests_without_a_valid_key_reach_only_health(door: httpx.Client, headers: dict[str, str]) -> None:
    for path in ("/v1/models", "/metrics", "/version", "/docs", "/openapi.json", "/nope", "/health/x", "//health"):
        answer = door.get(path, headers=headers)
        assert answer.status_code == 401, path
        assert error(answer).code == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert door.post("/v1/completions", json={"prompt": "x"}, headers=headers).status_code == 401
    assert door.get("/health", headers=headers).status_code == 200


@pytest.mark.parametrize("given", KEYS)
def test_every_configured_key_is_accepted(door: httpx.Client, given: str) -> None:
    for headers in (key(given), {"authorization": f"bearer {given}"}):
        assert door.get("/v1/models", headers=headers).status_code == 200
        assert door.post("/v1/completions", json={"prompt": "REPLY-SHORT"}, headers=headers).status_code == 200


# ---- CORS ----


def test_cors_allows_only_configured_origins(door: httpx.Client, client: httpx.Client) -> None:
    asks = {"origin": "https://friend.example", "access-control-request-method": "POST"}
    answer = door.options("/v1/completions", headers=asks)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://friend.example"
    stranger = door.options("/v1/completions", headers={**asks, "origin": "https://evil.example"})
    assert stranger.status_code == 400
    assert "access-control-allow-origin" not in stranger.headers
    off = client.options("/v1/completions", headers=asks)
    assert off.status_code == 405
    assert not any(name.startswith("access-control") for name in off.headers)


# ---- request ids ----


def test_request_id_header_is_echoed_and_may_repeat(client: httpx.Client) -> None:
    answers = [
        client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}, headers={"x-request-id": "same"})
        for _ in range(2)
    ]
    assert [answer.headers["x-request-id"] for answer in answers] == ["same", "same"]
    assert len({answer.json()["id"] for answer in answers}) == 2
    assert client.get("/nope", headers={"x-request-id": "of an error"}).headers["x-request-id"] == "of an error"


def test_request_without_an_id_gets_a_unique_one(client: httpx.Client) -> None:
    ids = [client.get(path).headers["x-request-id"] for path in ("/v1/models", "/v1/models", "/nope")]
    assert len({str(uuid.UUID(each)) for each in ids}) == 3


# ---- paths ----


def test_unknown_paths_and_methods_return_an_openai_error(client: httpx.Client) -> None:
    for path in ("/", "/v1/nope", "/v1/completions/x", "/v1/chat", "/health/x"):
        for method in ("GET", "POST", "DELETE"):
            answer = client.request(method, path)
            assert answer.status_code == 404, (method, path)
            assert error(answer).code == "not_found"
    answer = client.get("/v1/chat/completions")
    assert answer.status_code == 405
    assert error(answer).code == "method_not_allowed"
    assert answer.headers["allow"] == "POST"
    assert client.post("/v1/models", json={}).status_code == 405


def test_models_are_listed_and_found_by_id(client: httpx.Client, door: httpx.Client) -> None:
    listing = responses.ModelList.model_validate(client.get("/v1/models").json())
    assert [(model.id, model.max_model_len) for model in listing.data] == [("tiny", 1024)]
    assert client.get("/v1/models/tiny").json() == client.get("/v1/models").json()["data"][0]
    answer = client.get("/v1/models/other")
    assert answer.status_code == 404
    assert error(answer).code == "model_not_found"
    slashed = door.get("/v1/models/org/guarded", headers=key(KEYS[0]))
    assert slashed.json()["id"] == "org/guarded"


def test_model_field_is_optional(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert answer.json()["model"] == "tiny"


def test_version_and_health_are_served(client: httpx.Client) -> None:
    assert client.get("/version").json() == {"version": minivllm.__version__}
    assert client.get("/health").json() == {"status": "ok"}


def test_metrics_include_a_request_as_soon_as_it_ends(client: httpx.Client) -> None:
    def value(name: str) -> float:
        found = re.search(rf"^{name} (\S+)$", client.get("/metrics").text, re.M)
        assert found, name
        return float(found[1])

    before = value("minivllm_generated_tokens_total")
    client.post("/v1/completions", json={"prompt": "x", "max_tokens": 7, "ignore_eos": True})
    assert value("minivllm_generated_tokens_total") == before + 7
    assert value("minivllm_num_requests_running") == 0


# ---- tokenizer routes ----


def test_tokenize_accepts_text_beyond_max_model_len(client: httpx.Client) -> None:
    answer = client.post("/tokenize", json={"prompt": "a b " * 25_000}).json()
    assert answer["count"] == 50_001
    assert answer["max_model_len"] < answer["count"]


@pytest.mark.parametrize("text", ["Once upon a time", "你好 🦊", " leading", "a\n\n\tb", ""])
def test_detokenize_inverts_tokenize(client: httpx.Client, text: str) -> None:
    answer = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    responses.TokenizeResponse.model_validate(answer)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 1024
    back = client.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    responses.DetokenizeResponse.model_validate(back)
    assert back["prompt"] == text


def test_tokenizer_info_shows_eos_token_and_chat_template(client: httpx.Client) -> None:
    info = responses.TokenizerInfoResponse.model_validate(client.get("/tokenizer_info").json())
    assert info.eos_token == "<|im_end|>"
    assert "<|im_start|>" in (info.chat_template or "")


def test_detokenize_skips_special_tokens_on_request(client: httpx.Client) -> None:
    tokens = client.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()["tokens"]
    shown = client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    hidden = client.post("/detokenize", json={"tokens": tokens, "skip_special_tokens": True}).json()["prompt"]
    assert "<|im_start|>" in shown
    assert "<|im_start|>" not in hidden


# ---- while the model loads ----


def test_requests_return_503_while_the_engine_loads(loading: LocalServer) -> None:
    with httpx.Client(base_url=loading.base_url) as client:
        asked: list[httpx.Response] = [
            client.get("/health"),
            client.get("/v1/models"),
            client.post("/v1/completions", json={"prompt": "x"}),
            client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "stream": True}),
            client.post("/detokenize", json={"tokens": [1]}),
        ]
        for answer in asked:
            assert answer.status_code == 503
            assert error(answer).code == "loading"
            assert int(answer.headers["retry-after"]) >= 1
        assert "minivllm_engine_up 0.0" in client.get("/metrics").text
        assert client.get("/version").status_code == 200


# ---- overload ----


def test_full_queue_returns_429_with_retry_after(guarded: LocalServer, door: httpx.Client) -> None:
    def ask(number: int) -> httpx.Response:
        body = {"prompt": "endless", "max_tokens": 60, "stream": number % 2 == 0}
        return door.post("/v1/completions", json=body, headers=key(KEYS[0]))

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(12)))
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    for answer in answers:
        if answer.status_code == 429:
            assert error(answer).code == "engine_overloaded"
            assert int(answer.headers["retry-after"]) >= 1
    guarded.until_idle()


# ---- documentation ----


def test_documentation_is_served(client: httpx.Client) -> None:
    assert "openapi.json" in client.get("/docs").text


def test_openapi_describes_every_route_and_its_references_resolve(client: httpx.Client) -> None:
    document: dict[str, Any] = client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert set(document["paths"]) == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models/{model}",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/health",
        "/version",
        "/metrics",
    }
    schemas = document["components"]["schemas"]
    references = re.findall(r'"#/components/schemas/([^"]+)"', client.get("/openapi.json").text)
    assert references
    assert set(references) <= set(schemas)
    for operations in document["paths"].values():
        for operation in operations.values():
            assert "200" in operation["responses"]
            assert "422" not in operation["responses"]
    fields = schemas["CompletionRequest"]["properties"]
    assert fields["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    assert fields["prompt"]["anyOf"]


def test_openapi_lists_every_status_code(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    described = set(paths["/v1/completions"]["post"]["responses"])
    assert described >= {"200", "400", "401", "404", "413", "415", "429", "500", "503"}
