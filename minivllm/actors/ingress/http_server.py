"""HttpServer: the ingress answers HTTP on a port of its own, without Serve's proxy in between.

Through the proxy a request crosses two processes more, and each streamed token is packed, sent and unpacked once more:
on a machine whose cores all compute, that is time taken from the model. Serve's proxy goes on answering on its own port
(`http_options`), which stays open while a replica is replaced; a port of one process cannot.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

BIND_TIMEOUT_S = 15.0
"""A replica that is being replaced has its port until it has stopped, which Serve lets take ten seconds."""

GRACE_S = 7.0
"""Requests that run when the server is closed have this long to end: less than Serve waits for a replica."""

LAST_WORDS_S = 1.0
"""And what ends then has this long to tell its client."""

KEEP_ALIVE_S = 90
"""As Serve's proxy. Clients give up idle connections sooner, so it is not us who close one that is just used again."""


class PortInUseError(OSError):
    """Somebody else listens on the port."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens, on an address that nobody else listens on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


class HttpServer:
    """Serves an ASGI application from the running event loop.

    Args:
        app: answers at `/`, whatever `route_prefix` Serve knows it by.
        host: address to listen on.
        port: 0 takes a free one.
    """

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                access_log=False,
                log_config=None,
                log_level="warning",
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def open(self, timeout_s: float = BIND_TIMEOUT_S) -> None:
        """Returns when connections are accepted.

        Raises:
            PortInUseError: somebody else had the port for `timeout_s`.
            OSError: there is no such address here, or the port is not ours to take.
        """
        listener = await self._bind(time.monotonic() + timeout_s)
        self.port = listener.getsockname()[1]
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            await asyncio.wait([self._serving], timeout=0.01)
            if self._serving.done():
                self._serving.result()
                raise RuntimeError("the HTTP server ended while it started")

    async def close(self, end_requests: Callable[[], None], grace_s: float = GRACE_S) -> None:
        """Takes no more connections, and returns when all requests have ended. Those that still run after `grace_s` are
        ended by `end_requests`."""
        if self._serving is None:
            return
        serving, self._serving = self._serving, None
        self._server.should_exit = True
        await asyncio.wait([serving], timeout=grace_s)
        if not serving.done():
            end_requests()
            await asyncio.wait([serving], timeout=LAST_WORDS_S)
        self._server.force_exit = True  # nothing is left to wait for
        await serving

    async def _bind(self, deadline: float) -> socket.socket:
        while True:
            try:
                return listen(self.host, self.port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                if time.monotonic() > deadline:
                    message = f"http_port: {self.port} on {self.host} is in use by another program"
                    raise PortInUseError(errno.EADDRINUSE, message) from error
            await asyncio.sleep(0.1)
