"""Prefix caching in the block manager: hits, caching of full blocks, sharing, eviction, collisions, salts, reset."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest

from minivllm.core.errors import NoFreeBlocksError
from minivllm.core.kv_cache import block_pool
from minivllm.core.kv_cache.block_manager import BlockManager
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.sequence import Sequence
from tests.core.kv_cache.helpers import can_admit, decode, free_order, make_sequence, prefill, snapshot

SIZE = 4


def caching_manager(num_blocks: int, block_size: int = SIZE, **options: Any) -> BlockManager:
    return BlockManager(num_blocks, block_size, enable_prefix_caching=True, validate=True, **options)


def hits(manager: BlockManager, prompt: list[int], **details: Any) -> int:
    """Returns the number of tokens a new sequence with this prompt hits; leaves the manager unchanged."""
    twin = copy.deepcopy(manager)
    probe = Sequence("probe", prompt, SamplingParams(), **details)
    twin.allocate_for_prefill(probe, len(prompt))
    twin.check_integrity()
    return probe.num_computed_tokens


def run_once(manager: BlockManager, request_id: str, prompt: list[int], **details: Any) -> Sequence:
    sequence = Sequence(request_id, prompt, SamplingParams(), **details)
    prefill(manager, sequence)
    manager.free_sequence(sequence)
    return sequence


# Hits


def test_repeated_prompt_of_17_tokens_hits_its_full_block_of_16() -> None:
    manager = caching_manager(8, 16)
    prompt = list(range(17))
    run_once(manager, "first", prompt)
    second = Sequence("second", prompt, SamplingParams())
    manager.allocate_for_prefill(second, 17)
    assert second.num_computed_tokens == 16
    assert len(second.block_table) == 2


def test_fully_cached_prompt_leaves_at_least_one_token_to_compute() -> None:
    manager = caching_manager(8, 16)
    prompt = list(range(48))
    run_once(manager, "first", prompt)
    assert sum(owner.state == "cached" for owner in manager.owners()) == 3
    second = Sequence("second", prompt, SamplingParams())
    manager.allocate_for_prefill(second, 48)
    assert 32 <= second.num_computed_tokens <= 47
    assert len(second.block_table) == 3
    manager.check_integrity()
    manager.mark_computed(second, 48)
    manager.check_integrity()


@pytest.mark.parametrize("length", range(1, 14))
def test_longest_cached_prefix_of_full_blocks_is_hit(length: int) -> None:
    """12 tokens are cached; the prompt shares its first `length` tokens with them and then differs."""
    manager = caching_manager(8)
    prompt = list(range(12))
    run_once(manager, "first", prompt)
    probe = [*prompt[:length], *range(100, 105)]
    assert hits(manager, probe) == min(length, 12) // SIZE * SIZE


def test_block_is_hit_only_after_the_same_prefix() -> None:
    manager = caching_manager(8)
    run_once(manager, "first", [1, 2, 3, 4, 5, 6, 7, 8])
    assert hits(manager, [9, 9, 9, 9, 5, 6, 7, 8, 0]) == 0
    assert hits(manager, [5, 6, 7, 8, 0]) == 0
    assert hits(manager, [1, 2, 3, 4, 5, 6, 7, 9, 0]) == 4


def test_output_tokens_are_cached_with_their_prompt() -> None:
    """The next turn of a conversation starts with the output of the last one."""
    manager = caching_manager(8)
    sequence = Sequence("first", [1, 2, 3], SamplingParams())
    prefill(manager, sequence)
    for token in (4, 5, 6, 7, 8, 9):
        decode(manager, sequence, token)
    manager.free_sequence(sequence)
    assert hits(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == 8


def test_preempted_sequence_hits_its_own_cached_blocks() -> None:
    manager = caching_manager(8)
    sequence = make_sequence("A", 10)
    prefill(manager, sequence)
    decode(manager, sequence, 1)
    manager.free_sequence(sequence)
    manager.allocate_for_prefill(sequence, 11)
    assert sequence.num_computed_tokens == 8
    assert sequence.block_table[:2] == [0, 1]


def test_partial_block_is_not_cached() -> None:
    manager = caching_manager(8)
    run_once(manager, "first", [1, 2, 3, 4, 5, 6])
    assert hits(manager, [1, 2, 3, 4, 5, 6, 7]) == 4


def test_prefix_is_matched_only_for_the_first_chunk() -> None:
    """Later chunks extend the block table with new blocks, even if equal blocks were cached since."""
    manager = caching_manager(12)
    prompt = list(range(12))
    slow = Sequence("slow", prompt, SamplingParams())
    prefill(manager, slow, 2)
    run_once(manager, "fast", [*prompt, 50])
    manager.allocate_for_prefill(slow, 12)
    assert slow.num_computed_tokens == 2
    manager.mark_computed(slow, 12)
    manager.check_integrity()


def test_first_chunk_inside_the_cached_prefix_leaves_a_token_to_compute() -> None:
    manager = caching_manager(12)
    prompt = list(range(12))
    run_once(manager, "first", prompt)
    second = Sequence("second", prompt, SamplingParams())
    manager.allocate_for_prefill(second, 6)
    assert len(second.block_table) == 2
    assert second.num_computed_tokens < 6
    manager.check_integrity()
    manager.allocate_for_prefill(second, 12)
    manager.mark_computed(second, 12)
    manager.check_integrity()


def test_disabled_prefix_caching_caches_nothing() -> None:
    manager = BlockManager(8, SIZE, validate=True)
    prompt = list(range(9))
    run_once(manager, "first", prompt)
    assert hits(manager, prompt) == 0
    assert {owner.state for owner in manager.owners()} == {"free"}


def test_request_with_prompt_logprobs_skips_the_prefix_cache() -> None:
    manager = caching_manager(8)
    prompt = list(range(9))
    run_once(manager, "first", prompt)
    probe = Sequence("probe", prompt, SamplingParams(prompt_logprobs=0))
    manager.allocate_for_prefill(probe, 9)
    assert probe.num_computed_tokens == 0
    assert not {0, 1} & set(probe.block_table)
    manager.mark_computed(probe, 9)
    manager.check_integrity()


# Caching of full blocks


def test_block_is_cached_once_it_is_full_and_computed() -> None:
    manager = caching_manager(8)
    prompt = list(range(9))
    first = Sequence("first", prompt, SamplingParams())
    manager.allocate_for_prefill(first, 9)
    assert hits(manager, prompt) == 0, "allocated, not computed"
    manager.mark_computed(first, 7)
    assert hits(manager, prompt) == 4, "the second block is not full yet"
    manager.mark_computed(first, 8)
    assert hits(manager, prompt) == 8


def test_free_during_prefill_caches_only_computed_full_blocks() -> None:
    """A request aborted during prefill leaves cached only the full blocks it computed."""
    manager = caching_manager(8)
    prompt = list(range(13))
    first = Sequence("first", prompt, SamplingParams())
    prefill(manager, first, 6)
    manager.allocate_for_prefill(first, 13)
    manager.free_sequence(first)
    assert hits(manager, prompt) == 4
    assert [owner.state for owner in manager.owners()].count("cached") == 1


def test_equal_prompts_computed_in_one_step_keep_their_blocks_and_cache_one_copy() -> None:
    manager = caching_manager(10)
    prompt = list(range(10))
    one, two = (Sequence(name, prompt, SamplingParams()) for name in ("one", "two"))
    manager.allocate_for_prefill(one, 10)
    manager.allocate_for_prefill(two, 10)
    for sequence, table in ((one, [0, 1, 2]), (two, [3, 4, 5])):
        manager.mark_computed(sequence, 10)
        manager.check_integrity()
        assert sequence.block_table == table, "block tables are append-only"
    three = Sequence("three", prompt, SamplingParams())
    prefill(manager, three)
    assert three.block_table == [0, 1, 6], "later sequences share the cached copy"
    manager.free_sequence(two)
    assert free_order(manager)[-3:] == [5, 4, 3], "the duplicates are free at once"
    assert [manager.owners()[block].state for block in (3, 4, 5)] == ["free"] * 3
    manager.free_sequence(one)
    manager.free_sequence(three)
    assert hits(manager, prompt) == 8
    assert manager.get_num_free_blocks() == 10
    assert [owner.state for owner in manager.owners()].count("cached") == 2


def two_equal_prefills(manager: BlockManager) -> tuple[Sequence, Sequence]:
    """Two sequences compute the same eight tokens in one step: the first one's blocks are cached."""
    one, two = (Sequence(name, list(range(8)), SamplingParams()) for name in ("one", "two"))
    for sequence in (one, two):
        manager.allocate_for_prefill(sequence, 8)
    for sequence in (one, two):
        manager.mark_computed(sequence, 8)
    return one, two


