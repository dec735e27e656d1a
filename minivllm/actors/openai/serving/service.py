"""GenerationService: what HTTP routes and handle methods share. Checks, tokenizes, submits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from minivllm.actors.config import AppArgs
from minivllm.actors.openai.protocol.errors import ModelNotFoundError, ServiceLoadingError, cut, shorten
from minivllm.actors.openai.protocol.fields import GenerationBody
from minivllm.actors.openai.serving.generation import EngineApi, Generation, Prompt
from minivllm.actors.transport.messages import EngineInfo, EngineSnapshot
from minivllm.core.errors import EngineDeadError, InvalidRequestError, MinivllmError
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.text.detokenizer import IncrementalDetokenizer
from minivllm.core.text.tokenizer import Tokenizer

Result = TypeVar("Result")

logger = logging.getLogger("minivllm.ingress")

INLINE_CHARACTERS = 2048
"""A text of this length is tokenized in well under a millisecond: handing it to a thread would take longer."""
HEALTH_TIMEOUT_S = 5.0
"""The engine answers between two steps, and a step may be long."""
METRICS_TIMEOUT_S = 5.0
"""Less than Prometheus waits."""
RELOAD_PAUSE_S = 0.5


class GenerationService:
    """One per process that answers clients; used from one asyncio loop.

    Args:
        engine: where token ids go.
        tokenizer: the model's.
        args: what clients see of the application.
        last_known: the newest snapshot that somebody else has, for when the engine cannot be asked.
    """

    def __init__(
        self,
        engine: EngineApi,
        tokenizer: Tokenizer,
        args: AppArgs,
        last_known: Callable[[], Awaitable[EngineSnapshot | None]] | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.args = args
        self._last_known = last_known
        self.started_at = int(time.time())
        self._info: EngineInfo | None = None
        self._learning: asyncio.Task[None] | None = None
        # One thread: two would only take the cores from the engine, and Rust gives the GIL free.
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._longest_token = max(
            (len(tokenizer.token_bytes(place)) for place in range(tokenizer.vocab_size)), default=1
        )

    # ---------------------------------------------------------------- the engine

    def start(self) -> None:
        """Begins to ask for the engine's facts; until they are here, requests are answered with 503."""
        self._learning = asyncio.get_running_loop().create_task(self._learn_about_engine())

    async def ready(self) -> EngineInfo:
        """Waits for the engine; raises what keeps it from being asked."""
        if self._info is None:
            self._info = await self.engine.info()
        return self._info

    @property
    def info(self) -> EngineInfo:
        """What the engine says of itself. Raises ServiceLoadingError while it has not said anything."""
        if self._info is None:
            raise ServiceLoadingError("the model is still loading; try again soon")
        return self._info

    async def healthy_snapshot(self) -> EngineSnapshot:
        """A fresh snapshot of a living engine. Raises ServiceLoadingError or EngineDeadError when there is none."""
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
        """For /metrics: a fresh snapshot; the last known one, as of a dead engine, when it cannot be asked."""
        if self._info is not None:
            with contextlib.suppress(TimeoutError, MinivllmError):
                return await asyncio.wait_for(self.engine.stats(), METRICS_TIMEOUT_S)
        if self._last_known is None:
            return None
        try:
            known = await asyncio.wait_for(self._last_known(), METRICS_TIMEOUT_S / 2)
        except Exception as error:
            logger.warning("neither the engine nor the Metrics actor can be asked: %r", error)
            return None
        return None if known is None else replace(known, is_dead=True)

    async def _learn_about_engine(self) -> None:
        while self._info is None:
            try:
                self._info = await self.engine.info()
            except Exception as error:
                logger.warning("the engine does not answer yet: %s", error)
                await asyncio.sleep(RELOAD_PAUSE_S)

    # ---------------------------------------------------------------- checks

    @property
    def model_name(self) -> str:
        return self.args.model_name

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFoundError unless `name` is ours or left out."""
        if name is not None and name != self.model_name:
            shown = cut(name, 200)
            raise ModelNotFoundError(
                f"the model {shown!r} does not exist here; {self.model_name!r} is served", param="model"
            )

    def check_length(self, num_tokens: int, param: str) -> None:
        """Raises InvalidRequestError naming both numbers when the prompt leaves no room for one token.

        Such a prompt is not sent to the engine in vain; the engine counts it with what it refuses itself.
        """
        limit = self.info.max_model_len
        if num_tokens >= limit:
            raise self._too_long(f"has {num_tokens} tokens", param)

    def _too_long(self, what: str, param: str) -> InvalidRequestError:
        limit = self.info.max_model_len
        self.engine.count_never_fits()
        return InvalidRequestError(
            f"this model's maximum context length is {limit} tokens, and the prompt {what}: "
            "it must be shorter than that, to leave room for the answer",
            param=param,
            code="context_length_exceeded",
        )

    def check_token_ids(self, token_ids: Sequence[Any], param: str) -> None:
        """Raises InvalidRequestError unless these are ids of the vocabulary, at least one, and not too many."""
        if not token_ids:
            raise InvalidRequestError(f"{param}: must not be empty", param=param)
        self.check_length(len(token_ids), param)
        self.check_vocabulary(token_ids, param)

    def check_vocabulary(self, token_ids: Sequence[Any], param: str) -> None:
        """Raises InvalidRequestError unless all of these are ids of the vocabulary."""
        size = self.info.vocab_size
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < size:
                raise InvalidRequestError(
                    f"{param}: token ids must be whole numbers from 0 to {size - 1}, not {shorten(token_id)}",
                    param=param,
                )

    # ---------------------------------------------------------------- text and tokens

    async def encode(self, text: str, *, add_special_tokens: bool, param: str, is_prompt: bool = True) -> list[int]:
        """Token ids of a text. A long one is tokenized beside the event loop, a hopelessly long prompt not at all."""
        if len(text) <= INLINE_CHARACTERS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens, param=param)
        at_least = len(text) // self._longest_token
        if is_prompt and at_least > self.info.max_model_len:
            raise self._too_long(f"has at least {at_least} tokens", param)
        return await self.in_thread(
            lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens, param=param)
        )

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Runs `work` beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    # ---------------------------------------------------------------- generation

    def generation(
        self, answer_id: str, prompts: list[Prompt], params: SamplingParams, body: GenerationBody
    ) -> Generation:
        """A request that is ready to be submitted."""
        return Generation(
            self.engine,
            answer_id,
            prompts,
            params,
            new_text=lambda: IncrementalDetokenizer(self.tokenizer, params),
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
        )


def new_answer_id(prefix: str) -> str:
    """Unique, whatever ids clients send: the engine's request ids are made of it."""
    return f"{prefix}-{uuid.uuid4().hex}"
