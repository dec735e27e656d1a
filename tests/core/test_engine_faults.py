"""What is left after many aborts, and what a damaged ledger does to the requests that have nothing to do with it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from minivllm.core.sequence import FinishReason
from tests.core.harness import WatchedEngine, leftovers, reachable


def abort_many(watched: WatchedEngine, count: int, seed: int) -> set[str]:
    """Adds `count` requests of every kind and aborts each somewhere on its way."""
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
            watched.on_flight(lambda target=target: watched.abort(target[0]))
        watched.step()
    return set(names)


@pytest.mark.parametrize("caching", [False, True], ids=["plain", "prefix-caching"])
def test_thousand_aborts_leave_something_in_some_layer(caching: bool) -> None:
    """No map may remember a request: neither its objects nor its id are reachable from the engine any more."""
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
    assert max(sizes) <= max(slots, 100), "a container grew with the requests"


def test_search_for_leftovers_finds_none_because_it_looks_nowhere() -> None:
    watched = WatchedEngine(num_blocks=24)
    name = watched.add([1, 2, 3], n=2)
    watched.step()
    found = leftovers(watched.engine, {name})
    assert any("Sequence" in entry for entry in found)
    assert any(name in entry for entry in found)
    watched.drain()


# A damaged ledger (validation mode)


def steal_a_block(one: Any, two: Any, pool: Any) -> None:
    one.block_table[1] = two.block_table[1]


def append_a_free_block(one: Any, two: Any, pool: Any) -> None:
    one.block_table.append(pool.free[0])


def lose_a_block(one: Any, two: Any, pool: Any) -> None:
    one.block_table.pop()


def lose_the_table(one: Any, two: Any, pool: Any) -> None:
    one.block_table.clear()


def repeat_a_block(one: Any, two: Any, pool: Any) -> None:
    one.block_table[1] = one.block_table[0]


def name_an_unknown_block(one: Any, two: Any, pool: Any) -> None:
    one.block_table[0] = 10_000


def name_a_negative_block(one: Any, two: Any, pool: Any) -> None:
    one.block_table[0] = -1


def count_too_much(one: Any, two: Any, pool: Any) -> None:
    one.cached_token_count += 50


def count_less_than_nothing(one: Any, two: Any, pool: Any) -> None:
    one.cached_token_count = -3


def put_a_used_block_into_the_free_list(one: Any, two: Any, pool: Any) -> None:
    pool.free.append(one.block_table[0])


def put_a_free_block_in_twice(one: Any, two: Any, pool: Any) -> None:
    pool.free.append(pool.free[0])


def lose_a_free_block(one: Any, two: Any, pool: Any) -> None:
    pool.free.popleft()


def count_a_holder_too_many(one: Any, two: Any, pool: Any) -> None:
    pool.reference_counts[one.block_table[0]] += 1


def count_a_holder_too_few(one: Any, two: Any, pool: Any) -> None:
    pool.reference_counts[one.block_table[0]] -= 1


DAMAGES = [
    steal_a_block,
    append_a_free_block,
    lose_a_block,
    lose_the_table,
    repeat_a_block,
    name_an_unknown_block,
    name_a_negative_block,
    count_too_much,
    count_less_than_nothing,
    put_a_used_block_into_the_free_list,
    put_a_free_block_in_twice,
    lose_a_free_block,
    count_a_holder_too_many,
    count_a_holder_too_few,
]


@pytest.mark.parametrize("caching", [False, True], ids=["plain", "prefix-caching"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("steps", [2, 3, 4, 5])
def test_damaged_ledger_harms_a_request_it_does_not_concern(steps: int, damage: Any, caching: bool) -> None:
    """It ends the requests it concerns at most, is counted, and the engine goes on with all its blocks."""
    watched = WatchedEngine(
        num_blocks=24, block_size=2, max_num_seqs=3, enable_prefix_caching=caching, validate_blocks=True
    )
    for number in range(5):
        watched.add([10 * number + digit for digit in range(1, 6)], max_tokens=8, ignore_eos=True)
    for _ in range(steps):
        watched.step()
    scheduler, pool = watched.engine.scheduler, watched.engine.block_manager.pool
    one, two = scheduler.running[:2]
    concerned = [watched.live[sequence.request_id, 0] for sequence in (one, two)]
    for sample in concerned:
        sample.may_fail = True
    watched.on_flight(lambda: damage(one, two, pool))
    watched.drain()
    assert not watched.engine.is_dead
    assert watched.engine.stats().integrity_violations_total >= 1
    assert len(watched.ended) == 5
    assert sum(ended.finish_reason == FinishReason.LENGTH for ended in watched.ended) >= 3
    for number in range(4):
        watched.add([number + 1] * 9, max_tokens=8, ignore_eos=True)
    watched.drain()
    assert len(watched.ended) == 9


def put_a_used_block_at_the_head_of_the_free_list(one: Any, two: Any, pool: Any) -> None:
    pool.free.appendleft(one.block_table[0])


FOUND_WHILE_SCHEDULING = [
    put_a_used_block_at_the_head_of_the_free_list,
    append_a_free_block,
    lose_a_block,
    count_too_much,
    count_less_than_nothing,
]


@pytest.mark.parametrize("steps", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("damage", FOUND_WHILE_SCHEDULING, ids=lambda damage: damage.__name__)
def test_damage_found_while_scheduling_kills_the_engine(damage: Any, steps: int) -> None:
    """The first of the two is in the step already when the second one's block turns out to be the first one's."""
    watched = WatchedEngine(num_blocks=24, block_size=2, enable_prefix_caching=False, validate_blocks=True)
    for number in range(4):
        watched.add([10 * number + digit for digit in range(1, 6 + number % 2)], max_tokens=12, ignore_eos=True)
    for _ in range(steps):
        watched.step()
    one, two = watched.engine.scheduler.running[:2]
    for sequence in watched.engine.scheduler.running:
        # Whoever is given the block is concerned too, and that may be any of them.
        watched.live[sequence.request_id, 0].may_fail = True
    damage(one, two, watched.engine.block_manager.pool)
    watched.drain()
    assert not watched.engine.is_dead
    assert watched.engine.stats().integrity_violations_total >= 1
    assert watched.finish_counts["length"] >= 2, "two requests at most are concerned"


def test_damage_is_told_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    watched = WatchedEngine(num_blocks=24, block_size=2, validate_blocks=True)
    watched.add([1, 2, 3, 4, 5], max_tokens=8, ignore_eos=True)
    watched.step()
    [one] = watched.engine.scheduler.running
    watched.live[one.request_id, 0].may_fail = True
    block = one.block_table[0]
    watched.on_flight(lambda: one.block_table.insert(0, block))
    watched.drain()
    assert f"{block}" in caplog.text
    assert one.request_id in caplog.text
    [ended] = watched.ended
    assert ended.finish_reason == FinishReason.ERROR