def test_blocks_after_an_uncached_duplicate_are_cached() -> None:
    """The output of the second of two equal prompts is hit after the first one's prompt blocks."""
    manager = caching_manager(10)
    one, two = two_equal_prefills(manager)
    for token in (20, 21, 22, 23):
        decode(manager, two, token)
    assert (one.block_table, two.block_table) == ([0, 1], [2, 3, 4])
    follow_up = [*range(8), 20, 21, 22, 23, 99]
    assert hits(manager, follow_up) == 12
    three = Sequence("three", follow_up, SamplingParams())
    manager.allocate_for_prefill(three, 13)
    assert three.block_table[:3] == [0, 1, 4]
    for sequence in (one, two, three):
        manager.free_sequence(sequence)
    assert hits(manager, follow_up) == 12


def test_blocks_after_an_evicted_prefix_are_hit_again_once_it_is_recomputed() -> None:
    """The child of an uncached duplicate is in use while the cached copy of its parent is evicted."""
    manager = caching_manager(10)
    one, two = two_equal_prefills(manager)
    for token in (20, 21, 22, 23):
        decode(manager, two, token)
    manager.free_sequence(one)
    taken = manager.allocate_blocks(7)
    assert {0, 1} < set(taken)
    manager.check_integrity()
    follow_up = [*range(8), 20, 21, 22, 23, 99]
    assert manager.match_prefix(Sequence("probe", follow_up, SamplingParams())).block_ids == ()
    manager.free_blocks(taken)
    prefill(manager, Sequence("again", list(range(9)), SamplingParams()))
    manager.check_integrity()
    assert hits(manager, follow_up) == 12
    assert hits(manager, [*range(4), 9, 9, 9, 9, 20, 21, 22, 23, 99]) == 4


