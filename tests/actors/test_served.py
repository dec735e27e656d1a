"""The application with the default model on Ray Serve, over HTTP and by handle."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
import textwrap
import time

import openai
import pytest
from ray import serve

from minivllm.actors.client import AsyncClient, Client
from minivllm.core.errors import InvalidRequestError
from tests.actors.idle import in_engine, read_metrics, wait_for_no_load
from tests.conftest import APP_NAME, Served

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
STREAMS = 64


async def stream_one(client: openai.AsyncOpenAI, served: Served, index: int, stop_after: int | None) -> int:
    """Returns the number of chunks with text; closes the stream after `stop_after` of them."""
    stream = await client.completions.create(
        model=served.model,
        prompt=f"Story number {index}. Once upon a time",
        # A closed stream needs many tokens left: it must not finish before its abort reaches the engine.
        max_tokens=24 if stop_after is None else 2000,
        stream=True,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    chunks = 0
    async for chunk in stream:
        chunks += bool(chunk.choices and chunk.choices[0].text)
        if stop_after is not None and chunks >= stop_after:
            await stream.close()
            return chunks
    assert chunks > 0
    return chunks


async def run_streams(served: Served, *, num_closed: int) -> None:
    client = openai.AsyncOpenAI(base_url=f"{served.base_url}/v1", api_key="none", max_retries=0, timeout=240)
    async with client:
        await asyncio.gather(
            *(stream_one(client, served, index, 3 if index < num_closed else None) for index in range(STREAMS))
        )


def test_sixty_four_concurrent_streams_complete(served: Served) -> None:
    before = read_metrics(served.base_url)
    asyncio.run(run_streams(served, num_closed=0))
    after = read_metrics(served.base_url)
    done = "minivllm_samples_finished_total{length}"
    assert after[done] - before[done] == STREAMS
    generated = "minivllm_generated_tokens_total"
    assert after[generated] - before[generated] == STREAMS * 24
    wait_for_no_load(APP_NAME, served.base_url)


def test_closed_connections_abort_their_requests_and_free_all_blocks(served: Served) -> None:
    before = read_metrics(served.base_url)
    asyncio.run(run_streams(served, num_closed=STREAMS // 3))
    wait_for_no_load(APP_NAME, served.base_url)
    after = read_metrics(served.base_url)
    ended = {
        reason: after[f"minivllm_samples_finished_total{{{reason}}}"]
        - before[f"minivllm_samples_finished_total{{{reason}}}"]
        for reason in ("length", "abort")
    }
    assert ended == {"length": STREAMS - STREAMS // 3, "abort": STREAMS // 3}
    assert after["minivllm_integrity_violations_total"] == 0


def test_metrics_history_shows_blocks_allocated_and_freed(served: Served) -> None:
    client = Client(APP_NAME)
    client.generate("Once upon a time", max_tokens=40, ignore_eos=True)
    wait_for_no_load(APP_NAME, served.base_url)
    points = client.call("metrics_history")
    assert any(point.num_used_blocks > 0 for point in points)
    assert points[-1].num_used_blocks == 0
    assert all(point.num_free_blocks + point.num_used_blocks == point.num_total_blocks for point in points)
    assert [point.time for point in points] == sorted(point.time for point in points)


def test_never_fits_rejections_are_counted_for_text_and_token_prompts(served: Served) -> None:
    name = "minivllm_block_admission_rejections_total{never_fits}"
    before = read_metrics(served.base_url)[name]
    for prompt in ("word " * 9000, [1] * 9000):
        with pytest.raises(InvalidRequestError, match="maximum context length"):
            Client(APP_NAME).generate(prompt, max_tokens=3)
    deadline = time.monotonic() + 30
    while (counted := read_metrics(served.base_url)[name] - before) != 2:
        assert time.monotonic() < deadline, counted
        time.sleep(0.1)


def test_handle_lists_block_owners_and_resets_the_prefix_cache(served: Served) -> None:
    engine = serve.get_deployment_handle("Engine", APP_NAME)
    Client(APP_NAME).generate("A prompt that is long enough to fill more than one block of the cache", max_tokens=30)
    states = [owner.state for owner in engine.owners.remote().result(timeout_s=30)]
    assert "cached" in states
    assert "owned" not in states
    assert engine.reset_prefix_cache.remote().result(timeout_s=30) is True
    assert {owner.state for owner in engine.owners.remote().result(timeout_s=30)} == {"free"}


def test_client_stream_equals_its_complete_answer(served: Served) -> None:
    client = Client(APP_NAME)
    complete = client.chat(QUESTION, max_tokens=20, temperature=0)
    assert complete["choices"][0]["message"]["content"] == ANSWER
    assert complete["choices"][0]["finish_reason"] == "stop"
    assert b"minivllm" not in pickle.dumps(complete).replace(
        complete["id"].encode(), b""
    )  # callers unpickle answers without the package
    chunks = list(client.chat_stream(QUESTION, max_tokens=20, temperature=0))
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert text == ANSWER


@pytest.mark.parametrize("how", ["close", "break"])
def test_closed_client_stream_aborts_the_request(served: Served, how: str) -> None:
    stream = Client(APP_NAME).generate_stream("Once upon a time", max_tokens=2000, ignore_eos=True)
    next(stream)
    assert in_engine(APP_NAME).running == 1
    if how == "close":
        stream.close()
    else:
        for _ in stream:
            break
        del stream
    wait_for_no_load(APP_NAME, served.base_url)


def test_client_raises_typed_errors(served: Served) -> None:
    client = Client(APP_NAME)
    with pytest.raises(InvalidRequestError) as caught:
        client.generate("Hello", max_tokens=-1)
    assert type(caught.value).__name__ == "InvalidRequestError"
    assert caught.value.param == "max_tokens"
    with pytest.raises(InvalidRequestError):
        next(client.chat_stream(QUESTION, temperature=9))


def test_client_timeout_aborts_the_request(served: Served) -> None:
    with pytest.raises(TimeoutError):
        Client(APP_NAME, timeout_s=0.5).generate("Once upon a time", max_tokens=4000, ignore_eos=True)
    wait_for_no_load(APP_NAME, served.base_url)


async def test_async_client_generates_streams_and_cancels(served: Served) -> None:
    client = AsyncClient(APP_NAME)
    answer = await client.chat(QUESTION, max_tokens=20, temperature=0)
    assert answer["choices"][0]["message"]["content"] == ANSWER
    stream = client.generate_stream("Once upon a time", max_tokens=2000, ignore_eos=True)
    await anext(stream)
    await stream.aclose()
    task = asyncio.create_task(client.generate("Once upon a time", max_tokens=4000, ignore_eos=True))
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_for_no_load, APP_NAME, served.base_url)


OTHER_DRIVER = """
    import sys
    import ray
    ray.init(address=sys.argv[1], log_to_driver=False)
    from minivllm.actors.client import Client
    from minivllm.core.errors import InvalidRequestError

    client = Client("minivllm")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    print("text:", client.chat(question, max_tokens=20, temperature=0)["choices"][0]["message"]["content"])
    chunks = client.chat_stream(question, max_tokens=20, temperature=0)
    deltas = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]]
    print("stream:", "".join(deltas), len(deltas) > 3)
    stream = client.generate_stream("Once upon a time", max_tokens=4000, ignore_eos=True)
    next(stream)
    print("running:", client.call("stats").stats.num_running)
    stream.close()
    try:
        client.generate("Hello", max_tokens=0)
    except InvalidRequestError as error:
        print("error:", error.param)
"""


def test_second_ray_driver_generates_streams_and_cancels(served: Served) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(OTHER_DRIVER), served.cluster.address],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"text: {ANSWER}",
        f"stream: {ANSWER} True",
        "running: 1",
        "error: max_tokens",
    ]
    wait_for_no_load(APP_NAME, served.base_url)
