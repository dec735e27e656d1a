"""Servers shared by the tests. Each test leaves them idle."""

from __future__ import annotations

import os
from collections.abc import Iterator

import httpx
import pytest

from minivllm.actors.config import AppArgs
from minivllm.core.engine import LLMEngine
from minivllm.core.text.tokenizer import Tokenizer, load_tokenizer
from tests.http.stand_ins import LocalServer, ScriptedRunner, save_tiny_model

os.environ.setdefault("OMP_NUM_THREADS", "1")

REPLIES = {
    "REPLY-SHORT": "Yes.",
    "REPLY-LONG": "The quick brown fox jumps over the lazy dog, then it sleeps in the warm sun all day long.",
    "REPLY-UNICODE": "naïve café: 你好世界 🦊👩‍👩‍👧 e\u0301 שלום ✓",
}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(AppArgs())


@pytest.fixture(scope="session")
def tiny(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """Starts a real engine on a tiny random model, with real sampling and grammars."""
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer)
    args = AppArgs(
        model=str(folder),
        served_model_name="tiny",
        dtype="float32",
        device="cpu",
        num_blocks=512,
        num_threads=1,
        compile="off",
        validate_blocks=True,
        max_request_bytes=200_000,
    )
    with LocalServer(args, tokenizer, lambda: LLMEngine(args.engine_config())) as server:
        yield server


@pytest.fixture(scope="session")
def runner(tokenizer: Tokenizer) -> ScriptedRunner:
    return ScriptedRunner(tokenizer, dict(REPLIES))


@pytest.fixture(scope="session")
def scripted(tokenizer: Tokenizer, runner: ScriptedRunner) -> Iterator[LocalServer]:
    """Starts an engine whose model answers from `runner.replies`."""
    args = AppArgs(served_model_name="scripted", validate_blocks=True, max_model_len=1024)
    with LocalServer(args, tokenizer, lambda: LLMEngine(args.engine_config(), model_runner=runner)) as server:
        yield server


@pytest.fixture(scope="session")
def client(tiny: LocalServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny.base_url, timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def scripted_client(scripted: LocalServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=scripted.base_url, timeout=120) as client:
        yield client
