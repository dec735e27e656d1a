"""ASGI middleware: API keys, request ids, and what clients other than SDKs send."""

from __future__ import annotations

import hashlib
import hmac
import uuid
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minivllm.actors.openai.protocol.errors import error_response

OPEN_PATHS = frozenset({"/health"})


class ApiKeyMiddleware:
    """Requires one of the keys as bearer token, except for `/health`.

    Compares the digests of all keys every time, so that the time taken shows nothing about them.
    """

    def __init__(self, app: ASGIApp, api_keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or _path(scope) in OPEN_PATHS or self._is_known(scope):
            await self._app(scope, receive, send)
        else:
            message = "an API key is needed: send the header 'Authorization: Bearer KEY'"
            error = HTTPException(401, message, {"www-authenticate": "Bearer"})
            await error_response(error)(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        token = token.strip(" ")
        digest = hashlib.sha256(token.encode("latin-1")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and bool(token) and any(matches)


def _path(scope: Scope) -> str:
    """Returns the path below the mount point of the application."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path


class RequestIdMiddleware:
    """Echoes `X-Request-Id`, or generates one. Serve's proxy does the same."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = Headers(raw=scope.get("headers", [])).get("x-request-id") or str(uuid.uuid4())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode("latin-1"))]}
            await send(message)

        await self._app(scope, receive, send_with_id)


class ClientVariantsMiddleware:
    """Answers HEAD as GET, ignores slashes at the end of a path, and sends HTTP/1.0 clients no chunked encoding.

    The HTTP server drops the body of an answer to HEAD.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            scope = {**scope, "method": method, "path": scope["path"].rstrip("/") or "/"}
            if scope["http_version"] == "1.0":
                send = _WholeBody(send)
        await self._app(scope, receive, send)


class _WholeBody:
    """Sends a response when it is complete, with its length."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message = {}
        self._body = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._body += message.get("body", b"")
        if not message.get("more_body", False):
            headers = [header for header in self._start["headers"] if header[0] != b"content-length"]
            headers.append((b"content-length", b"%d" % len(self._body)))
            await self._send({**self._start, "headers": headers})
            await self._send({**message, "body": bytes(self._body)})
