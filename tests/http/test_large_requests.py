"""Large requests and long steps: other requests are served meanwhile, and large responses are complete."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from minivllm.actors.openai.serving.tokenize import PART
from tests.http.stand_ins import LocalServer, ScriptedRunner

COMPLETIONS = "/v1/completions"
TEXT = "river of words, "


def test_other_requests_are_served_while_a_long_text_is_tokenized(
    scripted: LocalServer, scripted_client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_end = threading.Event(), threading.Event()
    encode = scripted.service.tokenizer.encode

    def encode_slowly(text: str, **options: Any) -> list[int]:
        if len(text) > 100_000:
            began.set()
            assert may_end.wait(60)
        return encode(text, **options)

    monkeypatch.setattr(scripted.service.tokenizer, "encode", encode_slowly)
    with ThreadPoolExecutor(1) as threads:
        long = threads.submit(httpx.post, scripted.base_url + "/tokenize", json={"prompt": TEXT * 10_000}, timeout=60)
        assert began.wait(60)
        for prompt in ("REPLY-SHORT", "REPLY-SHORT " * 200):
            assert scripted_client.post(COMPLETIONS, json={"prompt": prompt}).status_code == 200
        assert not long.done()
        may_end.set()
        assert long.result().json()["count"] == len(encode(TEXT * 10_000))


def test_long_token_lists_are_complete_in_the_response(scripted: LocalServer, scripted_client: httpx.Client) -> None:
    ids = scripted.service.tokenizer.encode(TEXT * PART)
    body = {"prompt": TEXT * PART, "return_token_strs": True}
    answer = scripted_client.post("/tokenize", json=body).json()
    assert (answer["count"], answer["tokens"]) == (len(ids), ids)
    assert len(ids) > 2 * PART
    assert len(answer["token_strs"]) == len(ids)
    assert "".join(answer["token_strs"]) == TEXT * PART
    assert scripted_client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": TEXT * PART}


def test_conversation_of_many_messages_has_the_tokens_of_its_template(
    scripted: LocalServer, scripted_client: httpx.Client
) -> None:
    messages = [{"role": ("user", "assistant")[place % 2], "content": f"{place}?"} for place in range(999)]
    tokenizer = scripted.service.tokenizer
    expected = tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)
    assert scripted_client.post("/tokenize", json={"messages": messages}).json()["tokens"] == expected


def test_error_of_a_large_body_names_its_field(scripted_client: httpx.Client) -> None:
    answer = scripted_client.post(COMPLETIONS, json={"prompt": TEXT * 5000, "temperature": -1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")


def test_health_and_metrics_answer_during_a_long_step(
    scripted: LocalServer, scripted_client: httpx.Client, runner: ScriptedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    began = threading.Event()
    execute = runner.execute

    def execute_slowly(step: Any) -> Any:
        began.set()
        assert may_end.wait(60)
        return execute(step)

    monkeypatch.setattr(runner, "execute", execute_slowly)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(
            httpx.post, scripted.base_url + COMPLETIONS, json={"prompt": "REPLY-SHORT"}, timeout=60
        )
        assert began.wait(60)
        assert scripted_client.get("/health").json() == {"status": "ok"}
        assert "minivllm_engine_up 1.0" in scripted_client.get("/metrics").text
        assert not running.done()
        may_end.set()
        assert running.result().status_code == 200
