"""What clients other than SDKs send: upgrade offers, byte order marks, HTTP/1.0, HEAD, slashes, closed directions."""

from __future__ import annotations

import gzip
import json
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest

from tests.conftest import Served
from tests.http.stand_ins import LocalServer

COMPLETIONS = "/v1/completions"
BODY = json.dumps({"prompt": "REPLY-SHORT", "max_tokens": 8}).encode()
INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n"
UPGRADE = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQCAAAAAAIAAAAA"}


def request(body: bytes = BODY, *, version: str = "1.1", path: str = COMPLETIONS, **headers: str) -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: server", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}"] + [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def exchange(base_url: str, *parts: bytes, end_sending: bool = False) -> list[bytes]:
    """Sends the parts in packets of their own and returns the head and the body of the response."""
    address = urlsplit(base_url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            connection.sendall(part)
        if end_sending:
            connection.shutdown(socket.SHUT_WR)
        received = b""
        while b"\r\n\r\n" not in received or not is_complete(*received.split(b"\r\n\r\n", 1)):
            data = connection.recv(65536)
            if not data:
                break
            received += data
            while received.startswith(INTERIM):
                received = received.removeprefix(INTERIM)
    return received.split(b"\r\n\r\n", 1)


def is_complete(head: bytes, body: bytes) -> bool:
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return len(body) == int(lengths[0].split(b":")[1]) if lengths else body.endswith(b"0\r\n\r\n")


def text_of(body: bytes) -> str:
    return str(json.loads(body)["choices"][0]["text"])


def test_body_after_an_upgrade_offer_is_read_wherever_packets_end(scripted: LocalServer) -> None:
    data = request(**UPGRADE)
    for cut in range(1, len(data), 7):
        head, body = exchange(scripted.base_url, data[:cut], data[cut:])
        assert head.startswith(b"HTTP/1.1 200"), cut
        assert text_of(body) == "Yes."


def test_chunked_body_after_an_upgrade_offer_is_read(scripted: LocalServer) -> None:
    data = request(b"", **UPGRADE).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    _, body = exchange(scripted.base_url, data, b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY))
    assert text_of(body) == "Yes."


def test_pipelined_requests_with_upgrade_offers_are_all_answered(scripted: LocalServer) -> None:
    close = {**UPGRADE, "Connection": "close"}
    address = urlsplit(scripted.base_url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.sendall(request(**UPGRADE) * 2 + request(**close))
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert received.count(b"HTTP/1.1 200") == received.count(b'"text":"Yes."') == 3


def test_connect_gets_400(scripted: LocalServer) -> None:
    address = urlsplit(scripted.base_url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.sendall(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n")
        assert b"".join(iter(lambda: connection.recv(65536), b"")).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_gets_a_body_of_known_length(scripted: LocalServer, stream: bool) -> None:
    body = json.dumps({"prompt": "REPLY-SHORT", "max_tokens": 8, "stream": stream}).encode()
    head, received = exchange(scripted.base_url, request(body, version="1.0"))
    assert b"transfer-encoding" not in head.lower()
    assert f"content-length: {len(received)}".encode() in head.lower()
    assert received.endswith(b"data: [DONE]\n\n") if stream else text_of(received) == "Yes."


def test_client_that_ends_its_sending_direction_gets_its_response(scripted: LocalServer) -> None:
    _, body = exchange(scripted.base_url, request(), end_sending=True)
    assert text_of(body) == "Yes."


@pytest.mark.parametrize("length", [len(BODY) + 5, None], ids=["content-length", "chunked"])
def test_incomplete_body_of_a_client_that_ends_its_sending_direction_closes_the_connection(
    scripted: LocalServer, length: int | None
) -> None:
    data = request().replace(f"Content-Length: {len(BODY)}".encode(), f"Content-Length: {length}".encode())
    if length is None:
        data = request(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"5\r\nab"
    address = urlsplit(scripted.base_url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        assert b"200 OK" not in b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_connection_option_close_beside_an_upgrade_offer_closes_the_connection(
    scripted: LocalServer, version: str
) -> None:
    body = json.dumps({"prompt": "REPLY-SHORT", "max_tokens": 8, "stream": True}).encode()
    options = {**UPGRADE, "Connection": "Upgrade, HTTP2-Settings" + (", close" if version == "1.1" else "")}
    address = urlsplit(scripted.base_url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(request(body, version=version, **options))
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b"[DONE]" in received
    assert (b"transfer-encoding" in received.lower()) == (version == "1.1")


def test_client_that_closes_its_connection_is_noticed_before_the_response(scripted: LocalServer) -> None:
    body = json.dumps({"prompt": "endless", "max_tokens": 100_000}).encode()
    before = scripted.snapshot().stats
    address = urlsplit(scripted.base_url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.sendall(request(body))
    deadline = time.monotonic() + 5
    while scripted.snapshot().stats.requests_total == before.requests_total:
        assert time.monotonic() < deadline
    scripted.until_idle()
    assert scripted.snapshot().stats.finished["abort"] == before.finished.get("abort", 0) + 1


def test_byte_order_mark_before_the_json_is_ignored(scripted_client: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    answer = scripted_client.post(COMPLETIONS, content=b"\xef\xbb\xbf" + BODY, headers=headers)
    assert answer.json()["choices"][0]["text"] == "Yes."


@pytest.mark.parametrize(
    "codings",
    [[("content-encoding", "gzip")], [("content-encoding", "identity"), ("content-encoding", "gzip")]],
    ids=["one header", "two headers"],
)
def test_compressed_body_gets_415_that_names_the_encoding(
    scripted_client: httpx.Client, codings: list[tuple[str, str]]
) -> None:
    headers = [("content-type", "application/json"), *codings]
    answer = scripted_client.post(COMPLETIONS, content=gzip.compress(BODY), headers=headers)
    assert answer.status_code == 415
    assert "gzip" in answer.json()["error"]["message"]


def test_empty_content_encoding_is_none(scripted_client: httpx.Client) -> None:
    headers = {"content-type": "application/json", "content-encoding": ""}
    answer = scripted_client.post(COMPLETIONS, content=BODY, headers=headers)
    assert answer.json()["choices"][0]["text"] == "Yes."


def test_compressed_chunks_get_415(scripted: LocalServer) -> None:
    data = request(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: gzip, chunked")
    head, _ = exchange(scripted.base_url, data, b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY))
    assert head.startswith(b"HTTP/1.1 415")


def test_slash_at_the_end_of_a_path_is_ignored(scripted_client: httpx.Client) -> None:
    assert scripted_client.get("/health/").json() == {"status": "ok"}
    assert scripted_client.get("/v1/models/scripted/").json()["id"] == "scripted"
    answer = scripted_client.post(COMPLETIONS + "/", json={"prompt": "REPLY-SHORT", "max_tokens": 8})
    assert answer.json()["choices"][0]["text"] == "Yes."


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/version"])
def test_head_returns_the_headers_of_get(scripted_client: httpx.Client, path: str) -> None:
    answer = scripted_client.head(path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"] == scripted_client.get(path).headers["content-type"]


def test_head_of_a_generation_gets_405(scripted_client: httpx.Client) -> None:
    assert scripted_client.head(COMPLETIONS).status_code == 405


@pytest.mark.parametrize("stream", [False, True])
def test_proxy_serves_upgrade_offers_and_http_1_0(served: Served, stream: bool) -> None:
    body = json.dumps({"prompt": "Hello", "max_tokens": 3, "stream": stream}).encode()
    head, received = exchange(served.base_url, request(body, **UPGRADE))
    assert head.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" in received if stream else text_of(received)
    head, received = exchange(served.base_url, request(body, version="1.0"))
    assert b"transfer-encoding" not in head.lower()
    assert received.endswith(b"data: [DONE]\n\n") if stream else text_of(received)


def test_proxy_answers_head_and_slashes(served: Served) -> None:
    assert httpx.head(served.base_url + "/health").status_code == 200
    assert httpx.get(served.base_url + "/health/").json() == {"status": "ok"}
