"""Latencies: when the tokens of a request came, counted into the engine's histograms."""

from __future__ import annotations

from minivllm.actors.transport.messages import Histogram

TIME_TO_FIRST_TOKEN = "time_to_first_token_seconds"
INTER_TOKEN_LATENCY = "inter_token_latency_seconds"
REQUEST_LATENCY = "request_latency_seconds"

_BOUNDS = {
    TIME_TO_FIRST_TOKEN: (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0),
    INTER_TOKEN_LATENCY: (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5),
    REQUEST_LATENCY: (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 900.0),
}


class Latencies:
    """One request's clock. Times are seconds of `time.monotonic()`."""

    __slots__ = ("_arrival", "_histograms", "_last")

    def __init__(self, histograms: dict[str, Histogram], arrival: float) -> None:
        self._histograms = histograms
        self._arrival = arrival
        self._last: dict[int, float] = {}

    @staticmethod
    def histograms() -> dict[str, Histogram]:
        """The empty histograms that all requests of an engine count into."""
        return {name: Histogram.empty(bounds) for name, bounds in _BOUNDS.items()}

    def tokens_arrived(self, index: int, count: int, now: float) -> None:
        """`count` tokens of sample `index` came together; several share the time that has passed."""
        last = self._last.get(index)
        if last is None:
            self._histograms[TIME_TO_FIRST_TOKEN].observe(now - self._arrival)
        else:
            self._histograms[INTER_TOKEN_LATENCY].observe((now - last) / count, count)
        self._last[index] = now

    def request_ended(self, now: float) -> None:
        self._histograms[REQUEST_LATENCY].observe(now - self._arrival)
