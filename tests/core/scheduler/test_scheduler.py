"""Scheduler policies: token budget, admission, rejection, preemption, priorities, samples, abort, statistics."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from minivllm.core.config import EngineConfig
from minivllm.core.engine import LLMEngine
from minivllm.core.errors import EngineDeadError, EngineOverloadedError, InvalidRequestError, NeverFitsError
from minivllm.core.kv_cache.block_manager import BlockManager
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.scheduler.scheduler import Scheduler
from minivllm.core.sequence import FinishReason, Sequence
from tests.core.fakes import FakeModel, FakeRunner
from tests.core.harness import WatchedEngine


def prompt(number: int, length: int) -> list[int]:
    """Returns a prompt; prompts with different numbers share no block."""
    return [(number * 13 + 7) % 90 + 1, *((number + position) % 90 + 1 for position in range(length - 1))]


def running_ids(watched: WatchedEngine) -> list[str]:
    return [sequence.request_id for sequence in watched.engine.scheduler.running]


def waiting_ids(watched: WatchedEngine) -> list[str]:
    return [sequence.request_id for sequence in watched.engine.scheduler.waiting]


def scheduled_tokens(watched: WatchedEngine) -> dict[str, int]:
    """Returns the number of tokens of each request in the last computed step."""
    return {one.sequence.request_id: one.end - one.start for one in watched.runner.last_step.sequences}


def rejections(watched: WatchedEngine) -> dict[str, int]:
    return {reason: count for reason, count in watched.engine.stats().rejections.items() if count}


def step_until_preemption(watched: WatchedEngine) -> None:
    for _ in range(100):
        watched.step()
        if watched.engine.stats().preemptions_total:
            return
    raise AssertionError("no sequence was preempted in 100 steps")


# Token budget


def test_decode_runs_every_step_while_long_prompts_are_prefilled() -> None:
    """One stream decodes while prompts of several chunks arrive: it gets a token per step, and the prompts finish."""
    watched = WatchedEngine(num_blocks=200, max_num_batched_tokens=16, max_num_seqs=4, enable_prefix_caching=False)
    stream = watched.add([1, 2, 3], max_tokens=None, ignore_eos=True)
    watched.step()
    finished_prompts = 0
    for step in range(150):
        if step % 4 == 0:
            watched.add(prompt(step, 60), max_tokens=1)
        outputs = watched.step()
        assert [output.new_token_ids for output in outputs if output.request_id == stream] != []
        assert scheduled_tokens(watched)[stream] == 1
        finished_prompts += sum(output.finished for output in outputs)
        assert watched.runner.last_step.num_tokens == 16, "prefill chunks take the rest of the token budget"
    assert finished_prompts >= 150 * 15 // 60 - 1
    watched.abort(stream)
    watched.drain()


def test_decodes_and_an_older_long_prefill_progress_in_every_step() -> None:
    watched = WatchedEngine(num_blocks=100, max_num_batched_tokens=8, enable_prefix_caching=False)
    long_prompt = watched.add(prompt(1, 80), max_tokens=2)
    watched.step()
    streams = [watched.add(prompt(number, 2), priority=-1, max_tokens=10, ignore_eos=True) for number in (2, 3, 4)]
    watched.step()
    for _ in range(4):
        watched.step()
        tokens = scheduled_tokens(watched)
        assert [tokens.get(stream) for stream in streams if stream in running_ids(watched)].count(None) == 0
        assert tokens[long_prompt] > 0
    watched.drain()


@pytest.mark.parametrize("threshold", [1, 5, 16])
def test_long_prefill_token_threshold_caps_the_chunk_of_each_prompt(threshold: int) -> None:
    watched = WatchedEngine(
        num_blocks=100, max_num_batched_tokens=32, long_prefill_token_threshold=threshold, enable_prefix_caching=False
    )
    long_prompt = watched.add(prompt(1, 100), max_tokens=1)
    short = watched.add(prompt(2, 6), max_tokens=1)
    watched.step()
    tokens = scheduled_tokens(watched)
    assert tokens[long_prompt] == threshold
    assert tokens[short] == min(6, threshold)
    watched.drain()


def test_prefill_chunks_use_up_the_token_budget_of_every_step() -> None:
    watched = WatchedEngine(num_blocks=100, max_num_batched_tokens=10, max_num_seqs=8, enable_prefix_caching=False)
    for number in range(6):
        watched.add(prompt(number, 7), max_tokens=1)
    sizes = []
    while watched.engine.has_unfinished_requests():
        watched.step()
        sizes.append(watched.runner.last_step.num_tokens)
    assert sizes == [10, 10, 10, 10, 2]


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 21, 40])
def test_outputs_are_independent_of_the_chunk_size(chunk: int) -> None:
    watched = WatchedEngine(num_blocks=60, max_num_batched_tokens=chunk, max_num_seqs=4)
    for number in range(4):
        watched.add(prompt(number, 21 + number), max_tokens=8)
    watched.drain()
    assert watched.finish_counts["length"] + watched.finish_counts["stop"] == 4


def test_token_budget_covers_every_running_sequence_in_every_step() -> None:
    """Further requests are rejected with `token_budget`, so that every stream gets a token in every step."""
    watched = WatchedEngine(num_blocks=60, max_num_batched_tokens=3, max_num_seqs=8)
    for number in range(6):
        watched.add(prompt(number, 2), max_tokens=6, ignore_eos=True)
    while watched.engine.has_unfinished_requests():
        before = set(running_ids(watched))
        watched.step()
        assert before <= set(scheduled_tokens(watched)), "a running sequence was not scheduled"
    assert rejections(watched).keys() == {"token_budget"}


def test_requests_are_admitted_in_arrival_order() -> None:
    watched = WatchedEngine(num_blocks=100, max_num_seqs=2)
    names = [watched.add(prompt(number, 3), max_tokens=2, ignore_eos=True) for number in range(6)]
    seen: list[str] = []
    while watched.engine.has_unfinished_requests():
        watched.step()
        seen += [name for name in scheduled_tokens(watched) if name not in seen]
    assert seen == names


# Rejections


def test_rejection_for_max_num_seqs_is_counted_once_per_wait() -> None:
    watched = WatchedEngine(num_blocks=20, max_num_seqs=1)
    watched.add(prompt(0, 4), max_tokens=8, ignore_eos=True)
    second = watched.add(prompt(1, 4), max_tokens=8, ignore_eos=True)
    watched.step()
    assert rejections(watched) == {"max_num_seqs": 1}
    for _ in range(5):
        watched.step()
    assert waiting_ids(watched) == [second]
    assert rejections(watched) == {"max_num_seqs": 1}
    watched.drain()
    assert rejections(watched) == {"max_num_seqs": 1}


def test_rejection_for_lack_of_budget_is_counted_as_token_budget() -> None:
    watched = WatchedEngine(num_blocks=20, max_num_batched_tokens=4, max_num_seqs=8)
    watched.add(prompt(0, 4), max_tokens=2, ignore_eos=True)
    watched.add(prompt(1, 4), max_tokens=2, ignore_eos=True)
    watched.step()
    assert rejections(watched) == {"token_budget": 1}
    watched.drain()


def test_rejection_for_lack_of_blocks_is_counted_as_no_free_blocks() -> None:
    watched = WatchedEngine(num_blocks=10, max_num_seqs=8, enable_prefix_caching=False)
    watched.add(prompt(0, 30), max_tokens=3, ignore_eos=True)
    watched.add(prompt(1, 12), max_tokens=3, ignore_eos=True)
    for _ in range(3):
        watched.step()
    assert rejections(watched) == {"no_free_blocks": 1}
    watched.drain()
    assert rejections(watched) == {"no_free_blocks": 1}


def test_rejection_by_the_watermark_is_counted_as_watermark() -> None:
    watched = WatchedEngine(num_blocks=10, watermark=0.3, max_num_seqs=8, enable_prefix_caching=False)
    watched.add(prompt(0, 18), max_tokens=2, ignore_eos=True)  # five blocks; a lone request ignores the watermark
    watched.add(prompt(1, 12), max_tokens=2, ignore_eos=True)  # three of five free blocks, three are reserved
    watched.step()
    assert rejections(watched) == {"watermark": 1}
    assert len(running_ids(watched)) == 1
    watched.drain()


def test_each_wait_of_a_request_counts_its_own_rejection() -> None:
    """Two waits of one request: before its admission for max_num_seqs, after its preemption for blocks."""
    watched = WatchedEngine(num_blocks=6, max_num_seqs=2, enable_prefix_caching=False)
    watched.add(prompt(0, 8), max_tokens=16, ignore_eos=True)
    watched.add(prompt(1, 2), max_tokens=2, ignore_eos=True)
    watched.add(prompt(2, 8), max_tokens=16, ignore_eos=True)
    watched.drain()
    assert watched.engine.stats().preemptions_total == 1
    assert rejections(watched) == {"max_num_seqs": 1, "no_free_blocks": 1}


def test_chunked_prompt_is_admitted_only_with_blocks_for_all_its_tokens() -> None:
    """Admission needs blocks for the full prompt, so a later chunk never lacks a block."""
    watched = WatchedEngine(num_blocks=10, long_prefill_token_threshold=4, enable_prefix_caching=False)
    first = watched.add(prompt(0, 21), max_tokens=2, ignore_eos=True)  # six blocks in total, one after the first step
    second = watched.add(prompt(1, 20), max_tokens=2, ignore_eos=True)  # five blocks: does not fit beside the first
    while first in {request_id for request_id, _ in watched.live}:
        watched.step()
        assert second not in running_ids(watched)
    watched.drain()
    assert watched.engine.stats().preemptions_total == 0
    assert rejections(watched) == {"no_free_blocks": 1}


@pytest.mark.parametrize("length", [40, 41, 100])
def test_prompt_of_max_model_len_or_more_is_rejected_as_never_fits(length: int) -> None:
    watched = WatchedEngine(num_blocks=20, max_model_len=40)
    other = watched.add(prompt(0, 10), max_tokens=5, ignore_eos=True)
    with pytest.raises(NeverFitsError) as caught:
        watched.add(prompt(1, length), max_tokens=1)
    assert isinstance(caught.value, InvalidRequestError)
    assert caught.value.param
    assert rejections(watched) == {"never_fits": 1}
    assert waiting_ids(watched) == [other]
    watched.drain()
    assert [ended.request_id for ended in watched.ended] == [other]


def test_prompt_one_short_of_max_model_len_yields_one_token() -> None:
    watched = WatchedEngine(num_blocks=10, max_model_len=40)
    watched.add(prompt(1, 39), max_tokens=10, ignore_eos=True)
    watched.drain()
    [ended] = watched.ended
    assert len(ended.tokens) == 1
    assert ended.finish_reason == FinishReason.LENGTH


def test_output_that_reaches_max_model_len_ends_with_length() -> None:
    watched = WatchedEngine(num_blocks=10, max_model_len=40)
    for max_tokens in (None, 1000, 31, 30):
        watched.add(prompt(1, 10), max_tokens=max_tokens, ignore_eos=True)
    watched.add(prompt(1, 10), max_tokens=29, ignore_eos=True)
    watched.drain()
    assert sorted(len(ended.tokens) for ended in watched.ended) == [29, 30, 30, 30, 30]
    assert {ended.finish_reason for ended in watched.ended} == {FinishReason.LENGTH}


def test_eos_as_the_last_allowed_token_ends_with_stop() -> None:
    model = FakeModel(eos_per_mille=1000)
    watched = WatchedEngine(num_blocks=10, model=model)
    watched.add([1, 2], max_tokens=1)
    watched.add([1, 2], max_tokens=1, ignore_eos=True)
    watched.drain()
    assert {ended.request_id: ended.finish_reason for ended in watched.ended} == {
        "request-1": FinishReason.STOP,
        "request-2": FinishReason.LENGTH,
    }
    assert all(ended.tokens == [0] for ended in watched.ended), "new_token_ids include EOS"


def test_stop_tokens_are_ignored_until_min_tokens() -> None:
    watched = WatchedEngine(num_blocks=10, model=FakeModel(eos_per_mille=1000))
    watched.add([1, 2], min_tokens=3, max_tokens=5)
    watched.add([1, 2], min_tokens=3, max_tokens=3)
    watched.add([1, 2], min_tokens=2, max_tokens=5, stop_token_ids=(0,), ignore_eos=True)
    watched.drain()
    assert sorted((ended.request_id, len(ended.tokens), str(ended.finish_reason)) for ended in watched.ended) == [
        ("request-1", 3, "stop"),
        ("request-2", 3, "stop"),
        ("request-3", 2, "stop"),
    ]


def test_max_model_len_is_limited_by_pool_and_model() -> None:
    with pytest.raises(ValueError, match="40"):
        WatchedEngine(num_blocks=10, block_size=4, max_model_len=41, model_max_len=1000)
    assert WatchedEngine(num_blocks=10, block_size=4, max_model_len=40, model_max_len=1000).max_model_len == 40
    assert WatchedEngine(num_blocks=10, block_size=4, model_max_len=1000).max_model_len == 40
    assert WatchedEngine(num_blocks=10, block_size=4, model_max_len=30).max_model_len == 30
    with pytest.raises(ValueError, match="30"):
        WatchedEngine(num_blocks=10, block_size=4, max_model_len=31, model_max_len=30)


def test_request_beyond_max_waiting_requests_is_rejected_as_queue_full() -> None:
    watched = WatchedEngine(num_blocks=20, max_num_seqs=1, max_waiting_requests=2)
    watched.add(prompt(0, 4), max_tokens=6, ignore_eos=True)
    watched.step()
    watched.add(prompt(1, 4), max_tokens=2)
    watched.add(prompt(2, 4), max_tokens=2)
    for number in (3, 4):
        with pytest.raises(EngineOverloadedError) as caught:
            watched.add(prompt(number, 4), max_tokens=2)
        assert caught.value.retry_after_s > 0
    assert rejections(watched)["queue_full"] == 2
    assert watched.engine.stats().num_waiting == 2
    with pytest.raises(EngineOverloadedError):
        watched.add(prompt(5, 4), n=2)
    watched.drain()
    watched.add(prompt(6, 4), max_tokens=2)
    watched.drain()


def test_request_beyond_max_waiting_tokens_is_rejected_as_queue_full() -> None:
    watched = WatchedEngine(num_blocks=50, max_num_seqs=1, max_waiting_tokens=20)
    watched.add(prompt(0, 4), max_tokens=3, ignore_eos=True)
    watched.step()
    watched.add(prompt(1, 15), max_tokens=2)
    with pytest.raises(EngineOverloadedError):
        watched.add(prompt(2, 6), max_tokens=2)
    watched.add(prompt(3, 5), max_tokens=2)
    watched.abort("request-2")
    watched.add(prompt(4, 15), max_tokens=2)
    watched.drain()
    assert rejections(watched)["queue_full"] == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt_token_ids": []},
        {"prompt_token_ids": [97]},
        {"prompt_token_ids": [-1]},
        {"prompt_token_ids": [1, 2.0]},
        {"prompt_token_ids": [True]},
        {"prompt_token_ids": "text"},
        {"prompt_token_ids": None},
        {"sampling_params": None},
        {"sampling_params": SamplingParams(stop_token_ids=(97,))},
    ],
    ids=[
        "empty-prompt",
        "token-id-beyond-the-vocabulary",
        "negative-token-id",
        "float-token-id",
        "bool-token-id",
        "text-prompt",
        "no-prompt",
        "no-sampling-params",
        "stop-token-id-beyond-the-vocabulary",
    ],
)
def test_invalid_request_is_rejected_and_leaves_no_state(wrong: dict[str, Any]) -> None:
    watched = WatchedEngine(num_blocks=20)
    watched.add(prompt(0, 6), max_tokens=6)
    watched.step()
    arguments = {"request_id": "wrong", "prompt_token_ids": [1, 2], "sampling_params": SamplingParams()} | wrong
    with pytest.raises(InvalidRequestError) as caught:
        watched.engine.add_request(**arguments)
    assert caught.value.param
    assert watched.runner.live_request_ids == {"request-1"}
    watched.drain()
    watched.add([1, 2], request_id="wrong", max_tokens=2)
    watched.drain()


@pytest.mark.parametrize("samples", [1, 3])
def test_request_with_a_live_id_is_rejected_and_the_first_one_completes(samples: int) -> None:
    """The fake runner raises if an id is prepared twice or an unknown one is released."""
    watched = WatchedEngine(num_blocks=20)
    for steps in (0, 1):
        request_id = watched.add(prompt(0, 6), max_tokens=6, n=2, ignore_eos=True)
        for _ in range(steps):
            watched.step()
        with pytest.raises(InvalidRequestError) as caught:
            watched.engine.add_request(request_id, [1, 2], SamplingParams(n=samples))
        assert caught.value.param == "request_id"
        watched.drain()
    assert watched.finish_counts == {"length": 4}


def test_rejection_of_one_sample_releases_the_samples_prepared_before() -> None:
    """The runner rejects the second of three samples; the first one, already prepared, is released."""
    watched = WatchedEngine(num_blocks=20)
    prepare, calls = watched.runner.prepare, []

    def reject_second(sequence: Sequence) -> None:
        calls.append(sequence)
        if len(calls) == 2:
            raise InvalidRequestError("no", param="logit_bias")
        prepare(sequence)

    watched.runner.prepare = reject_second  # type: ignore[method-assign]
    with pytest.raises(InvalidRequestError, match="no"):
        watched.add([1, 2, 3], n=3)
    watched.check_drained()


def test_queue_limits_can_change_while_the_engine_runs() -> None:
    """`stats()` and `config` show the limits in force; sys.maxsize is no limit."""
    watched = WatchedEngine(num_blocks=50, max_num_seqs=1, max_waiting_requests=1)
    engine = watched.engine
    watched.add(prompt(0, 4), max_tokens=6, ignore_eos=True)
    watched.step()
    watched.add(prompt(1, 4), max_tokens=2)
    with pytest.raises(EngineOverloadedError):
        watched.add(prompt(2, 4), max_tokens=2)
    assert (engine.stats().max_waiting_requests, engine.stats().max_waiting_tokens) == (1, sys.maxsize)
    engine.apply_settings(max_waiting_requests=None, max_waiting_tokens=9)
    assert (engine.stats().max_waiting_requests, engine.stats().max_waiting_tokens) == (sys.maxsize, 9)
    assert (engine.config.max_waiting_requests, engine.config.max_waiting_tokens) == (None, 9)
    assert (engine.stats().max_num_seqs, engine.stats().max_num_batched_tokens) == (1, 64)
    watched.add(prompt(2, 4), max_tokens=2)
    with pytest.raises(EngineOverloadedError):
        watched.add(prompt(3, 4), max_tokens=2)
    for wrong in ({"max_waiting_tokens": 0}, {"max_waiting_requests": "many"}, {"max_num_seqs": 3}, {"unknown": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            engine.apply_settings(**wrong)
    assert (engine.stats().max_waiting_requests, engine.stats().max_waiting_tokens) == (sys.maxsize, 9)
    watched.drain()


# Bypass of the queue head


def bypass_engine(max_head_bypasses: int) -> WatchedEngine:
    """Returns an engine of ten blocks with a running stream; the queue head needs more blocks than are free."""
    watched = WatchedEngine(
        num_blocks=10, max_num_seqs=8, enable_prefix_caching=False, max_head_bypasses=max_head_bypasses
    )
    watched.add(prompt(0, 8), max_tokens=15, ignore_eos=True)
    watched.step()
    watched.add(prompt(1, 33), request_id="big", max_tokens=2, ignore_eos=True)
    return watched


def test_small_request_bypasses_a_queue_head_that_lacks_blocks() -> None:
    watched = bypass_engine(max_head_bypasses=4)
    small = watched.add(prompt(2, 3), max_tokens=2)
    watched.step()
    assert small in scheduled_tokens(watched)
    assert waiting_ids(watched) == ["big"]
    watched.drain()


def test_queue_head_is_never_bypassed_with_max_head_bypasses_zero() -> None:
    watched = bypass_engine(max_head_bypasses=0)
    small = watched.add(prompt(2, 3), max_tokens=2)
    watched.step()
    assert waiting_ids(watched) == ["big", small]
    watched.drain()


@pytest.mark.parametrize("bound", [1, 3, 5])
def test_max_head_bypasses_bounds_how_many_requests_pass_the_queue_head(bound: int) -> None:
    """Small requests that always fit arrive in every step; exactly `bound` of them run before the queue head."""
    watched = bypass_engine(max_head_bypasses=bound)
    passed: set[str] = set()
    number = 10
    for _ in range(200):
        if "big" not in waiting_ids(watched):
            break
        for _ in range(2):
            number += 1
            watched.add(prompt(number, 3), request_id=f"small-{number}", max_tokens=3, ignore_eos=True)
        watched.step()
        if "big" in waiting_ids(watched):
            passed |= {name for name in scheduled_tokens(watched) if name.startswith("small")}
    assert "big" not in waiting_ids(watched), "the queue head was never admitted"
    assert len(passed) == bound
    watched.drain()


# Preemption


def test_newest_running_sequence_is_preempted_first() -> None:
    watched = WatchedEngine(num_blocks=12, max_num_seqs=4, enable_prefix_caching=False)
    names = [watched.add(prompt(number, 8), max_tokens=30, ignore_eos=True) for number in range(4)]
    while watched.engine.has_unfinished_requests():
        before = running_ids(watched)
        watched.step()
        alive = {request_id for request_id, _ in watched.live}
        lost = [name for name in before if name in waiting_ids(watched)]
        kept = [name for name in before if name in alive and name not in lost]
        assert all(names.index(victim) > names.index(other) for victim in lost for other in kept)
    assert watched.engine.stats().preemptions_total > 0
    assert len(watched.ended) == 4


def test_oldest_sequence_is_scheduled_in_every_step() -> None:
    """Eight growing sequences compete for six blocks; the oldest one makes progress in every step."""
    watched = WatchedEngine(num_blocks=6, block_size=2, max_num_seqs=6, max_num_batched_tokens=6)
    for number in range(8):
        watched.add(prompt(number, 3), max_tokens=9, ignore_eos=True)
    while watched.engine.has_unfinished_requests():
        oldest = min((request_id for request_id, _ in watched.live), key=lambda name: int(name.split("-")[1]))
        watched.step()
        assert oldest in scheduled_tokens(watched)
    assert watched.engine.stats().preemptions_total > 0


def test_preempted_request_is_readmitted_before_new_requests() -> None:
    """Even a small new request that fits waits behind it."""
    watched = WatchedEngine(num_blocks=6, max_num_seqs=3, max_head_bypasses=8, enable_prefix_caching=False)
    first = watched.add(prompt(0, 8), max_tokens=14, ignore_eos=True)
    second = watched.add(prompt(1, 8), max_tokens=14, ignore_eos=True)
    step_until_preemption(watched)
    small = watched.add(prompt(2, 3), max_tokens=1)
    assert running_ids(watched) == [first]
    assert waiting_ids(watched) == [second, small]
    watched.step()
    assert watched.engine.stats().num_free_blocks > 0
    while second in waiting_ids(watched):
        assert small in waiting_ids(watched), "the preempted request is readmitted first"
        watched.step()
    watched.drain()


def test_preempted_request_queues_before_the_head_it_bypassed() -> None:
    """Preempted requests queue before new ones, even before an older request that was bypassed."""
    watched = bypass_engine(max_head_bypasses=4)
    passing = watched.add(prompt(2, 12), max_tokens=20, ignore_eos=True)
    step_until_preemption(watched)
    assert waiting_ids(watched) == [passing, "big"]
    watched.drain()


def test_preempted_requests_deliver_each_token_once() -> None:
    """`WatchedEngine` compares every output with the oracle."""
    for caching in (False, True):
        watched = WatchedEngine(num_blocks=8, block_size=2, max_num_seqs=4, enable_prefix_caching=caching)
        for number in range(6):
            watched.add(prompt(number, 4), max_tokens=10, ignore_eos=True, logprobs=1, prompt_logprobs=1)
        watched.drain()
        stats = watched.engine.stats()
        assert stats.preemptions_total > 0
        assert stats.generated_tokens_total == 60
        assert stats.recomputed_tokens_total > 0


def test_recomputed_tokens_are_counted_separately() -> None:
    watched = WatchedEngine(num_blocks=6, max_num_seqs=2, enable_prefix_caching=False)
    watched.add(prompt(0, 8), max_tokens=14, ignore_eos=True)
    watched.add(prompt(1, 8), max_tokens=14, ignore_eos=True)
    watched.drain()
    stats = watched.engine.stats()
    needed = 2 * (8 + 14 - 1)
    assert stats.recomputed_tokens_total > 0
    assert stats.computed_tokens_total == needed + stats.recomputed_tokens_total
    assert stats.computed_tokens_total == watched.runner.tokens_computed


def test_preemption_leaves_no_newer_sequence_running() -> None:
    watched = WatchedEngine(num_blocks=9, block_size=2, max_num_seqs=8, enable_prefix_caching=False)
    for number in range(8):
        watched.add(prompt(number, 2), max_tokens=12, ignore_eos=True)
    while watched.engine.has_unfinished_requests():
        before = {sequence.request_id: sequence.num_preemptions for sequence in watched.engine.scheduler.running}
        watched.step()
        waiting = {sequence.request_id: sequence for sequence in watched.engine.scheduler.waiting}
        victims = [name for name in before if name in waiting and waiting[name].num_preemptions > before[name]]
        for victim in victims:
            newer = [name for name in running_ids(watched) if int(name.split("-")[1]) > int(victim.split("-")[1])]
            assert not newer, f"{victim} was preempted while {newer} run"
    assert watched.engine.stats().preemptions_total > 0


# Priorities


def test_waiting_queue_is_ordered_by_priority_then_arrival() -> None:
    watched = WatchedEngine(num_blocks=100, max_num_seqs=1)
    blocker = watched.add(prompt(0, 3), max_tokens=3, ignore_eos=True)
    watched.step()
    late = [watched.add(prompt(10 + priority, 3), priority=priority, max_tokens=2) for priority in (5, 0, -3, 0)]
    order = [late[2], late[1], late[3], late[0]]
    assert waiting_ids(watched) == order
    seen = [blocker]
    while watched.engine.has_unfinished_requests():
        watched.step()
        seen += [name for name in scheduled_tokens(watched) if name not in seen]
    assert seen == [blocker, *order]


def test_sequence_of_lowest_priority_is_preempted_first() -> None:
    watched = WatchedEngine(num_blocks=6, max_num_seqs=2, enable_prefix_caching=False)
    low = watched.add(prompt(0, 8), priority=1, max_tokens=14, ignore_eos=True)
    high = watched.add(prompt(1, 8), priority=0, max_tokens=14, ignore_eos=True)
    step_until_preemption(watched)
    assert running_ids(watched) == [high]
    assert waiting_ids(watched) == [low]
    watched.drain()


def test_new_request_of_higher_priority_queues_before_a_preempted_one() -> None:
    watched = WatchedEngine(num_blocks=6, max_num_seqs=2, enable_prefix_caching=False)
    watched.add(prompt(0, 8), max_tokens=14, ignore_eos=True)
    victim = watched.add(prompt(1, 8), priority=1, max_tokens=14, ignore_eos=True)
    step_until_preemption(watched)
    high = watched.add(prompt(2, 22), priority=0, max_tokens=1)
    assert waiting_ids(watched) == [high, victim]
    watched.drain()


def test_queue_head_of_higher_priority_is_never_bypassed() -> None:
    watched = bypass_engine(max_head_bypasses=4)
    small = watched.add(prompt(2, 3), priority=1, max_tokens=2)
    watched.step()
    assert waiting_ids(watched) == ["big", small]
    watched.drain()


# Samples of one request (n > 1)


@pytest.mark.parametrize("caching", [False, True], ids=["no-caching", "prefix-caching"])
def test_samples_of_one_prompt_are_drawn_independently(caching: bool) -> None:
    model = FakeModel(eos_per_mille=150)
    watched = WatchedEngine(num_blocks=40, model=model, enable_prefix_caching=caching)
    watched.add(prompt(0, 14), n=5, max_tokens=20)
    outputs = watched.run()
    assert len(outputs) == 5
    assert len({tuple(tokens) for tokens in outputs.values()}) == 5, "all samples differ"


def test_samples_of_one_prompt_share_its_full_blocks() -> None:
    watched = WatchedEngine(num_blocks=40)
    watched.add(prompt(0, 17), n=4, max_tokens=3, ignore_eos=True)
    watched.step()
    watched.step()
    assert len(running_ids(watched)) == 4
    used = watched.engine.stats().num_used_blocks
    assert used == 4 + 4, "four shared blocks and one partial block per sample"
    assert watched.runner.tokens_computed == 17 + 1 + 3
    watched.drain()


def test_abort_of_a_request_ends_all_its_samples() -> None:
    for steps in range(5):
        watched = WatchedEngine(num_blocks=40, max_num_batched_tokens=6)
        request_id = watched.add(prompt(0, 14), n=4, max_tokens=8, ignore_eos=True)
        for _ in range(steps):
            watched.step()
        watched.abort(request_id)
        watched.drain()
        assert watched.finish_counts["abort"] == 4
        watched.add(prompt(0, 14), request_id=request_id, max_tokens=2)
        watched.drain()


def test_abort_of_one_sample_leaves_the_others_running() -> None:
    for steps in range(5):
        for index in (0, 2):
            watched = WatchedEngine(num_blocks=40, max_num_batched_tokens=6)
            request_id = watched.add(prompt(0, 14), n=3, max_tokens=8, ignore_eos=True)
            for _ in range(steps):
                watched.step()
            watched.abort(request_id, index)
            watched.drain()
            assert {ended.index for ended in watched.ended if ended.finish_reason == FinishReason.ABORT} == {index}
            assert watched.finish_counts["length"] == 2


# Abort


def test_abort_by_the_id_of_a_sample_is_a_no_op() -> None:
    watched = WatchedEngine(num_blocks=40)
    request_id = watched.add(prompt(0, 5), n=2, max_tokens=4, ignore_eos=True)
    watched.step()
    for sequence in watched.engine.scheduler.running:
        watched.engine.abort_request(sequence.seq_id)
    for name in (f"{request_id}/0", f"{request_id}-0", f"{request_id}[0]"):
        watched.engine.abort_request(name)
    watched.drain()
    assert watched.finish_counts == {"length": 2}


def abort_at(steps: int, in_flight: bool) -> WatchedEngine:
    """Aborts a request of three prefill chunks and five output tokens after `steps` steps, beside a second request."""
    watched = WatchedEngine(num_blocks=40, max_num_batched_tokens=8)
    request_id = watched.add(prompt(0, 20), max_tokens=5, ignore_eos=True)
    watched.add(prompt(1, 20), max_tokens=10, ignore_eos=True)
    for _ in range(steps):
        watched.step()
    if in_flight:
        watched.during_next_step(lambda: watched.abort(request_id))
        watched.step()
    else:
        watched.abort(request_id)
    watched.abort(request_id)
    watched.drain()
    return watched


@pytest.mark.parametrize("in_flight", [False, True], ids=["between-steps", "in-flight"])
@pytest.mark.parametrize("steps", range(12))
def test_abort_at_any_step_leaves_other_requests_running(steps: int, in_flight: bool) -> None:
    watched = abort_at(steps, in_flight)
    reasons = {ended.request_id: ended.finish_reason for ended in watched.ended}
    assert reasons["request-2"] == FinishReason.LENGTH
    assert reasons["request-1"] in (FinishReason.ABORT, FinishReason.LENGTH)


def test_abort_takes_effect_in_every_state_of_a_request() -> None:
    ends = [abort_at(steps, in_flight=False).ended for steps in range(12)]
    reasons = [{one.request_id: one.finish_reason for one in ended}["request-1"] for ended in ends]
    assert reasons[:7] == [FinishReason.ABORT] * 7
    assert reasons[-1] == FinishReason.LENGTH


def test_abort_of_an_unknown_or_ended_request_is_a_no_op() -> None:
    watched = WatchedEngine(num_blocks=10)
    watched.engine.abort_request("unknown")
    assert not watched.engine.has_unfinished_requests()
    request_id = watched.add([1, 2], max_tokens=1)
    watched.drain()
    watched.engine.abort_request(request_id)
    watched.engine.abort_request(request_id, 7)
    assert not watched.engine.has_unfinished_requests()
    assert watched.engine.step() == []


def test_aborted_request_ends_with_one_terminal_output() -> None:
    """has_unfinished_requests() stays true until that output is returned, and no token is computed."""
    watched = WatchedEngine(num_blocks=10)
    request_id = watched.add([1, 2], max_tokens=5)
    watched.abort(request_id)
    assert watched.engine.has_unfinished_requests()
    [output] = watched.step()
    assert (output.finished, output.finish_reason, output.new_token_ids) == (True, FinishReason.ABORT, [])
    assert not watched.engine.has_unfinished_requests()
    assert watched.runner.steps_executed == 0


def test_preempted_request_can_be_aborted() -> None:
    watched = WatchedEngine(num_blocks=6, max_num_seqs=2, enable_prefix_caching=False)
    watched.add(prompt(0, 8), max_tokens=14, ignore_eos=True)
    victim = watched.add(prompt(1, 8), max_tokens=14, ignore_eos=True)
    step_until_preemption(watched)
    watched.abort(victim)
    watched.drain()
    assert watched.finish_counts == {"abort": 1, "length": 1}


# Failures


def test_failed_request_fails_alone() -> None:
    watched = WatchedEngine(num_blocks=20)
    watched.add(prompt(0, 6), max_tokens=8, ignore_eos=True)
    watched.add(prompt(1, 6), max_tokens=8, ignore_eos=True, fail_after=0)
    watched.add(prompt(2, 6), max_tokens=8, ignore_eos=True, fail_after=3)
    watched.add(prompt(3, 6), max_tokens=8, ignore_eos=True, n=2, fail_after=2)
    watched.drain()
    assert watched.finish_counts == {"length": 1, "error": 4}
    assert watched.engine.stats().finished == {"length": 1, "error": 4}


def test_failed_forward_pass_ends_every_request_with_an_error() -> None:
    watched = WatchedEngine(num_blocks=10, max_num_seqs=2, expects_death=True)
    for number in range(5):
        watched.add(prompt(number, 6), max_tokens=8, n=2 if number == 3 else 1)
    watched.step()
    watched.runner.fail_next_step = RuntimeError("device lost")
    outputs = watched.step()
    assert len(outputs) == 6
    assert {output.finish_reason for output in outputs} == {FinishReason.ERROR}
    assert all("device lost" in str(output.error) for output in outputs)
    assert watched.engine.is_dead
    assert not watched.engine.has_unfinished_requests()
    with pytest.raises(EngineDeadError):
        watched.engine.add_request("new", [1], SamplingParams())
    watched.check_drained()


# Prefix caching in the engine


def test_cached_prefix_is_not_recomputed_and_counts_as_hits() -> None:
    watched = WatchedEngine(num_blocks=40, block_size=16)
    text = prompt(3, 17)
    for expected in (0, 16):
        watched.add(text, max_tokens=1)
        watched.drain()
        assert watched.ended[-1].num_cached_tokens == expected
    stats = watched.engine.stats()
    assert stats.prefix_cache_hit_tokens_total == 16
    assert stats.prefix_cache_query_tokens_total == 34
    assert stats.computed_tokens_total == 17 + 1


def test_fully_cached_prompt_still_computes_a_token() -> None:
    watched = WatchedEngine(num_blocks=40, block_size=16)
    for _ in range(2):
        watched.add(prompt(3, 48), max_tokens=2)
        watched.drain()
    assert 32 <= (watched.ended[-1].num_cached_tokens or 0) <= 47


def test_equal_prompts_of_one_step_cache_their_full_blocks_once() -> None:
    """Each keeps its own blocks; a later request of the same prompt shares the cached ones."""
    watched = WatchedEngine(num_blocks=40, block_size=4)
    for _ in range(3):
        watched.add(prompt(3, 14), max_tokens=4, ignore_eos=True)
    watched.step()
    assert len(running_ids(watched)) == 3
    assert watched.engine.stats().num_used_blocks == 3 * 4
    watched.add(prompt(3, 14), max_tokens=1)
    watched.step()
    assert watched.ended[-1].num_cached_tokens == 12
    watched.drain()
    assert watched.engine.stats().num_cached_blocks == 3 + 1, "the prompt once, and the first block with output"


def test_outputs_are_independent_of_prefix_caching() -> None:
    results = []
    for caching in (False, True):
        watched = WatchedEngine(
            num_blocks=14, block_size=2, enable_prefix_caching=caching, max_num_batched_tokens=7, max_num_seqs=4
        )
        for number in range(12):
            watched.add(prompt(number % 3, 6 + number % 5), max_tokens=6, ignore_eos=True, n=1 + number % 2)
        results.append(watched.run())
        assert (watched.engine.stats().prefix_cache_hit_tokens_total > 0) is caching
    assert results[0] == results[1]


def test_prefix_cache_hits_are_counted_at_the_first_admission_only() -> None:
    """Hits after a preemption change neither the hit statistics nor num_cached_tokens."""
    watched = WatchedEngine(num_blocks=7, max_num_seqs=2)
    watched.add(prompt(0, 8), max_tokens=16, ignore_eos=True)
    watched.add(prompt(1, 8), max_tokens=16, ignore_eos=True)
    watched.drain()
    stats = watched.engine.stats()
    assert stats.preemptions_total > 0
    assert stats.prefix_cache_hit_tokens_total == 0
    assert stats.prefix_cache_query_tokens_total == 16
    assert {ended.num_cached_tokens for ended in watched.ended} == {0}


def test_reset_prefix_cache_succeeds_once_the_engine_is_idle() -> None:
    watched = WatchedEngine(num_blocks=20)
    watched.add(prompt(0, 9), max_tokens=3, ignore_eos=True)
    watched.step()
    assert watched.engine.reset_prefix_cache() is False
    watched.drain()
    assert watched.engine.stats().num_cached_blocks > 0
    assert watched.engine.reset_prefix_cache() is True
    assert watched.engine.stats().num_cached_blocks == 0
    watched.add(prompt(0, 9), max_tokens=3)
    watched.drain()
    assert watched.ended[-1].num_cached_tokens == 0


# Scheduler without an engine


def test_scheduler_runs_without_an_engine() -> None:
    """schedule() and update() with token ids instead of a model runner."""
    manager = BlockManager(8, 4, validate=True)
    scheduler = Scheduler(EngineConfig(max_num_batched_tokens=16), manager)
    scheduler.add(Sequence("one", [1, 2, 3, 4, 5], SamplingParams(max_tokens=2)))
    assert [sequence.request_id for sequence in scheduler.waiting] == ["one"]
    step = scheduler.schedule()
    [scheduled] = step.sequences
    assert (scheduled.start, scheduled.end, scheduled.samples, step.num_tokens) == (0, 5, True, 5)
    assert [sequence.request_id for sequence in scheduler.running] == ["one"]
    [output] = scheduler.update_from_output(step, [7])
    assert (output.new_token_ids, output.finished) == ([7], False)
    step = scheduler.schedule()
    assert [(one.start, one.end) for one in step.sequences] == [(5, 6)]
    [output] = scheduler.update_from_output(step, [8])
    assert (output.new_token_ids, output.finish_reason) == ([8], FinishReason.LENGTH)
    assert manager.get_num_free_blocks() == 8
    assert scheduler.schedule().sequences == ()


@pytest.mark.parametrize("module", ["scheduler", "kv_cache", "engine", "kv_cache.block_pool"])
def test_scheduling_modules_import_neither_torch_nor_ray(module: str) -> None:
    code = (
        f"import sys, minivllm.core.{module}\n"
        "print(sorted({'torch', 'ray', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_engine_takes_num_blocks_and_max_model_len_from_the_runner() -> None:
    runner = FakeRunner(12, 4, max_model_len=30)
    engine = LLMEngine(EngineConfig(block_size=4), runner)
    assert engine.config.num_blocks == 12
    assert engine.config.max_model_len == 30
    assert engine.stats().num_total_blocks == engine.stats().num_free_blocks == 12


def plain_scheduler(**options: Any) -> Scheduler:
    config = EngineConfig(block_size=4, max_num_batched_tokens=16, **options)
    return Scheduler(config, BlockManager(8, 4, enable_prefix_caching=True, validate=True))


def test_abort_during_a_step_frees_the_blocks_after_the_step() -> None:
    scheduler = plain_scheduler()
    scheduler.add(Sequence("one", [1, 2, 3, 4, 5], SamplingParams(max_tokens=5)))
    scheduler.add(Sequence("two", [6, 7, 8], SamplingParams(max_tokens=5)))
    step = scheduler.schedule()
    scheduler.abort("one")
    scheduler.abort("one")
    assert scheduler.block_manager.get_num_free_blocks() == 5, "the running step still writes to its blocks"
    news = scheduler.update_from_output(step, [9, 9])
    assert len(news) == 2
    outputs = {output.request_id: output for output in news}
    assert (outputs["one"].finish_reason, outputs["one"].new_token_ids) == (FinishReason.ABORT, [])
    assert (outputs["two"].finish_reason, outputs["two"].new_token_ids) == (None, [9])
    assert scheduler.block_manager.get_num_free_blocks() == 7
    assert [sequence.request_id for sequence in scheduler.running] == ["two"]


def test_each_step_is_updated_once_with_one_result_per_sequence() -> None:
    scheduler = plain_scheduler()
    scheduler.add(Sequence("one", [1, 2, 3, 4, 5], SamplingParams(max_tokens=5)))
    step = scheduler.schedule()
    with pytest.raises(ValueError, match="schedule"):
        scheduler.schedule()
    with pytest.raises(ValueError, match="2 results"):
        scheduler.update_from_output(step, [1, 2])
    scheduler.update_from_output(step, [1])
    with pytest.raises(ValueError, match="update"):
        scheduler.update_from_output(step, [1])
    scheduler.block_manager.check_integrity()


def test_waiting_queue_is_ordered_by_the_given_arrival_time() -> None:
    scheduler = plain_scheduler(max_num_seqs=1)
    for name, arrival in (("late", 30.0), ("early", 10.0), ("between", 20.0), ("early too", 10.0)):
        scheduler.add(Sequence(name, [1, 2], SamplingParams(), arrival_time=arrival))
    assert [one.request_id for one in scheduler.waiting] == ["early", "early too", "between", "late"]


@pytest.mark.parametrize("budget", [3, 64])
def test_max_tokens_zero_returns_prompt_logprobs_and_no_output_token(budget: int) -> None:
    watched = WatchedEngine(num_blocks=20, max_num_batched_tokens=budget)
    for _ in range(2):
        watched.add(prompt(0, 13), max_tokens=0, prompt_logprobs=1)
    watched.drain()
    for ended in watched.ended:
        assert (ended.tokens, ended.finish_reason) == ([], FinishReason.LENGTH)
        assert ended.prompt_logprobs == ended.prompt[1:]