# A match that is handed on


def test_match_prefix_is_what_the_allocation_takes_over() -> None:
    manager = caching_manager(8)
    prompt = list(range(10))
    run_once(manager, "first", prompt)
    probe = Sequence("probe", prompt, SamplingParams())
    before = snapshot(manager, [probe])
    match = manager.match_prefix(probe)
    assert snapshot(manager, [probe]) == before
    assert match.num_cached_tokens == 8
    manager.allocate_for_prefill(probe, 10, match)
    assert probe.block_table[:2] == list(match.block_ids) == [0, 1]
    assert probe.num_computed_tokens == 8
    assert manager.match_prefix(probe).num_cached_tokens == 0, "it has blocks, so it takes over no others"
    manager.check_integrity()


def test_match_with_an_evicted_block_is_looked_up_again() -> None:
    manager = caching_manager(4)
    prompt = list(range(10))
    run_once(manager, "first", prompt)
    probe = Sequence("probe", prompt, SamplingParams())
    match = manager.match_prefix(probe)
    manager.free_blocks(manager.allocate_blocks(3))
    manager.allocate_for_prefill(probe, 10, match)
    assert probe.num_computed_tokens == 4
    assert probe.block_table[0] == 0
    manager.check_integrity()


# Sharing


def test_shared_block_stays_owned_until_its_last_sequence_is_freed() -> None:
    manager = caching_manager(8)
    prompt = list(range(9))
    one = Sequence("one", prompt, SamplingParams())
    prefill(manager, one)
    two = Sequence("two", [*prompt[:8], 77], SamplingParams())
    prefill(manager, two)
    assert two.block_table == [0, 1, 3]
    assert manager.get_num_free_blocks() == 4
    manager.free_sequence(one)
    assert manager.get_num_free_blocks() == 5
    assert manager.owners()[0].state == "owned"
    assert list(manager.owners()[0].request_ids) == ["two"]
    manager.check_integrity()
    manager.free_sequence(two)
    assert manager.get_num_free_blocks() == 8


def test_hits_on_blocks_in_use_need_no_free_block() -> None:
    """Five blocks, three in use: a prompt of four blocks fits, because two of them are shared."""
    manager = caching_manager(5)
    holder = make_sequence("holder", 9)
    prefill(manager, holder)
    prompt = [*holder.prompt_token_ids[:8], *range(8)]
    new = Sequence("new", prompt, SamplingParams())
    assert not manager.can_allocate(16), "without the hits it does not fit"
    assert can_admit(manager, new), "with the hits it fits"
    prefill(manager, new)
    assert manager.get_num_free_blocks() == 0
    manager.check_integrity()


