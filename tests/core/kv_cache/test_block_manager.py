"""Section 4 of the house plan, sentence by sentence: allocation, release, admission, slots. No model, no scheduler."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from minivllm.core.errors import BlockNotInUseError, IntegrityError, NoFreeBlocksError
from minivllm.core.kv_cache.block_manager import BlockManager, Slot
from tests.core.kv_cache.ledger import decode, free_order, make_sequence, prefill, snapshot

both = pytest.mark.parametrize("caching", [False, True], ids=["plain", "prefix-caching"])
checked = pytest.mark.parametrize("validate", [False, True], ids=["service", "validate"])


# Raw blocks


@both
def test_allocation_of_too_many_blocks_takes_some(caching: bool) -> None:
    manager = BlockManager(5, 16, enable_prefix_caching=caching)
    manager.allocate_blocks(2)
    before = snapshot(manager)
    with pytest.raises(NoFreeBlocksError):
        manager.allocate_blocks(4)
    assert snapshot(manager) == before
    assert manager.allocate_blocks(3) == [2, 3, 4]


@both
def test_allocating_no_block_takes_one(caching: bool) -> None:
    manager = BlockManager(2, 16, enable_prefix_caching=caching)
    assert manager.allocate_blocks(0) == []
    assert manager.get_num_free_blocks() == 2


@both
def test_blocks_are_freed_in_another_order_than_given(caching: bool) -> None:
    manager = BlockManager(6, 16, enable_prefix_caching=caching)
    manager.allocate_blocks(5)
    manager.free_blocks([3, 0, 4])
    assert free_order(manager) == [5, 3, 0, 4]
    manager.free_blocks([2])
    assert manager.allocate_blocks(5) == [5, 3, 0, 4, 2]


@both
@checked
@pytest.mark.parametrize(
    "wrong", [[4], [0, 4], [0, 0], [0, 1, 0], [0, 99], [0, -1], [-6], [6]], ids=lambda ids: str(ids)
)
def test_wrong_release_frees_the_rest_of_its_list(caching: bool, validate: bool, wrong: list[int]) -> None:
    manager = BlockManager(6, 16, enable_prefix_caching=caching, validate=validate)
    manager.allocate_blocks(4)
    before = snapshot(manager)
    with pytest.raises(BlockNotInUseError):
        manager.free_blocks(wrong)
    assert snapshot(manager) == before
    manager.free_blocks([0, 1, 2, 3])
    assert manager.get_num_free_blocks() == 6


@both
def test_double_release_frees_a_block_that_another_got(caching: bool) -> None:
    manager = BlockManager(3, 16, enable_prefix_caching=caching)
    [block] = manager.allocate_blocks(1)
    manager.free_blocks([block])
    with pytest.raises(BlockNotInUseError) as caught:
        manager.free_blocks([block])
    assert str(block) in str(caught.value)


def test_cached_block_that_nobody_holds_can_be_freed_again() -> None:
    manager = BlockManager(4, 4, enable_prefix_caching=True)
    sequence = make_sequence("A", 8)
    prefill(manager, sequence)
    blocks = list(sequence.block_table)
    manager.free_sequence(sequence)
    before = snapshot(manager)
    with pytest.raises(BlockNotInUseError):
        manager.free_blocks(blocks)
    assert snapshot(manager) == before


@both
@pytest.mark.parametrize(
    "call",
    [
        lambda manager, sequence: manager.allocate_blocks(-1),
        lambda manager, sequence: manager.can_allocate(-1),
        lambda manager, sequence: manager.allocate_for_prefill(sequence, -1),
        lambda manager, sequence: manager.mark_computed(sequence, -1),
        lambda manager, sequence: manager.slot_mapping(sequence, -1, 3),
        lambda manager, sequence: manager.free_blocks([-1]),
    ],
    ids=["allocate_blocks", "can_allocate", "allocate_for_prefill", "mark_computed", "slot_mapping", "free_blocks"],
)
def test_negative_count_is_taken_for_a_number_from_the_end(caching: bool, call: Any) -> None:
    manager = BlockManager(6, 4, enable_prefix_caching=caching)
    sequence = make_sequence("A", 10)
    manager.allocate_for_prefill(sequence, 10)
    before = snapshot(manager, [sequence])
    with pytest.raises(ValueError, match=r"-1"):
        call(manager, sequence)
    assert snapshot(manager, [sequence]) == before


@pytest.mark.parametrize("sizes", [(0, 16), (-1, 16), (4, 0), (4, -16)])
def test_pool_of_no_blocks_or_no_tokens_is_made(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"num_blocks|block_size"):
        BlockManager(*sizes)


@pytest.mark.parametrize("watermark", [-0.1, 1.5])
def test_watermark_beyond_the_pool_is_taken(watermark: float) -> None:
    with pytest.raises(ValueError, match="watermark"):
        BlockManager(4, 16, watermark=watermark)


# Prefill


@both
@checked
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 9, 16])
def test_table_is_longer_or_shorter_than_the_tokens_need(caching: bool, validate: bool, num_tokens: int) -> None:
    manager = BlockManager(4, 4, enable_prefix_caching=caching, validate=validate)
    sequence = make_sequence("A", num_tokens)
    manager.allocate_for_prefill(sequence, num_tokens)
    assert len(sequence.block_table) == -(-num_tokens // 4)
    assert manager.get_num_free_blocks() == 4 - len(sequence.block_table)
    manager.check_integrity()


@both
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 16])
def test_chunks_add_up_to_other_blocks_than_one_prefill(caching: bool, chunk: int) -> None:
    manager = BlockManager(6, 4, enable_prefix_caching=caching, validate=True)
    sequence = make_sequence("A", 18)
    for end in [*range(chunk, 18, chunk), 18]:
        prefill(manager, sequence, end)
        assert sequence.cached_token_count == end
        assert sequence.block_table == list(range(-(-end // 4)))
        manager.check_integrity()
    assert free_order(manager) == [5]


@both
def test_asking_twice_for_the_same_tokens_takes_blocks_twice(caching: bool) -> None:
    manager = BlockManager(6, 4, enable_prefix_caching=caching)
    sequence = make_sequence("A", 10)
    manager.allocate_for_prefill(sequence, 10)
    manager.allocate_for_prefill(sequence, 10)
    manager.allocate_for_prefill(sequence, 5)
    assert sequence.block_table == [0, 1, 2]


@both
@checked
def test_failed_prefill_takes_blocks_or_touches_the_table(caching: bool, validate: bool) -> None:
    manager = BlockManager(5, 4, enable_prefix_caching=caching, validate=validate)
    other, sequence = make_sequence("other", 8), make_sequence("A", 40)
    prefill(manager, other)
    prefill(manager, sequence, 4)
    before = snapshot(manager, [other, sequence])
    with pytest.raises(NoFreeBlocksError):
        manager.allocate_for_prefill(sequence, 17)
    assert snapshot(manager, [other, sequence]) == before
    manager.allocate_for_prefill(sequence, 12)
    assert len(sequence.block_table) == 3


# Decode


@both
def test_asking_twice_for_one_token_takes_two_slots(caching: bool) -> None:
    manager = BlockManager(3, 4, enable_prefix_caching=caching, validate=True)
    sequence = make_sequence("A", 4)
    prefill(manager, sequence)
    sequence.append_token(5)
    slots = [manager.append_slot_for_decode(sequence) for _ in range(3)]
    assert slots == [Slot(1, 0)] * 3
    assert sequence.block_table == [0, 1]
    assert manager.get_num_free_blocks() == 1


@both
def test_decode_without_a_free_block_changes_something(caching: bool) -> None:
    manager = BlockManager(3, 4, enable_prefix_caching=caching, validate=True)
    full, other = make_sequence("full", 4), make_sequence("other", 8)
    prefill(manager, full)
    prefill(manager, other)
    full.append_token(1)
    before = snapshot(manager, [full, other])
    assert not manager.can_append_slot(full)
    with pytest.raises(NoFreeBlocksError):
        manager.append_slot_for_decode(full)
    assert snapshot(manager, [full, other]) == before
    manager.free_sequence(other)
    assert manager.can_append_slot(full)
    manager.append_slot_for_decode(full)
    assert len(full.block_table) == 2


@both
def test_decode_inside_a_block_is_refused_in_a_full_pool(caching: bool) -> None:
    manager = BlockManager(1, 4, enable_prefix_caching=caching)
    sequence = make_sequence("A", 2)
    prefill(manager, sequence)
    for token in (1, 2):
        sequence.append_token(token)
        assert manager.can_append_slot(sequence)
        assert manager.can_append_slots([sequence])
        manager.append_slot_for_decode(sequence)
        manager.mark_computed(sequence, sequence.num_tokens)
    sequence.append_token(3)
    assert not manager.can_append_slot(sequence)


@both
def test_two_sequences_are_promised_the_same_last_block(caching: bool) -> None:
    manager = BlockManager(3, 4, enable_prefix_caching=caching)
    one, two = make_sequence("one", 4), make_sequence("two", 4)
    for sequence in (one, two):
        prefill(manager, sequence)
        sequence.append_token(1)
    assert manager.can_append_slot(one)
    assert manager.can_append_slot(two)
    assert not manager.can_append_slots([one, two])
    assert manager.can_append_slots([])
    manager.append_slot_for_decode(one)
    assert manager.can_append_slots([one]), "its slot is there already"
    assert not manager.can_append_slots([one, two])


def test_watermark_keeps_a_running_sequence_from_its_next_slot() -> None:
    manager = BlockManager(4, 4, watermark=0.75)
    sequence = make_sequence("A", 12)
    prefill(manager, sequence)
    sequence.append_token(1)
    assert manager.can_append_slot(sequence)
    assert manager.can_append_slots([sequence])
    assert manager.append_slot_for_decode(sequence) == Slot(3, 0)


@both
def test_slots_are_of_other_tokens_than_asked(caching: bool) -> None:
    manager = BlockManager(8, 4, enable_prefix_caching=caching)
    manager.free_blocks(list(reversed(manager.allocate_blocks(8))))
    sequence = make_sequence("A", 11)
    manager.allocate_for_prefill(sequence, 11)
    assert sequence.block_table == [7, 6, 5]
    flat = [28, 29, 30, 31, 24, 25, 26, 27, 20, 21, 22]
    for start in range(12):
        for end in range(start, 12):
            assert list(manager.slot_mapping(sequence, start, end)) == flat[start:end]


@both
def test_slots_beyond_the_table_are_invented(caching: bool) -> None:
    manager = BlockManager(8, 4, enable_prefix_caching=caching)
    sequence = make_sequence("A", 20)
    manager.allocate_for_prefill(sequence, 8)
    with pytest.raises(ValueError, match="A"):
        manager.slot_mapping(sequence, 0, 9)
    with pytest.raises(ValueError, match="A"):
        manager.slot_mapping(sequence, 5, 4)


# Release


@both
def test_sequence_frees_its_first_block_first(caching: bool) -> None:
    """Nothing was computed, so nothing is cached: one first-in first-out queue, last block first."""
    manager = BlockManager(6, 4, enable_prefix_caching=caching)
    one, two = make_sequence("one", 8), make_sequence("two", 9)
    manager.allocate_for_prefill(one, 8)
    manager.allocate_for_prefill(two, 9)
    manager.free_sequence(two)
    manager.free_sequence(one)
    assert free_order(manager) == [5, 4, 3, 2, 1, 0]


def test_queue_is_not_first_in_first_out_without_caching() -> None:
    manager = BlockManager(7, 4)
    sequences = [make_sequence(name, 8) for name in "ABC"]
    for sequence in sequences:
        prefill(manager, sequence)
    manager.free_sequence(sequences[1])
    manager.free_sequence(sequences[0])
    manager.free_sequence(sequences[2])
    assert manager.allocate_blocks(7) == [6, 3, 2, 1, 0, 5, 4]


@both
@checked
def test_releasing_a_sequence_that_holds_nothing_raises(caching: bool, validate: bool) -> None:
    manager = BlockManager(4, 4, enable_prefix_caching=caching, validate=validate)
    never_scheduled, freed = make_sequence("never", 8), make_sequence("freed", 8)
    manager.free_sequence(never_scheduled)
    prefill(manager, freed)
    manager.free_sequence(freed)
    before = snapshot(manager, [never_scheduled, freed])
    manager.free_sequence(freed)
    manager.free_sequence(never_scheduled)
    assert snapshot(manager, [never_scheduled, freed]) == before
    assert before[1] == 4


@both
def test_freed_sequence_cannot_come_back(caching: bool) -> None:
    """Preemption: freed with its output kept, then recomputed from the prompt on, output included."""
    manager = BlockManager(4, 4, enable_prefix_caching=caching, validate=True)
    sequence = make_sequence("A", 6)
    prefill(manager, sequence)
    for token in (1, 2, 3):
        decode(manager, sequence, token)
    manager.free_sequence(sequence)
    assert (sequence.block_table, sequence.cached_token_count, sequence.num_tokens) == ([], 0, 9)
    manager.allocate_for_prefill(sequence, 9)
    assert len(sequence.block_table) == 3
    manager.mark_computed(sequence, 9)
    assert decode(manager, sequence, 4).offset == 1
    manager.check_integrity()


# Admission


@both
def test_question_changes_something(caching: bool) -> None:
    manager = BlockManager(6, 4, enable_prefix_caching=caching, watermark=0.2)
    cached, running, new = make_sequence("A", 8), make_sequence("B", 5), make_sequence("C", 8)
    new.prompt_token_ids[:4] = cached.prompt_token_ids[:4]
    prefill(manager, cached)
    manager.free_sequence(cached)
    prefill(manager, running)
    running.append_token(1)
    before = snapshot(manager, [cached, running, new])
    for _ in range(3):
        manager.can_allocate(8)
        manager.can_allocate(800)
        manager.can_admit(new)
        manager.can_append_slot(running)
        manager.can_append_slots([running])
        manager.slot_mapping(running, 0, 5)
        manager.get_num_free_blocks()
        manager.owners()
        manager.check_integrity()
    assert snapshot(manager, [cached, running, new]) == before


@both
@pytest.mark.parametrize(("num_tokens", "fits"), [(0, True), (1, True), (12, True), (13, False), (16, False)])
def test_admission_forgets_blocks_that_are_in_use(caching: bool, num_tokens: int, fits: bool) -> None:
    manager = BlockManager(4, 4, enable_prefix_caching=caching)
    assert manager.can_allocate(16)
    assert not manager.can_allocate(17)
    prefill(manager, make_sequence("running", 3))
    assert manager.can_allocate(num_tokens) is fits
    if num_tokens:
        assert manager.can_admit(make_sequence("new", num_tokens)) is fits


@both
def test_watermark_stops_a_lone_long_request(caching: bool) -> None:
    manager = BlockManager(10, 4, enable_prefix_caching=caching, watermark=0.3)
    lone = make_sequence("lone", 40)
    assert manager.can_allocate(40)
    assert manager.can_admit(lone)
    manager.allocate_for_prefill(lone, 40)
    assert len(lone.block_table) == 10


@both
def test_admission_uses_the_blocks_kept_for_growth(caching: bool) -> None:
    """Ten blocks, three kept back: with one in use, six are left for a newcomer and not one more."""
    manager = BlockManager(10, 4, enable_prefix_caching=caching, watermark=0.3)
    running = make_sequence("running", 4)
    prefill(manager, running)
    assert manager.can_allocate(24)
    assert not manager.can_allocate(25)
    assert manager.can_admit(make_sequence("six", 24))
    assert not manager.can_admit(make_sequence("seven", 25))
    manager.free_sequence(running)
    assert manager.can_allocate(40)
    assert manager.can_admit(make_sequence("ten", 40))


def test_watermark_counts_where_it_must_not() -> None:
    """Only admission sees it: allocation itself takes what is free."""
    manager = BlockManager(10, 4, watermark=0.5)
    prefill(manager, make_sequence("running", 20))
    sequence = make_sequence("new", 20)
    assert not manager.can_admit(sequence)
    manager.allocate_for_prefill(sequence, 20)
    assert manager.get_num_free_blocks() == 0


def test_preempted_sequence_is_admitted_by_its_prompt_alone() -> None:
    """What must be recomputed is prompt and output; a table for the prompt alone would not do."""
    manager = BlockManager(5, 4, validate=True)
    sequence = make_sequence("A", 4)
    prefill(manager, sequence)
    for token in range(8):
        decode(manager, sequence, token)
    manager.free_sequence(sequence)
    prefill(manager, make_sequence("other", 12))
    assert not manager.can_admit(sequence)


# The duck type


@both
@checked
def test_manager_needs_more_of_a_sequence_than_the_plan_says(caching: bool, validate: bool) -> None:
    """Anything with a request id, a table, the two counts and the token ids will do."""

    def plain(request_id: str) -> Any:
        return SimpleNamespace(
            request_id=request_id,
            prompt_token_ids=list(range(9)),
            generated_token_ids=[],
            num_tokens=9,
            block_table=[],
            cached_token_count=0,
        )

    manager = BlockManager(8, 4, enable_prefix_caching=caching, validate=validate)
    one, two = plain("one"), plain("two")
    assert manager.can_admit(one)
    prefill(manager, one)
    one.generated_token_ids.append(50)
    one.num_tokens = 10
    assert manager.append_slot_for_decode(one) == Slot(2, 1)
    manager.mark_computed(one, 10)
    manager.allocate_for_prefill(two, 9)
    assert two.cached_token_count == (8 if caching else 0)
    manager.mark_computed(two, 9)
    manager.check_integrity()
    manager.free_sequence(one)
    manager.free_sequence(two)
    assert manager.get_num_free_blocks() == 8


# Owners and integrity


@both
def test_owner_of_a_block_is_not_told(caching: bool) -> None:
    manager = BlockManager(6, 4, enable_prefix_caching=caching)
    assert [owner.state for owner in manager.owners()] == ["free"] * 6
    manager.allocate_blocks(1)
    sequence = make_sequence("A", 7)
    prefill(manager, sequence)
    owners = manager.owners()
    assert [owner.state for owner in owners] == ["owned"] * 3 + ["free"] * 3
    assert [list(owner.request_ids) for owner in owners] == [[], ["A"], ["A"], [], [], []]
    manager.free_sequence(sequence)
    states = [owner.state for owner in manager.owners()]
    assert states == ["owned", "cached" if caching else "free", *["free"] * 4]
    assert all(not owner.request_ids for owner in manager.owners())


Tampering = tuple[str, Any]


def tamper_append_free_block(manager: BlockManager, one: Any, two: Any) -> None:
    one.block_table.append(7)


def tamper_steal_block(manager: BlockManager, one: Any, two: Any) -> None:
    one.block_table[1] = two.block_table[1]


def tamper_share_partial_block(manager: BlockManager, one: Any, two: Any) -> None:
    one.block_table.append(two.block_table[-1])


def tamper_lose_block(manager: BlockManager, one: Any, two: Any) -> None:
    one.block_table.pop()


def tamper_clear_table(manager: BlockManager, one: Any, two: Any) -> None:
    one.block_table.clear()
    one.cached_token_count = 0


def tamper_repeat_block(manager: BlockManager, one: Any, two: Any) -> None:
    one.block_table[1] = one.block_table[0]


def tamper_unknown_block(manager: BlockManager, one: Any, two: Any) -> None:
    one.block_table[0] = 99


def tamper_negative_block(manager: BlockManager, one: Any, two: Any) -> None:
    one.block_table[0] = -1


def tamper_count_too_high(manager: BlockManager, one: Any, two: Any) -> None:
    one.cached_token_count = 9


def tamper_count_negative(manager: BlockManager, one: Any, two: Any) -> None:
    one.cached_token_count = -1


TAMPERINGS = [
    tamper_append_free_block,
    tamper_steal_block,
    tamper_share_partial_block,
    tamper_lose_block,
    tamper_clear_table,
    tamper_repeat_block,
    tamper_unknown_block,
    tamper_negative_block,
    tamper_count_too_high,
    tamper_count_negative,
]


@both
@checked
@pytest.mark.parametrize("tamper", TAMPERINGS, ids=lambda tamper: tamper.__name__.removeprefix("tamper_"))
def test_damage_goes_unnoticed(caching: bool, validate: bool, tamper: Any) -> None:
    manager = BlockManager(8, 4, enable_prefix_caching=caching, validate=validate)
    one, two = make_sequence("request-one", 8), make_sequence("request-two", 7)
    prefill(manager, one)
    prefill(manager, two)
    manager.check_integrity()
    tamper(manager, one, two)
    with pytest.raises(IntegrityError) as caught:
        manager.check_integrity()
    error = caught.value
    assert "request-one" in str(error) or "request-one" in error.request_ids
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.block_id, again.request_ids) == (str(error), error.block_id, error.request_ids)


@both
def test_release_of_a_foreign_block_is_believed(caching: bool) -> None:
    manager = BlockManager(8, 4, enable_prefix_caching=caching, validate=True)
    owner, thief = make_sequence("owner", 8), make_sequence("thief", 8)
    prefill(manager, owner)
    prefill(manager, thief)
    thief.block_table[1] = owner.block_table[1]
    with pytest.raises(ValueError, match=r"thief.*\b1\b|\b1\b.*thief"):
        manager.free_sequence(thief)
    assert owner.block_table == [0, 1]
    assert manager.get_num_free_blocks() == 4, "nothing was freed"
    thief.block_table[1] = 3
    manager.check_integrity()


@both
def test_release_with_a_free_block_in_the_table_frees_it_twice(caching: bool) -> None:
    manager = BlockManager(8, 4, enable_prefix_caching=caching, validate=True)
    sequence = make_sequence("request-one", 8)
    prefill(manager, sequence)
    sequence.block_table[1] = 5
    with pytest.raises(ValueError, match=r"request-one.*\b5\b|\b5\b.*request-one"):
        manager.free_sequence(sequence)


@both
def test_another_sequence_of_the_same_name_is_taken_for_the_owner(caching: bool) -> None:
    """A fresh object of a live id holds nothing: releasing it must not release its namesake's blocks."""
    manager = BlockManager(8, 4, enable_prefix_caching=caching, validate=True)
    sequence, namesake = make_sequence("A", 8), make_sequence("A", 8)
    prefill(manager, sequence)
    manager.free_sequence(namesake)
    assert sequence.block_table == [0, 1]
    assert manager.get_num_free_blocks() == 6
    manager.check_integrity()


@both
@pytest.mark.parametrize("count", [9, 10, 16])
def test_impossible_cached_count_is_believed(caching: bool, count: int) -> None:
    """Six tokens of eight places are known: neither more than the table covers nor more than there are."""
    manager = BlockManager(8, 4, enable_prefix_caching=caching, validate=True)
    sequence = make_sequence("request-one", 6)
    manager.allocate_for_prefill(sequence, 6)
    with pytest.raises(ValueError, match="request-one"):
        manager.mark_computed(sequence, count)
    assert sequence.cached_token_count == 0
