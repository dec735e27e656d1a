"""Random operations on an engine with the fake runner; `WatchedEngine` checks the invariants after every step."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from minivllm.core.errors import EngineOverloadedError, InvalidRequestError, NeverFitsError
from minivllm.core.kv_cache import block_pool
from minivllm.core.sampling_params import SamplingParams
from tests.core.fakes import FakeModel
from tests.core.harness import WatchedEngine

# Prompts start with a prefix of one of these, so that they share full blocks and parts of blocks.
STEMS = ([5] * 40, [5, 5, 5, 5, 6, 6, 6, 6] * 5, list(range(10, 50)))

pytestmark = pytest.mark.timeout(900)  # shrinking a failing example takes minutes


class EngineMachine(RuleBasedStateMachine):
    """Requests of all kinds are added, stepped, aborted (during a step too) and made to fail, on small pools."""

    @initialize(
        block_size=st.integers(1, 5),
        num_blocks=st.integers(4, 20),
        limits=st.fixed_dictionaries(
            {
                "max_num_seqs": st.sampled_from([6, 4, 2, 1]),
                "max_num_batched_tokens": st.sampled_from([24, 9, 5, 3, 2, 1]),
                "long_prefill_token_threshold": st.none() | st.integers(1, 8),
                "enable_prefix_caching": st.booleans(),
                "watermark": st.sampled_from([0.0, 0.1, 0.4]),
                "max_head_bypasses": st.integers(0, 3),
                "max_waiting_requests": st.sampled_from([None, None, 2, 5]),
                "max_waiting_tokens": st.sampled_from([None, None, 15, 60]),
                "validate_blocks": st.booleans(),
            }
        ),
        eos_per_mille=st.sampled_from([0, 100, 400]),
    )
    def start(self, block_size: int, num_blocks: int, limits: dict[str, Any], eos_per_mille: int) -> None:
        model = FakeModel(eos_per_mille=eos_per_mille)
        self.watched = WatchedEngine(num_blocks=num_blocks, block_size=block_size, model=model, **limits)
        self.ids: list[str] = []

    @rule(
        stem=st.integers(0, len(STEMS) - 1),
        shared=st.sampled_from([0, 1, 3, 4, 8, 9, 16, 30]),
        tail=st.lists(st.integers(1, 96), max_size=4),
        max_tokens=st.sampled_from([None, None, 1, 2, 5, 12]),
        n=st.sampled_from([1, 1, 1, 1, 2, 3]),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        cache_salt=st.sampled_from([None, None, None, "a", "b"]),
        fail_after=st.sampled_from([None, None, None, None, 0, 2]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        details=st.fixed_dictionaries(
            {
                "ignore_eos": st.booleans(),
                "min_tokens": st.sampled_from([0, 0, 1]),
                "stop_token_ids": st.sampled_from([(), (), (3, 4, 50)]),
                "logprobs": st.sampled_from([None, 1]),
            }
        ),
    )
    def add(self, stem: int, shared: int, tail: list[int], details: dict[str, Any], **params: Any) -> None:
        prompt = [*STEMS[stem][:shared], *tail] or [1]
        waiting = self.watched.engine.scheduler.waiting
        config = self.watched.engine.config
        try:
            self.ids.append(self.watched.add(prompt, **details, **params))
        except NeverFitsError:
            assert len(prompt) >= self.watched.max_model_len
        except EngineOverloadedError as error:
            too_many = config.max_waiting_requests is not None and (
                len(waiting) + params["n"] > config.max_waiting_requests
            )
            too_long = config.max_waiting_tokens is not None and (
                sum(s.num_tokens for s in waiting) + params["n"] * len(prompt) > config.max_waiting_tokens
            )
            assert (too_many or too_long) and error.retry_after_s > 0  # noqa: PT017, PT018

    @rule(lengths=st.lists(st.integers(1, 8), min_size=2, max_size=6), stem=st.integers(0, len(STEMS) - 1))
    def add_requests_that_outgrow_the_pool(self, lengths: list[int], stem: int) -> None:
        """Adds short prompts that all grow until the pool is full, which leads to preemption."""
        for length in lengths:
            with suppress(NeverFitsError, EngineOverloadedError):
                self.ids.append(self.watched.add(STEMS[stem][:length], max_tokens=None, ignore_eos=True))

    @rule()
    def step(self) -> None:
        self.watched.step()

    @rule(count=st.integers(2, 12))
    def step_several_times(self, count: int) -> None:
        for _ in range(count):
            self.watched.step()

    @precondition(lambda self: self.ids)
    @rule(which=st.integers(0, 99), index=st.sampled_from([None, None, 0, 1]))
    def abort(self, which: int, index: int | None) -> None:
        """Aborts any request ever added: waiting, partly prefilled, running, finished or aborted."""
        self.watched.abort(self.ids[which % len(self.ids)], index)

    @precondition(lambda self: self.ids)
    @rule(which=st.integers(0, 99), index=st.sampled_from([None, None, 0, 1]))
    def abort_during_a_step(self, which: int, index: int | None) -> None:
        request_id = self.ids[which % len(self.ids)]
        self.watched.during_next_step(lambda: self.watched.abort(request_id, index))
        self.watched.step()

    @rule(prompt=st.lists(st.integers(1, 96), min_size=1, max_size=6))
    def add_during_a_step(self, prompt: list[int]) -> None:
        def arrive() -> None:
            with suppress(NeverFitsError, EngineOverloadedError):
                self.ids.append(self.watched.add(prompt, max_tokens=3))

        self.watched.during_next_step(arrive)
        self.watched.step()

    @rule()
    def abort_an_unknown_id(self) -> None:
        self.watched.engine.abort_request("unknown")
        self.watched.engine.abort_request("unknown", 3)

    @precondition(lambda self: self.watched.live)
    @rule(which=st.integers(0, 99))
    def add_a_live_id_again(self, which: int) -> None:
        alive = sorted(request_id for request_id, _ in self.watched.live)
        with pytest.raises(InvalidRequestError):
            self.watched.engine.add_request(alive[which % len(alive)], [1, 2], SamplingParams())

    @precondition(lambda self: self.ids)
    @rule(which=st.integers(0, 99), length=st.integers(1, 5))
    def add_an_ended_id_again(self, which: int, length: int) -> None:
        request_id = self.ids[which % len(self.ids)]
        if any(alive == request_id for alive, _ in self.watched.live):
            return
        with suppress(NeverFitsError, EngineOverloadedError):
            self.watched.add([7] * length, request_id=request_id, max_tokens=2)

    @rule()
    def reset(self) -> None:
        owned = [s for s in self.watched.engine.scheduler.running if s.block_table]
        done = self.watched.engine.reset_prefix_cache()
        assert done or owned, "no running sequence has a block, and the prefix cache cannot be reset"
        self.watched.engine.block_manager.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "watched"):
            self.watched.runner.during_execute = None
            self.watched.drain()


class CollidingEngineMachine(EngineMachine):
    """The same operations with one constant block hash; the outputs stay right."""

    def __init__(self) -> None:
        super().__init__()
        self.real_hash = block_pool.hash_block
        block_pool.hash_block = lambda *_: b"constant"  # type: ignore[assignment]

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            block_pool.hash_block = self.real_hash


# The same examples in every run, so that a failure comes from the change under test; `make soak` explores new ones.
thorough = settings(
    derandomize=True,
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)

TestRandomRequestsKeepEveryInvariant = EngineMachine.TestCase
TestRandomRequestsKeepEveryInvariant.settings = thorough
TestHashCollisionNeverChangesAnOutput = CollidingEngineMachine.TestCase
TestHashCollisionNeverChangesAnOutput.settings = settings(thorough, max_examples=50)
