"""Aborted requests leave no state, and corrupted block accounting stops the engine."""

from __future__ import annotations

import random
from typing import Any

import pytest

from minivllm.core.errors import EngineDeadError, NotFiniteError, RequestFailedError
from minivllm.core.outputs import RequestOutput
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.sequence import FinishReason
from tests.core.harness import WatchedEngine, leftovers, reachable


def abort_many(watched: WatchedEngine, count: int, seed: int) -> set[str]:
    """Adds `count` requests of every kind and aborts them in random states. Returns their ids."""
    generator = random.Random(seed)
    names: list[str] = []
    while len(names) < count or watched.live:
        if len(names) < count and len(watched.live) < 12:
            name = f"abortable-request-{seed}-{len(names)}"
            stem = [generator.randrange(3) + 1] * generator.choice([0, 4, 8, 12])
            watched.add(
                [*stem, *(generator.randrange(1, 97) for _ in range(generator.randrange(1, 9)))],
                request_id=name,
                n=generator.choice([1, 1, 3]),
                priority=generator.choice([0, 0, 1]),
                cache_salt=generator.choice([None, None, f"salt of {name}"]),
                prompt_logprobs=generator.choice([None, None, 1]),
                logprobs=generator.choice([None, 2]),
                fail_after=generator.choice([None, None, None, 1]),
                max_tokens=40,
                ignore_eos=True,
            )
            names.append(name)
        for request_id, index in list(watched.live):
            if generator.random() < 0.1:
                watched.abort(request_id, generator.choice([None, index]))
        if watched.live and generator.random() < 0.3:
            target = generator.choice(sorted(watched.live))
            watched.during_next_step(lambda target=target: watched.abort(target[0]))
        watched.step()
    return set(names)


@pytest.mark.parametrize("caching", [False, True], ids=["no-caching", "prefix-caching"])
def test_thousand_aborted_requests_leave_no_state(caching: bool) -> None:
    """Neither the objects nor the id of a request are reachable from the engine after its end."""
    watched = WatchedEngine(num_blocks=24, max_num_seqs=6, max_num_batched_tokens=20, enable_prefix_caching=caching)
    watched.keep_ended = False
    names = abort_many(watched, 1000, seed=1)
    watched.runner.last_step = None
    watched.check_drained()
    assert watched.finish_counts["abort"] > 1000
    stats = watched.engine.stats()
    assert stats.preemptions_total > 0
    assert leftovers(watched.engine, names) == []
    sizes = [len(item) for item in reachable(watched.engine) if isinstance(item, (dict, list, set, tuple))]
    slots = watched.runner.num_blocks * watched.runner.block_size
    assert max(sizes) <= max(slots, 100), "a container grows with the number of requests"


def test_leftover_search_finds_the_state_of_a_live_request() -> None:
    watched = WatchedEngine(num_blocks=24)
    name = watched.add([1, 2, 3], n=2)
    watched.step()
    found = leftovers(watched.engine, {name})
    assert any("Sequence" in entry for entry in found)
    assert any(name in entry for entry in found)
    watched.drain()


# Corrupted block accounting (validation mode)


def name_a_block_of_another_sequence(one: Any, two: Any, pool: Any) -> None:
    one.block_table[1] = two.block_table[1]


def append_a_free_block(one: Any, two: Any, pool: Any) -> None:
    one.block_table.append(pool.free[0])


def drop_the_last_block(one: Any, two: Any, pool: Any) -> None:
    one.block_table.pop()


def clear_the_block_table(one: Any, two: Any, pool: Any) -> None:
    one.block_table.clear()


def repeat_a_block(one: Any, two: Any, pool: Any) -> None:
    one.block_table[1] = one.block_table[0]


def name_an_unknown_block(one: Any, two: Any, pool: Any) -> None:
    one.block_table[0] = 10_000


def name_a_negative_block(one: Any, two: Any, pool: Any) -> None:
    one.block_table[0] = -1


def raise_the_computed_count(one: Any, two: Any, pool: Any) -> None:
    one.num_computed_tokens += 50


def make_the_computed_count_negative(one: Any, two: Any, pool: Any) -> None:
    one.num_computed_tokens = -3


def append_a_used_block_to_the_free_queue(one: Any, two: Any, pool: Any) -> None:
    pool.free.append(one.block_table[0])


def repeat_a_block_in_the_free_queue(one: Any, two: Any, pool: Any) -> None:
    pool.free.append(pool.free[0])


def drop_a_block_from_the_free_queue(one: Any, two: Any, pool: Any) -> None:
    pool.free.popleft()


def raise_a_reference_count(one: Any, two: Any, pool: Any) -> None:
    pool.reference_counts[one.block_table[0]] += 1


def lower_a_reference_count(one: Any, two: Any, pool: Any) -> None:
    pool.reference_counts[one.block_table[0]] -= 1


CORRUPTIONS = [
    name_a_block_of_another_sequence,
    append_a_free_block,
    drop_the_last_block,
    clear_the_block_table,
    repeat_a_block,
    name_an_unknown_block,
    name_a_negative_block,
    raise_the_computed_count,
    make_the_computed_count_negative,
    append_a_used_block_to_the_free_queue,
    repeat_a_block_in_the_free_queue,
    drop_a_block_from_the_free_queue,
    raise_a_reference_count,
    lower_a_reference_count,
]


