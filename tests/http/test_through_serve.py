"""Headers, errors and closed connections behind Serve's proxy; HTTP and handle give the same answers."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from minivllm.actors.client import Client
from minivllm.actors.openai.protocol.responses import ErrorResponse
from minivllm.core.errors import InvalidRequestError
from tests.actors.idle import read_metrics, wait_for_no_load
from tests.conftest import APP_NAME, Served
from tests.http.streams import joined_text, read_stream

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def proxy(served: Served) -> httpx.Client:
    return httpx.Client(base_url=served.base_url, timeout=60)


def test_request_id_header_is_returned_once(proxy: httpx.Client) -> None:
    answer = proxy.post(COMPLETIONS, json={"prompt": "Hi", "max_tokens": 1}, headers={"x-request-id": "mine"})
    assert answer.headers.get_list("x-request-id") == ["mine"]


def test_openai_errors_pass_through_the_proxy(proxy: httpx.Client) -> None:
    for method, path, status in (("GET", "/nope", 404), ("GET", CHAT, 405), ("POST", "/v1/models", 405)):
        answer = proxy.request(method, path)
        assert answer.status_code == status
        ErrorResponse.model_validate(answer.json())
    answer = proxy.post(COMPLETIONS, json={"prompt": "x", "temperature": -1, "stream": True})
    assert answer.status_code == 400
    assert ErrorResponse.model_validate(answer.json()).error.param == "temperature"


def test_too_large_body_returns_413_and_the_next_request_succeeds(proxy: httpx.Client) -> None:
    answer = proxy.post(COMPLETIONS, json={"prompt": "river " * 3_000_000})
    assert answer.status_code == 413
    ErrorResponse.model_validate(answer.json())
    assert proxy.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_closed_connections_abort_non_streamed_requests(served: Served) -> None:
    before = read_metrics(served.base_url)["minivllm_samples_finished_total{abort}"]

    async def disconnect(client: httpx.AsyncClient, number: int) -> None:
        body = {"prompt": f"A long story, number {number}:", "max_tokens": 4000, "ignore_eos": True}
        with pytest.raises(httpx.ReadTimeout):
            await client.post(COMPLETIONS, json=body, timeout=httpx.Timeout(60, read=2))

    async def all_disconnect() -> None:
        limits = httpx.Limits(max_connections=50, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=served.base_url, limits=limits) as client:
            await asyncio.gather(*(disconnect(client, number) for number in range(20)))

    asyncio.run(all_disconnect())
    wait_for_no_load(APP_NAME, served.base_url)
    assert read_metrics(served.base_url)["minivllm_samples_finished_total{abort}"] == before + 20


def test_http_and_handle_give_the_same_answer(served: Served, proxy: httpx.Client) -> None:
    fields = {"prompt": "你好 🦊 and", "max_tokens": 12, "temperature": 0, "logprobs": 1}
    over_http = proxy.post(COMPLETIONS, json=fields).json()
    by_handle = Client(APP_NAME).generate(**fields)
    assert by_handle["choices"][0]["text"] == over_http["choices"][0]["text"]
    assert by_handle.keys() == over_http.keys()
    chunks = list(Client(APP_NAME).generate_stream(**fields))
    assert joined_text(chunks) == over_http["choices"][0]["text"]
    assert joined_text(read_stream(proxy, COMPLETIONS, fields).chunks) == over_http["choices"][0]["text"]


def test_http_and_handle_reject_with_the_same_error(proxy: httpx.Client) -> None:
    for fields in ({"prompt": "x", "top_p": 2}, {"prompt": []}, {"prompt": [10**9]}, {"prompt": "x", "suffix": "y"}):
        refused = ErrorResponse.model_validate(proxy.post(COMPLETIONS, json=fields).json()).error
        with pytest.raises(InvalidRequestError) as caught:
            Client(APP_NAME).generate(**fields)
        assert (caught.value.param, caught.value.message) == (refused.param, refused.message)
