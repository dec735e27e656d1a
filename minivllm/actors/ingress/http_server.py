"""HttpServer: the HTTP server of the ingress's own port (`http_port`), without Serve's proxy in between.

A request through the proxy crosses two more processes, which takes CPU time from the model on a machine whose cores all
compute. Serve's proxy still answers on its own port (`http_options`), which stays open while a replica is replaced.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp

BIND_TIMEOUT_S = 15.0
"""Serve gives a replica ten seconds to stop; its port is in use until then."""
GRACE_S = 7.0
"""Time for running requests to end when the server is closed: less than Serve gives the replica."""
ERROR_GRACE_S = 1.0
"""Time to send their errors to the clients of requests that were ended."""
KEEP_ALIVE_S = 90
"""As Serve's proxy, and longer than clients keep idle connections: the server does not close one that is being used."""


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises OSError if the address is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


class HttpServer:
    """Serves an ASGI application at `/` from the running event loop. Port 0 takes a free one."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        self.host = host
        self.port = port
        quiet: dict[str, Any] = {"access_log": False, "log_config": None, "log_level": "warning"}
        config = uvicorn.Config(app, lifespan="off", ws="none", timeout_keep_alive=KEEP_ALIVE_S, **quiet)
        self._server = uvicorn.Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def open(self, timeout_s: float = BIND_TIMEOUT_S) -> None:
        """Returns when connections are accepted. Raises OSError: the port was in use for `timeout_s`, is not permitted,
        or this machine has no such address."""
        listener = await self._bind(time.monotonic() + timeout_s)
        self.port = listener.getsockname()[1]
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            await asyncio.wait([self._serving], timeout=0.01)
            if self._serving.done():
                self._serving.result()
                raise RuntimeError("the HTTP server ended while it started")

    async def close(self, end_requests: Callable[[], None], grace_s: float = GRACE_S) -> None:
        """Accepts no more connections and returns when all requests have ended. After `grace_s`, `end_requests` is
        called to end those that still run."""
        if self._serving is None:
            return
        serving, self._serving = self._serving, None
        self._server.should_exit = True
        await asyncio.wait([serving], timeout=grace_s)
        if not serving.done():
            end_requests()
            await asyncio.wait([serving], timeout=ERROR_GRACE_S)
        self._server.force_exit = True
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
                    raise OSError(errno.EADDRINUSE, message) from error
            await asyncio.sleep(0.1)