def check_dead(watched: WatchedEngine, num_samples: int) -> None:
    """The engine is dead, every sample has one terminal output, all totals agree, and nothing more is computed.

    `WatchedEngine` has compared every token with the oracle.
    """
    engine = watched.engine
    assert engine.is_dead
    assert not engine.has_unfinished_requests()
    assert watched.live == {}
    assert len(watched.ended) == num_samples
    failed = [ended for ended in watched.ended if ended.finish_reason == FinishReason.ERROR]
    assert failed
    stats = engine.stats()
    assert stats.integrity_violations_total == 1
    assert stats.finished == {str(reason): count for reason, count in watched.finish_counts.items()}
    assert stats.requests_total == num_samples
    assert stats.generated_tokens_total >= sum(len(ended.tokens) for ended in watched.ended)
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert not watched.runner.live_request_ids
    steps = watched.runner.steps_executed
    with pytest.raises(EngineDeadError):
        engine.add_request("new", [1], SamplingParams())
    assert engine.step() == []
    assert watched.runner.steps_executed == steps


def drain_dead(watched: WatchedEngine) -> list[RequestOutput]:
    """Steps until the engine is dead. Returns the outputs of the last step."""
    for _ in range(50):
        outputs = watched.step()
        if watched.engine.is_dead:
            return outputs
    raise AssertionError("the violation was not found in 50 steps")


def corruptible_engine(num_requests: int, max_tokens: int = 12, **options: Any) -> WatchedEngine:
    watched = WatchedEngine(num_blocks=24, block_size=2, expects_death=True, full_checks=False, **options)
    for number in range(num_requests):
        watched.add([10 * number + digit for digit in range(1, 6 + number % 2)], max_tokens=max_tokens, ignore_eos=True)
    return watched


@pytest.mark.parametrize("caching", [False, True], ids=["no-caching", "prefix-caching"])
@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corrupt: corrupt.__name__)
@pytest.mark.parametrize("steps", [2, 3, 4, 5])
def test_corruption_ends_every_request_and_stops_the_engine(steps: int, corrupt: Any, caching: bool) -> None:
    """It is found in the step in which it occurs, before any of the step's tokens is delivered."""
    watched = corruptible_engine(5, max_tokens=8, max_num_seqs=3, enable_prefix_caching=caching)
    for _ in range(steps):
        watched.step()
    scheduler, pool = watched.engine.scheduler, watched.engine.block_manager.pool
    one, two = scheduler.running[:2]
    watched.during_next_step(lambda: corrupt(one, two, pool))
    outputs = watched.step()
    assert len(outputs) == 5
    assert all(output.finish_reason == FinishReason.ERROR and not output.new_token_ids for output in outputs)
    assert all(isinstance(output.error, EngineDeadError) for output in outputs)
    check_dead(watched, 5)


def prepend_a_used_block_to_the_free_queue(one: Any, two: Any, pool: Any) -> None:
    pool.free.appendleft(one.block_table[0])


FOUND_WHILE_SCHEDULING = [
    prepend_a_used_block_to_the_free_queue,
    append_a_free_block,
    drop_the_last_block,
    raise_the_computed_count,
    make_the_computed_count_negative,
]


@pytest.mark.parametrize("validate", [False, True], ids=["no-validation", "validation"])
@pytest.mark.parametrize("steps", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("corrupt", FOUND_WHILE_SCHEDULING, ids=lambda corrupt: corrupt.__name__)
def test_corruption_found_while_scheduling_stops_the_engine(corrupt: Any, steps: int, validate: bool) -> None:
    """Corruption between two steps is found by the checks of every allocation, without validation too."""
    watched = corruptible_engine(4, enable_prefix_caching=False, validate_blocks=validate)
    for _ in range(steps):
        watched.step()
    one, two = watched.engine.scheduler.running[:2]
    corrupt(one, two, watched.engine.block_manager.pool)
    outputs = drain_dead(watched)
    assert len(outputs) == 4
    assert all(isinstance(output.error, EngineDeadError) for output in outputs)
    check_dead(watched, 4)


@pytest.mark.parametrize("validate", [False, True], ids=["no-validation", "validation"])
def test_corruption_found_by_an_abort_stops_the_engine(validate: bool) -> None:
    """The next step returns the terminal outputs."""
    watched = corruptible_engine(3, validate_blocks=validate)
    for _ in range(3):
        watched.step()
    one = watched.engine.scheduler.running[0]
    one.block_table.pop()
    watched.abort(one.request_id)
    assert watched.engine.is_dead
    assert watched.engine.has_unfinished_requests()
    outputs = watched.step()
    assert [output.finish_reason for output in outputs] == [FinishReason.ERROR] * 3
    check_dead(watched, 3)


def test_corruption_is_logged_and_reported_with_its_block_and_request(caplog: pytest.LogCaptureFixture) -> None:
    watched = corruptible_engine(1)
    watched.step()
    [one] = watched.engine.scheduler.running
    block = one.block_table[0]
    watched.during_next_step(lambda: one.block_table.insert(0, block))
    [output] = watched.step()
    for text in (caplog.text, str(output.error)):
        assert f"block {block} " in text
        assert one.request_id in text
    check_dead(watched, 1)


@pytest.mark.parametrize(("failure", "num_cached"), [(NotFiniteError, 0), (RequestFailedError, 8)])
def test_prompt_whose_output_is_not_finite_is_not_served_from_the_cache(
    failure: type[RequestFailedError], num_cached: int
) -> None:
    """The chunks before the one that is sampled from are cached when the failure is found."""
    watched = WatchedEngine(num_blocks=16, max_num_batched_tokens=5, enable_prefix_caching=True)
    watched.runner.failure = failure
    prompt = list(range(1, 14))
    watched.add(prompt, request_id="fails", fail_after=0, max_tokens=3)
    while watched.live:
        watched.step()
    watched.add(prompt, request_id="next", max_tokens=3)
    while watched.live:
        watched.step()
    [following] = [ended for ended in watched.ended if ended.request_id == "next"]
    assert following.num_cached_tokens == num_cached
    assert following.tokens == following.expected
