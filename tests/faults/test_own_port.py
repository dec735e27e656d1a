"""The ingress's own port (`http_port`): answers like Serve's proxy, and survives a killed ingress."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import openai
import pytest
from ray import serve

from minivllm.actors.app import bind_app
from minivllm.actors.config import AppArgs
from tests.conftest import RayCluster, free_port
from tests.faults.faulty_engine import build_engine
from tests.processes import kill, replica_pid, wait_until

APP = "own-port"


@dataclass(frozen=True)
class Ports:
    own: str
    proxy: str


@pytest.fixture
def ports(ray_cluster: RayCluster) -> Iterator[Ports]:
    port = free_port()
    args = AppArgs(served_model_name="broken", validate_blocks=True, max_num_seqs=64, http_port=port)
    serve.run(bind_app(args, build_engine), name=APP, route_prefix=f"/{APP}")
    yield Ports(f"http://127.0.0.1:{port}", f"{ray_cluster.base_url}/{APP}")
    serve.delete(APP)


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def ask(url: str) -> tuple[str, str]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        fields = {"model": "broken", "prompt": "Hello", "max_tokens": 8, "extra_body": {"ignore_eos": True}}
        complete = client.completions.create(**fields)  # type: ignore[call-overload]
        stream = client.completions.create(stream=True, **fields)  # type: ignore[call-overload]
        return complete.choices[0].text, "".join(chunk.choices[0].text for chunk in stream)


def test_own_port_answers_like_the_proxy_and_survives_a_killed_ingress(ports: Ports) -> None:
    wait_until(lambda: is_up(ports.own), "the engine is ready")
    complete, streamed = ask(ports.proxy)
    assert complete == streamed != ""
    assert ask(ports.own) == (complete, streamed)
    reply = httpx.get(f"{ports.own}/v1/models", headers={"X-Request-Id": "mine"}, timeout=60)
    assert reply.headers.get_list("x-request-id") == ["mine"]

    kill(replica_pid(APP, "Ingress"))
    wait_until(lambda: not is_up(ports.own), "the killed ingress is gone", 10)
    wait_until(lambda: is_up(ports.own), "the new ingress listens on the port")
    assert ask(ports.own) == (complete, streamed)


def test_deleted_application_ends_running_streams_with_an_error(ports: Ports) -> None:
    wait_until(lambda: is_up(ports.own), "the engine is ready")

    async def delete_meanwhile() -> str:
        body = {"model": "broken", "prompt": "Hello", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        async with (
            httpx.AsyncClient(timeout=60) as client,
            client.stream("POST", f"{ports.own}/v1/completions", json=body) as response,
        ):
            text = ""
            deleting = None
            async for part in response.aiter_text():
                text += part
                deleting = deleting or asyncio.create_task(asyncio.to_thread(serve.delete, APP))
            assert deleting is not None
            await deleting
            return text

    text = asyncio.run(delete_meanwhile())
    assert '"engine_unavailable"' in text
    assert text.rstrip().endswith("data: [DONE]")
