"""GenerationService: the engine, the tokenizer and the checks that HTTP routes and handle methods share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from minivllm.actors.config import AppArgs
from minivllm.actors.openai.protocol.errors import ModelNotFoundError, ServiceLoadingError, cut, shorten, wrong_field
from minivllm.actors.transport.messages import EngineInfo, EngineSnapshot, GenerateRequest
from minivllm.actors.transport.output_router import RequestStream
from minivllm.core.errors import EngineDeadError, InvalidRequestError, MinivllmError
from minivllm.core.text.tokenizer import Tokenizer

Result = TypeVar("Result")

logger = logging.getLogger("minivllm.ingress")

INLINE_CHARACTERS = 2048
"""A text up to this length is tokenized in well under a millisecond, which is less than a thread switch costs."""
LONG_TEXT_CHARACTERS = 64 * 1024
"""A text up to this length is tokenized in some 30 ms."""
HEALTH_TIMEOUT_S = 5.0
"""The engine answers at once, whatever its step does."""
METRICS_TIMEOUT_S = 5.0
"""Less than the scrape timeout of Prometheus."""
INFO_RETRY_S = 0.5


class EngineApi(Protocol):
    """The part of `actors.ingress.engine_client.EngineClient` that this layer uses."""

    async def submit(self, request: GenerateRequest) -> RequestStream: ...
    async def abort(self, request_id: str, index: int | None = None) -> None: ...
    async def info(self) -> EngineInfo: ...
    async def stats(self) -> EngineSnapshot: ...
    def count_never_fits(self) -> None: ...


class GenerationService:
    """One per ingress process; used from one asyncio loop.

    `fetch_last_snapshot` asks the Metrics actor for the newest snapshot, for when the engine does not answer.
    """

    def __init__(
        self,
        engine: EngineApi,
        tokenizer: Tokenizer,
        args: AppArgs,
        fetch_last_snapshot: Callable[[], Awaitable[EngineSnapshot | None]] | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.args = args
        self.started_at = int(time.time())
        self._fetch_last_snapshot = fetch_last_snapshot
        self._info: EngineInfo | None = None
        self._info_task: asyncio.Task[None] | None = None
        # Few threads: more would take cores from the engine. Long texts have their own: others do not wait for them.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._thread_of_long_texts = ThreadPoolExecutor(1, thread_name_prefix="tokenize-long")
        self._longest_token = max((len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)), default=1)

    # ---- engine

    def start(self) -> None:
        """Starts to ask for the engine's info; until it is known, requests get 503."""
        self._info_task = asyncio.get_running_loop().create_task(self._fetch_info())

    async def ready(self) -> EngineInfo:
        """Waits for an engine that is loading. Raises EngineDeadError if it cannot be reached."""
        if self._info is None:
            self._info = await self.engine.info()
        return self._info

    @property
    def info(self) -> EngineInfo:
        """Raises ServiceLoadingError until the engine is ready."""
        if self._info is None:
            raise ServiceLoadingError("the model is still loading; try again soon")
        return self._info

    async def healthy_snapshot(self) -> EngineSnapshot:
        """Returns a new snapshot. Raises ServiceLoadingError or EngineDeadError unless the engine works."""
        if self._info is None:
            raise ServiceLoadingError("the model is still loading")
        try:
            snapshot = await asyncio.wait_for(self.engine.stats(), HEALTH_TIMEOUT_S)
        except TimeoutError:
            raise EngineDeadError(f"the engine has not answered for {HEALTH_TIMEOUT_S:g} s") from None
        if snapshot.is_dead:
            raise EngineDeadError("the engine has failed and is about to be replaced")
        return snapshot

    async def last_snapshot(self) -> EngineSnapshot | None:
        """Returns a new snapshot, or the last one marked dead when the engine does not answer."""
        if self._info is not None:
            with contextlib.suppress(TimeoutError, MinivllmError):
                return await asyncio.wait_for(self.engine.stats(), METRICS_TIMEOUT_S)
        if self._fetch_last_snapshot is None:
            return None
        try:
            snapshot = await asyncio.wait_for(self._fetch_last_snapshot(), METRICS_TIMEOUT_S / 2)
        except Exception as error:
            logger.warning("neither the engine nor the Metrics actor answers: %r", error)
            return None
        return None if snapshot is None else replace(snapshot, is_dead=True)

    async def _fetch_info(self) -> None:
        while self._info is None:
            try:
                await self.ready()
            except Exception as error:
                logger.warning("the engine does not answer yet: %s", error)
                await asyncio.sleep(INFO_RETRY_S)

    # ---- checks

    @property
    def model_name(self) -> str:
        return self.args.model_name

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFoundError unless `name` is the served model or absent."""
        if name is not None and name != self.model_name:
            message = f"the model {cut(name, 200)!r} does not exist here; {self.model_name!r} is served"
            raise ModelNotFoundError(message, param="model")

    def check_length(self, num_tokens: int, param: str) -> None:
        """Raises InvalidRequestError naming both numbers when the prompt leaves no room for one output token.

        The engine never sees such a prompt, but counts it with its own rejections.
        """
        if num_tokens >= self.info.max_model_len:
            raise self._too_long(f"has {num_tokens} tokens", param)

    def _too_long(self, what: str, param: str) -> InvalidRequestError:
        self.engine.count_never_fits()
        return InvalidRequestError(
            f"this model's maximum context length is {self.info.max_model_len} tokens, and the prompt {what}: "
            "it must be shorter than that, to leave room for the answer",
            param=param,
            code="context_length_exceeded",
        )

    def check_token_ids(self, token_ids: Sequence[Any], param: str) -> None:
        """Raises InvalidRequestError for an empty or too long prompt, or an id that is not in the vocabulary."""
        if not token_ids:
            raise wrong_field(param, "must not be empty")
        self.check_length(len(token_ids), param)
        self.check_vocabulary(token_ids, param)

    def check_vocabulary(self, token_ids: Sequence[Any], param: str) -> None:
        """Raises InvalidRequestError for an id that is not in the vocabulary."""
        size = self.info.vocab_size
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < size:
                reason = f"token ids must be whole numbers from 0 to {size - 1}, not {shorten(token_id)}"
                raise wrong_field(param, reason)

    # ---- tokenizer

    async def encode(self, text: str, *, add_special_tokens: bool, param: str, is_prompt: bool = True) -> list[int]:
        """Returns the token ids of a text. Raises InvalidRequestError for a prompt that is certainly too long."""
        encode = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens, param=param)
        if len(text) <= INLINE_CHARACTERS:
            return encode()
        at_least = len(text) // self._longest_token
        if is_prompt and at_least > self.info.max_model_len:
            raise self._too_long(f"has at least {at_least} tokens", param)
        return await self.in_thread(encode, is_long=len(text) > LONG_TEXT_CHARACTERS)

    async def in_thread(self, work: Callable[[], Result], *, is_long: bool) -> Result:
        """Runs `work` outside of the event loop, which it must not keep waiting: no long calls that hold the GIL."""
        thread = self._thread_of_long_texts if is_long else self._thread
        return await asyncio.get_running_loop().run_in_executor(thread, work)
