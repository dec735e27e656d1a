"""Failures: a status before the first token, an error event after it; other requests are unaffected."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from minivllm.actors.config import AppArgs
from minivllm.core.engine import LLMEngine
from minivllm.core.errors import RequestFailedError
from minivllm.core.text.tokenizer import Tokenizer
from tests.http.conftest import REPLIES
from tests.http.stand_ins import LocalServer, ScriptedRunner
from tests.http.streams import joined_text, read_stream

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def failing(runner: ScriptedRunner) -> Iterator[None]:
    runner.fail_samples["FAILS"] = RequestFailedError("the sampler tripped")
    yield
    runner.fail_samples.clear()
    runner.may_fail.set()


@pytest.mark.usefixtures("failing")
def test_failure_midway_ends_the_stream_with_an_error_event(
    scripted_client: httpx.Client, runner: ScriptedRunner
) -> None:
    for path, body in (
        (COMPLETIONS, {"prompt": "FAILS"}),
        (CHAT, {"messages": [{"role": "user", "content": "FAILS"}]}),
    ):
        runner.may_fail.clear()
        stream = read_stream(scripted_client, path, {**body, "max_tokens": 50}, on_chunk=runner.may_fail.set)
        assert stream.status == 200
        assert joined_text(stream.chunks)
        assert stream.error is not None
        assert set(stream.error) == {"message", "type", "param", "code"}
        assert "the sampler tripped" in stream.error["message"]
        answer = scripted_client.post(path, json={**body, "max_tokens": 50})
        assert answer.status_code == 500
        assert "the sampler tripped" in answer.json()["error"]["message"]


@pytest.mark.usefixtures("failing")
def test_failed_request_does_not_affect_other_requests(scripted: LocalServer, scripted_client: httpx.Client) -> None:
    def ask(prompt: Any) -> httpx.Response:
        return scripted_client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 60})

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, ["REPLY-LONG", "FAILS", ["REPLY-LONG", "FAILS"]] * 4))
    assert [answer.status_code for answer in answers] == [200, 500, 500] * 4
    assert {answer.json()["choices"][0]["text"] for answer in answers[::3]} == {REPLIES["REPLY-LONG"]}
    scripted.until_idle()


def test_dead_engine_returns_503_and_is_unhealthy(tokenizer: Tokenizer) -> None:
    args = AppArgs(served_model_name="doomed", max_model_len=1024)
    runner = ScriptedRunner(tokenizer, dict(REPLIES), step_s=0.005)
    with (
        LocalServer(args, tokenizer, lambda: LLMEngine(args.engine_config(), model_runner=runner)) as server,
        httpx.Client(base_url=server.base_url, timeout=30) as client,
    ):
        assert client.get("/health").status_code == 200
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            stream = pool.submit(read_stream, client, COMPLETIONS, {"prompt": "endless", "max_tokens": 900})
            while server.snapshot().stats.generated_tokens_total < 5:
                pass
            runner.fail_next_step = RuntimeError("out of memory at /some/path.py")
            broken = stream.result(30)
        assert broken.status == 200
        assert broken.error is not None
        for answer in (client.get("/health"), client.post(COMPLETIONS, json={"prompt": "x"})):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_unavailable"
        assert read_stream(client, COMPLETIONS, {"prompt": "x"}).status == 503
        assert client.get("/v1/models").status_code == 200
