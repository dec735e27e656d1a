"""EngineClient: how the ingress talks to the engine. Hides Ray's transport, its errors and its ways of cancelling."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from minivllm.actors.messages import EngineInfo, EngineSnapshot, GenerateRequest
from minivllm.core.outputs import RequestOutput

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle


class EngineClient:
    """One per process that sends requests to the engine; used from one asyncio loop.

    Every method raises our own typed errors (minivllm.core.errors): InvalidRequestError, NeverFitsError and
    EngineOverloadedError for a request that was refused, EngineDeadError when the engine died or cannot be reached.
    """

    def __init__(self, engine: DeploymentHandle[Any]) -> None:
        self._engine = engine
        self._stream = engine.options(stream=True, _by_reference=False)
        self._call = engine.options(_by_reference=False)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[list[RequestOutput]]:
        """Outputs of one request, merged from all that came since the consumer last asked.

        A refusal is raised by the first `anext`. Whatever ends the iteration early (`aclose`, cancellation, an
        exception in the consumer's loop followed by `aclose`) aborts the request.
        """
        response = self._stream.generate.remote(request)
        try:
            async for outputs in response:
                yield outputs
        finally:
            response.cancel()

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or one of its `n` samples. Its terminal output still arrives. An unknown id is no error."""
        await self._call.abort.remote(request_id, index)

    async def info(self) -> EngineInfo:
        """What never changes while one engine lives; waits for an engine that is still loading."""
        info: EngineInfo = await self._call.info.remote()
        return info

    async def stats(self) -> EngineSnapshot:
        """A fresh snapshot, taken between two steps."""
        snapshot: EngineSnapshot = await self._call.stats.remote()
        return snapshot