def test_hits_on_evictable_blocks_use_up_free_blocks() -> None:
    """Both free blocks are hits of the new sequence, so none is left for its third block."""
    manager = caching_manager(4)
    cached = run_once(manager, "cached", list(range(8)))
    prefill(manager, make_sequence("running", 8))
    assert manager.get_num_free_blocks() == 2
    new = Sequence("new", [*cached.prompt_token_ids, 1, 2, 3], SamplingParams())
    assert not can_admit(manager, new)
    before = snapshot(manager, [new])
    with pytest.raises(NoFreeBlocksError):
        manager.allocate_for_prefill(new, 11)
    assert snapshot(manager, [new]) == before
    assert hits(manager, [*cached.prompt_token_ids[:4], 9]) == 4, "a failed allocation evicts nothing"


def test_fully_cached_prompt_is_admitted_to_a_pool_of_its_own_size() -> None:
    """Eight cached tokens fill the pool: the first block is a hit, the last one is evicted and recomputed."""
    manager = caching_manager(2)
    prompt = list(range(8))
    run_once(manager, "first", prompt)
    second = Sequence("second", prompt, SamplingParams())
    assert can_admit(manager, second)
    manager.allocate_for_prefill(second, 8)
    assert 4 <= second.num_computed_tokens <= 7
    manager.mark_computed(second, 8)
    manager.check_integrity()
    manager.free_sequence(second)
    assert hits(manager, [*prompt[:4], 9]) == 4


def test_failed_allocation_keeps_reference_counts_and_free_order() -> None:
    manager = caching_manager(8)
    cached = run_once(manager, "cached", list(range(12)))
    holder = Sequence("holder", [*range(4), 50, 51], SamplingParams())
    prefill(manager, holder)
    other = make_sequence("other", 7)
    prefill(manager, other)
    new = Sequence("new", [*range(12), *range(60, 80)], SamplingParams())
    before = snapshot(manager, [cached, holder, other, new])
    for _ in range(2):
        with pytest.raises(NoFreeBlocksError):
            manager.allocate_for_prefill(new, 32)
        with pytest.raises(NoFreeBlocksError):
            manager.allocate_blocks(6)
    assert snapshot(manager, [cached, holder, other, new]) == before
    assert hits(manager, [*range(12), 99]) == 12
    manager.check_integrity()


# Eviction order


def test_uncached_blocks_are_reused_first_then_cached_blocks_deepest_first() -> None:
    """Two freed sequences of three full blocks and a partial one: first the partial blocks, then each deepest first."""
    manager = caching_manager(8)
    one, two = make_sequence("one", 14), make_sequence("two", 15)
    prefill(manager, one)
    prefill(manager, two)
    assert (one.block_table, two.block_table) == ([0, 1, 2, 3], [4, 5, 6, 7])
    manager.free_sequence(one)
    manager.free_sequence(two)
    assert free_order(manager) == [3, 7, 2, 1, 0, 6, 5, 4]
    assert manager.allocate_blocks(8) == [3, 7, 2, 1, 0, 6, 5, 4]


def test_blocks_are_evicted_in_the_order_their_sequences_were_freed() -> None:
    manager = caching_manager(8)
    one, two = make_sequence("one", 14), make_sequence("two", 15)
    prefill(manager, one)
    prefill(manager, two)
    manager.free_sequence(two)
    manager.free_sequence(one)
    assert manager.allocate_blocks(8) == [7, 3, 6, 5, 4, 2, 1, 0]


def test_hit_makes_a_block_most_recently_used() -> None:
    """Eviction is least recently used first: the older prefix is hit again, so the younger one is evicted first."""
    manager = caching_manager(6)
    old, young = list(range(10, 19)), list(range(30, 39))
    run_once(manager, "old", old)
    run_once(manager, "young", young)
    assert free_order(manager) == [2, 5, 1, 0, 4, 3]
    run_once(manager, "again", old)
    assert free_order(manager) == [5, 2, 4, 3, 1, 0]


