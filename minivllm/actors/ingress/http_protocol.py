"""HttpProtocol: uvicorn's HTTP/1.1 protocol, for clients that offer an upgrade or end their sending direction early.

Java's HttpClient and `curl --http2` send `Upgrade: h2c` with their first request. A server may ignore the offer, but
httptools stops parsing at the end of such a head, and uvicorn then loses the body.

A client that only ended its sending direction waits for its response, one that closed the connection does not. TCP
shows the difference when the server writes, so it writes interim responses, which HTTP/1.1 clients skip.
"""

from __future__ import annotations

import asyncio

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

PROBE_INTERVAL_S = 0.05
"""The first write to a closed connection is answered by a reset, which the second write finds."""
_INTERIM_RESPONSE = b"HTTP/1.1 102 Processing\r\n\r\n"
_UPGRADE_HEADERS = frozenset({b"http2-settings", b"upgrade"})


class _Parser(httptools.HttpRequestParser):
    """Hands a request that offers an upgrade to a new parser, without the offer."""

    def __init__(self, protocol: HttpProtocol) -> None:
        super().__init__(protocol)
        self._protocol = protocol
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # uvicorn feeds bytes only
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._protocol.parse_without_upgrade(data[upgrade.args[0] :])


class HttpProtocol(HttpToolsProtocol):
    """Ignores offers to upgrade; serves no WebSockets."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.parser = _Parser(self)
        super().connection_made(transport)

    def parse_without_upgrade(self, rest: bytes) -> None:
        """Parses the current request again.

        Args:
            rest: what follows its head.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":  # always an upgrade
            self.send_400_response("CONNECT is not supported.")
            return
        head = [b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            options = [option.strip() for option in value.split(b",")] if name == b"connection" else [value]
            if name not in _UPGRADE_HEADERS:
                kept = b", ".join(option for option in options if option.lower() not in _UPGRADE_HEADERS)
                head.append(b"%s: %s" % (name, kept))
        self.parser = _Parser(self)
        self.parser.feed_data(b"\r\n".join([*head, b"", rest]))

    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns True to keep the connection open for the response to a complete request.

        HTTP/1.0 has no interim responses, so that the end of such a client's sending direction is a disconnect.
        """
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete:
            return False
        if self.scheme == "https" or cycle.scope["http_version"] != "1.1":
            return False
        cycle.keep_alive = False
        self._probe()
        return True

    def _probe(self) -> None:
        if self.transport.is_closing() or self.cycle.response_started:
            return  # the parts of the response are probes themselves
        self.transport.write(_INTERIM_RESPONSE)
        self.loop.call_later(PROBE_INTERVAL_S, self._probe)
