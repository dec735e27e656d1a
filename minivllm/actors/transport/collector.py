"""RequestOutputCollector: outputs on their way to one consumer, merged until it takes them."""

from __future__ import annotations

import asyncio
import time

from minivllm.core.outputs import RequestOutput


def merge(first: RequestOutput, second: RequestOutput) -> None:
    """Appends the news of `second` to `first`, an earlier output of the same sample."""
    first.new_token_ids += second.new_token_ids
    if second.logprobs is not None:
        first.logprobs = second.logprobs if first.logprobs is None else first.logprobs + second.logprobs
    if second.prompt_logprobs is not None:
        first.prompt_logprobs = (
            second.prompt_logprobs if first.prompt_logprobs is None else first.prompt_logprobs + second.prompt_logprobs
        )
    first.finished = second.finished
    first.finish_reason = second.finish_reason
    first.num_cached_tokens = second.num_cached_tokens
    first.error = second.error
    first.stop_token_id = second.stop_token_id


class RequestOutputCollector:
    """A queue that holds at most one output of each sample: what comes while one waits is merged into it.

    So the first token leaves at once, later ones as the consumer takes them, and a slow consumer costs no memory but
    that of its tokens. It belongs to one asyncio loop and has one consumer; nothing in it waits but `take`.
    """

    __slots__ = ("_last_asked", "_outputs", "_waiter")

    def __init__(self) -> None:
        self._outputs: dict[tuple[str, int], RequestOutput] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._last_asked = time.monotonic()

    def push(self, output: RequestOutput) -> None:
        key = (output.request_id, output.index)
        earlier = self._outputs.get(key)
        if earlier is None:
            self._outputs[key] = output
        else:
            merge(earlier, output)
        self.wake()

    def wake(self) -> None:
        """Lets a waiting `take` return, with nothing if nothing came."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[RequestOutput]:
        """All that has come since the last call, as soon as there is something; one output a sample."""
        if not self._outputs:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
                self._last_asked = time.monotonic()
        else:
            self._last_asked = time.monotonic()
        outputs = list(self._outputs.values())
        self._outputs = {}
        return outputs

    @property
    def is_empty(self) -> bool:
        return not self._outputs

    def seconds_unpolled(self, now: float) -> float:
        """How long the consumer has not asked for outputs; 0 while it waits for some. `now` is time.monotonic()."""
        return 0.0 if self._waiter is not None else now - self._last_asked