def test_admission_check_keeps_the_eviction_order() -> None:
    manager = caching_manager(6)
    old, young = list(range(10, 18)), list(range(30, 38))
    run_once(manager, "old", old)
    run_once(manager, "young", young)
    before = free_order(manager)
    assert can_admit(manager, Sequence("new", [*old, 1], SamplingParams()))
    assert free_order(manager) == before


def test_evicted_block_is_no_longer_hit() -> None:
    manager = caching_manager(4)
    prompt = list(range(12))
    run_once(manager, "first", prompt)
    [unhashed] = manager.allocate_blocks(1)
    assert unhashed == 3
    assert manager.allocate_blocks(1) == [2], "the deepest block is evicted first"
    manager.check_integrity()
    manager.free_blocks([2, 3])
    assert hits(manager, [*prompt, 99]) == 8
    manager.allocate_blocks(3)
    manager.check_integrity()
    assert [owner.state for owner in manager.owners()].count("cached") == 1


def test_reallocated_blocks_lose_their_cached_content() -> None:
    manager = caching_manager(3)
    run_once(manager, "first", list(range(12)))
    blocks = manager.allocate_blocks(3)
    manager.free_blocks(blocks)
    assert free_order(manager) == blocks
    assert {owner.state for owner in manager.owners()} == {"free"}
    manager.check_integrity()


def test_uncached_blocks_freed_later_are_reused_before_cached_ones() -> None:
    manager = caching_manager(6)
    run_once(manager, "cached", list(range(8)))
    blocks = manager.allocate_blocks(4)
    manager.free_blocks(blocks)
    assert free_order(manager) == [*blocks, 1, 0]


# Collisions and salts


@pytest.fixture
def constant_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_pool, "hash_block", lambda *_, **__: b"the same for all")


