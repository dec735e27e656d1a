"""A server without Ray: the HTTP application on an engine in the same process, behind a real socket."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from minivllm.actors.config import AppArgs
from minivllm.actors.engine.deployment import Engine
from minivllm.actors.ingress.engine_client import EngineClient
from minivllm.actors.ingress.http_server import HttpServer
from minivllm.actors.openai.http.app import make_http_app
from minivllm.actors.openai.serving.service import GenerationService
from minivllm.actors.transport.messages import EngineInfo, EngineSnapshot, GenerateRequest
from minivllm.actors.transport.output_router import RequestStream
from minivllm.core.engine import LLMEngine
from minivllm.core.outputs import SampleResult, TokenLogprobs
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.scheduler.scheduler import SchedulerOutput
from minivllm.core.sequence import Sequence
from minivllm.core.text.tokenizer import Tokenizer
from tests.actors.fakes import LocalHandle, started_engine

T = TypeVar("T")

SAVED_VOCABULARY = 49152
"""Vocabulary size of the packaged model's tokenizer, which all servers here use."""


def save_tiny_model(folder: Path, tokenizer: Tokenizer) -> Path:
    """Saves a random two-layer Llama with the tokenizer and chat template of the packaged model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=SAVED_VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.4,
        bos_token_id=tokenizer.hf_tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.hf_tokenizer.save_pretrained(folder)
    return folder


class ScriptedRunner:
    """Answers from a script: `replies` maps a substring of the prompt to the answer, which ends with EOS.

    Reports the probability `CERTAINTY` for every token it generates.

    Args:
        tokenizer: encodes the replies.
        replies: the first substring found in the prompt wins; without a match `default` repeats without end.
        step_s: duration of a step in seconds.
    """

    CERTAINTY = 0.75
    generation_defaults: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        tokenizer: Tokenizer,
        replies: dict[str, str],
        *,
        default: str = " and so on",
        step_s: float = 0.0,
        num_blocks: int = 512,
        max_model_len: int = 1024,
    ) -> None:
        self.tokenizer = tokenizer
        self.replies = replies
        self.default = default
        self.step_s = step_s
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.vocab_size = tokenizer.vocab_size
        self.eos_token_ids = tokenizer.eos_token_ids
        self.eos_token_id = tokenizer.eos_token_id or 0
        self.generation_defaults: dict[str, Any] = {}
        self.default_token_budget = 512
        self.live: set[str] = set()
        self.fail_next_step: Exception | None = None
        self.fail_samples: dict[str, Exception] = {}
        """Maps a substring of the prompt to the sampling error after the third token, once `may_fail` is set."""
        self.may_fail = threading.Event()
        self.may_fail.set()
        self._scripts: dict[str, list[int]] = {}

    def prepare(self, sequence: Sequence) -> None:
        prompt = self.tokenizer.decode(sequence.prompt_token_ids, skip_special_tokens=False)
        reply = next((text for piece, text in self.replies.items() if piece in prompt), None)
        ids = self.tokenizer.encode(self.default if reply is None else reply, add_special_tokens=False)
        self._scripts[sequence.seq_id] = ids * 2000 if reply is None else [*ids, self.eos_token_id]
        self.live.add(sequence.seq_id)

    def precompile(self, sampling_params: SamplingParams) -> None:
        """Compiles nothing."""

    def release(self, sequence: Sequence) -> None:
        self.live.discard(sequence.seq_id)
        self._scripts.pop(sequence.seq_id, None)

    def execute(self, step: SchedulerOutput) -> list[SampleResult]:
        if self.fail_next_step is not None:
            error, self.fail_next_step = self.fail_next_step, None
            raise error
        time.sleep(self.step_s)
        return [self._result(one.sequence, one.samples, one.start, one.end) for one in step.sequences]

    def _result(self, sequence: Sequence, samples: bool, start: int, end: int) -> SampleResult:
        scores = None
        if sequence.sampling_params.prompt_logprobs is not None:
            last = min(end + 1, sequence.num_prompt_tokens)
            scores = [self._score(token_id) for token_id in sequence.prompt_token_ids[start + 1 : last]]
        if not samples or sequence.sampling_params.max_tokens == 0:
            return SampleResult(prompt_logprobs=scores)
        place = len(sequence.output_token_ids)
        error = self._planned_error(sequence, place)
        if error is not None:
            return SampleResult(error=error)
        script = self._scripts[sequence.seq_id]
        token_id = script[min(place, len(script) - 1)]
        logprobs = None if sequence.sampling_params.logprobs is None else self._score(token_id)
        return SampleResult(token_id, logprobs, scores)

    def _planned_error(self, sequence: Sequence, place: int) -> Any:
        if place < 3 or not self.fail_samples:
            return None
        prompt = self.tokenizer.decode(sequence.prompt_token_ids, skip_special_tokens=False)
        planned = next((error for piece, error in self.fail_samples.items() if piece in prompt), None)
        if planned is not None:
            self.may_fail.wait(60)
        return planned

    def _score(self, token_id: int) -> TokenLogprobs:
        rest = math.log((1 - self.CERTAINTY) / 2)
        others = [(other, rest) for other in (token_id + 1, token_id + 2) if other < self.vocab_size]
        return TokenLogprobs(token_id, math.log(self.CERTAINTY), ((token_id, math.log(self.CERTAINTY)), *others))


class LocalEngine:
    """The Engine deployment in this process, and an EngineClient connected to it."""

    def __init__(self, deployment: Engine) -> None:
        self.loop = deployment.loop
        self.client = EngineClient(LocalHandle(deployment))  # type: ignore[arg-type]

    def stop(self) -> None:
        self.client.close()
        self.loop.stop()


class LocalServer:
    """Serves the application on a socket, in a thread with its own event loop.

    Args:
        args: application arguments.
        tokenizer: tokenizer of the model.
        build: builds the engine; None for a service whose engine never finishes loading.
    """

    def __init__(self, args: AppArgs, tokenizer: Tokenizer, build: Callable[[], LLMEngine] | None) -> None:
        self.args = args
        self.tokenizer = tokenizer
        self.engine: LocalEngine | None = None
        self.service: GenerationService
        self.base_url = ""
        self._build = build
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> LocalServer:
        self._thread.start()
        self._started.wait(120)
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    @property
    def model(self) -> str:
        return self.args.model_name

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def snapshot(self) -> EngineSnapshot:
        assert self.engine is not None
        return self.call(self.engine.client.stats())

    def until_idle(self, seconds: float = 5.0) -> None:
        """Waits until no request runs or waits and no block is used."""
        end = time.monotonic() + seconds
        while True:
            stats = self.snapshot().stats
            if (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0):
                return
            assert time.monotonic() < end, f"still busy: {stats}"
            time.sleep(0.02)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        if self._build is not None:
            self.engine = LocalEngine(await started_engine(self._build))
        self.service = GenerationService(
            _NeverReady() if self.engine is None else self.engine.client, self.tokenizer, self.args
        )
        if self.engine is not None:
            await self.service.ready()
        app = make_http_app(self.service)
        server = HttpServer(app, "127.0.0.1", 0)
        await server.open()
        self.base_url = f"http://127.0.0.1:{server.port}"
        self._started.set()
        await self._stop.wait()
        await server.close(lambda: None)
        if self.engine is not None:
            self.engine.stop()


class _NeverReady:
    """An engine that never finishes loading."""

    async def submit(self, request: GenerateRequest) -> RequestStream:
        raise AssertionError("submitted a request before the engine is ready")

    async def abort(self, request_id: str, index: int | None = None) -> None: ...

    async def info(self) -> EngineInfo:
        await asyncio.Event().wait()
        raise AssertionError

    async def stats(self) -> EngineSnapshot:
        raise AssertionError("asked for stats before the engine is ready")

    def count_never_fits(self) -> None:
        raise AssertionError("counted a rejection before the engine is ready")