def test_hash_collision_is_no_hit_for_other_tokens(constant_hash: None) -> None:
    manager = caching_manager(16)
    run_once(manager, "first", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert hits(manager, [9, 8, 7, 6, 5, 4, 3, 2, 1]) == 0
    assert hits(manager, [9, 8, 7, 6, 5, 6, 7, 8, 1]) == 0
    assert hits(manager, [1, 2, 3, 4, 9, 9, 9, 9, 9]) <= 4
    second = Sequence("second", [9, 8, 7, 6, 1, 2, 3, 4, 5], SamplingParams())
    prefill(manager, second)
    manager.check_integrity()
    manager.free_sequence(second)
    third = Sequence("third", [1, 2, 3, 4, 1, 2, 3, 4, 5], SamplingParams())
    prefill(manager, third)
    assert third.block_table[0] != third.block_table[1], "equal tokens at different positions are different blocks"
    manager.check_integrity()
    manager.free_sequence(third)
    assert manager.get_num_free_blocks() == 16


def test_hash_collision_is_no_hit_for_equal_tokens_at_another_position(constant_hash: None) -> None:
    """Three blocks of equal tokens have three different prefixes, although all hashes collide."""
    manager = caching_manager(16)
    block = [7, 7, 7, 7]
    run_once(manager, "first", block * 3)
    assert hits(manager, [*block * 3, 1]) in (0, 4)
    probe = Sequence("probe", [*block * 2, 1], SamplingParams())
    prefill(manager, probe)
    assert len(set(probe.block_table)) == 3
    manager.check_integrity()


def test_hash_collision_is_no_hit_for_another_salt(constant_hash: None) -> None:
    manager = caching_manager(16)
    prompt = list(range(9))
    run_once(manager, "first", prompt, cache_salt="tenant one")
    assert hits(manager, prompt, cache_salt="tenant two") == 0
    assert hits(manager, prompt) == 0


def test_cached_blocks_are_shared_only_within_one_salt() -> None:
    manager = caching_manager(16)
    prompt = list(range(9))
    run_once(manager, "first", prompt, cache_salt="one")
    assert hits(manager, prompt, cache_salt="one") == 8
    assert hits(manager, prompt, cache_salt="two") == 0
    assert hits(manager, prompt, cache_salt="") == 0
    assert hits(manager, prompt) == 0
    run_once(manager, "second", prompt)
    assert hits(manager, prompt) == 8
    assert hits(manager, prompt, cache_salt="two") == 0
    assert hits(manager, prompt, cache_salt="") == 0


def test_token_ids_that_spell_a_salt_are_no_hit() -> None:
    """Hash input of the salt and of token ids is distinct, even if their bytes are equal."""
    manager = caching_manager(16)
    run_once(manager, "first", list(range(9)), cache_salt="a")
    shifted = [int.from_bytes(b"a".ljust(8, b"\0"), "little"), *range(8)]
    assert hits(manager, shifted) == 0


@pytest.mark.parametrize(
    "salt",
    ["\ud800", "\0", "s" * 10_000, "ü 漢"],
    ids=["lone-surrogate", "null-character", "10000-characters", "non-ascii"],
)
def test_salt_may_be_any_string(salt: str) -> None:
    manager = caching_manager(8)
    prompt = list(range(9))
    run_once(manager, "first", prompt, cache_salt=salt)
    assert hits(manager, prompt, cache_salt=salt) == 8
    assert hits(manager, prompt, cache_salt=salt + "x") == 0


def test_block_hash_is_keyed_per_process() -> None:
    """Two processes hash the same block differently, so clients cannot craft collisions."""
    code = "from minivllm.core.kv_cache.block_pool import hash_block; print(hash_block(None, [1, 2, 3, 4], None))"
    digests = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(digests) == 2


def test_block_hash_depends_on_parent_tokens_and_salt() -> None:
    base = (None, [1, 2, 3, 4], None)
    variants = [
        base,
        (None, [1, 2, 3, 5], None),
        (None, [4, 3, 2, 1], None),
        (None, [1, 2, 3, 4], "salt"),
        (None, [1, 2, 3, 4], ""),
        (block_pool.hash_block(*base), [1, 2, 3, 4], None),
        (block_pool.hash_block(None, [1, 2, 3, 4], "salt"), [1, 2, 3, 4], None),
    ]
    digests = [block_pool.hash_block(*variant) for variant in variants]
    assert len(set(digests)) == len(variants)
    assert digests == [block_pool.hash_block(*variant) for variant in variants]


# Reset


def test_reset_with_cached_blocks_in_use_returns_false_and_changes_nothing() -> None:
    manager = caching_manager(8)
    sequence = make_sequence("A", 9)
    run_once(manager, "other", list(range(9)))
    prefill(manager, sequence)
    before = snapshot(manager, [sequence])
    assert manager.reset_prefix_cache() is False
    assert snapshot(manager, [sequence]) == before
    assert hits(manager, list(range(9))) == 8, "the cache is unchanged"


def test_reset_forgets_all_cached_blocks_and_caching_continues() -> None:
    manager = caching_manager(8)
    prompt = list(range(9))
    run_once(manager, "first", prompt)
    partial = make_sequence("partial", 3)
    prefill(manager, partial)
    assert manager.reset_prefix_cache() is True, "a sequence without cached blocks does not prevent a reset"
    assert hits(manager, prompt) == 0
    assert manager.get_num_free_blocks() == 7
    assert {owner.state for owner in manager.owners()} == {"free", "owned"}
    manager.check_integrity()
    run_once(manager, "second", prompt)
    assert hits(manager, prompt) == 8, "blocks are cached again after a reset"


def test_reset_of_an_empty_prefix_cache_returns_true() -> None:
    assert caching_manager(2).reset_prefix_cache() is True
    assert BlockManager(2, SIZE).reset_prefix_cache() is True


# Wrong K and V


def test_forgotten_prefixes_are_not_hit() -> None:
    manager = caching_manager(8)
    prompt = list(range(9))
    sequence = Sequence("wrong", prompt, SamplingParams())
    prefill(manager, sequence)
    assert hits(manager, prompt) == 8
    manager.forget_prefixes(sequence)
    manager.check_integrity()
    assert hits(manager, prompt) == 0
    manager.free_sequence(sequence)
    assert hits(manager, prompt) == 0
    assert sum(owner.state == "free" for owner in manager.owners()) == 8


def test_prefixes_that_another_sequence_uses_are_forgotten_with_their_last_user() -> None:
    manager = caching_manager(8)
    prompt = list(range(9))
    first, second = (Sequence(name, prompt, SamplingParams()) for name in ("first", "second"))
    prefill(manager, first)
    prefill(manager, second)
    assert second.block_table[:2] == first.block_table[:2]
    for sequence, left in ((first, 8), (second, 0)):
        manager.forget_prefixes(sequence)
        manager.free_sequence(sequence)
        manager.check_integrity()
        assert hits(manager, prompt) == left
