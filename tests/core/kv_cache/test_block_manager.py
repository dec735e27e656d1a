"""BlockManager with and without prefix caching: allocate, free, prefill, decode, admission, owners, integrity."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from minivllm.core.errors import BlockNotInUseError, IntegrityError, NoFreeBlocksError
from minivllm.core.kv_cache.block_manager import BlockManager, Slot
from tests.core.kv_cache.helpers import can_admit, decode, free_order, make_sequence, prefill, snapshot

both = pytest.mark.parametrize("caching", [False, True], ids=["no-caching", "prefix-caching"])
checked = pytest.mark.parametrize("validate", [False, True], ids=["no-validation", "validation"])


# Blocks without a sequence


@both
def test_allocate_blocks_beyond_the_free_ones_raises_and_takes_none(caching: bool) -> None:
    manager = BlockManager(5, 16, enable_prefix_caching=caching)
    manager.allocate_blocks(2)
    before = snapshot(manager)
    with pytest.raises(NoFreeBlocksError):
        manager.allocate_blocks(4)
    assert snapshot(manager) == before
    assert manager.allocate_blocks(3) == [2, 3, 4]


@both
def test_allocate_zero_blocks_returns_an_empty_list(caching: bool) -> None:
    manager = BlockManager(2, 16, enable_prefix_caching=caching)
    assert manager.allocate_blocks(0) == []
    assert manager.get_num_free_blocks() == 2


@both
def test_free_blocks_appends_to_the_free_queue_in_the_order_given(caching: bool) -> None:
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
def test_free_blocks_with_an_invalid_id_frees_nothing(caching: bool, validate: bool, wrong: list[int]) -> None:
    manager = BlockManager(6, 16, enable_prefix_caching=caching, validate=validate)
    manager.allocate_blocks(4)
    before = snapshot(manager)
    with pytest.raises(BlockNotInUseError):
        manager.free_blocks(wrong)
    assert snapshot(manager) == before
    manager.free_blocks([0, 1, 2, 3])
    assert manager.get_num_free_blocks() == 6


@both
def test_double_free_raises_an_error_naming_the_block(caching: bool) -> None:
    manager = BlockManager(3, 16, enable_prefix_caching=caching)
    [block] = manager.allocate_blocks(1)
    manager.free_blocks([block])
    with pytest.raises(BlockNotInUseError) as caught:
        manager.free_blocks([block])
    assert str(block) in str(caught.value)


def test_free_blocks_of_evictable_cached_blocks_raises_and_frees_nothing() -> None:
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
def test_negative_counts_positions_and_ids_raise_and_change_nothing(caching: bool, call: Any) -> None:
    manager = BlockManager(6, 4, enable_prefix_caching=caching)
    sequence = make_sequence("A", 10)
    manager.allocate_for_prefill(sequence, 10)
    before = snapshot(manager, [sequence])
    with pytest.raises(ValueError, match=r"-1"):
        call(manager, sequence)
    assert snapshot(manager, [sequence]) == before


@pytest.mark.parametrize(
    "sizes",
    [(0, 16), (-1, 16), (4, 0), (4, -16)],
    ids=["zero-blocks", "negative-blocks", "zero-block-size", "negative-block-size"],
)
def test_num_blocks_and_block_size_must_be_positive(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"num_blocks|block_size"):
        BlockManager(*sizes)


@pytest.mark.parametrize("watermark", [-0.1, 1.5])
def test_watermark_outside_zero_to_one_raises(watermark: float) -> None:
    with pytest.raises(ValueError, match="watermark"):
        BlockManager(4, 16, watermark=watermark)


# Prefill


@both
@checked
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 9, 16])
def test_block_table_covers_num_tokens_with_the_fewest_blocks(caching: bool, validate: bool, num_tokens: int) -> None:
    manager = BlockManager(4, 4, enable_prefix_caching=caching, validate=validate)
    sequence = make_sequence("A", num_tokens)
    manager.allocate_for_prefill(sequence, num_tokens)
    assert len(sequence.block_table) == -(-num_tokens // 4)
    assert manager.get_num_free_blocks() == 4 - len(sequence.block_table)
    manager.check_integrity()


@both
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 16])
def test_chunked_prefill_builds_the_same_block_table_as_one_prefill(caching: bool, chunk: int) -> None:
    manager = BlockManager(6, 4, enable_prefix_caching=caching, validate=True)
    sequence = make_sequence("A", 18)
    for end in [*range(chunk, 18, chunk), 18]:
        prefill(manager, sequence, end)
        assert sequence.num_computed_tokens == end
        assert sequence.block_table == list(range(-(-end // 4)))
        manager.check_integrity()
    assert free_order(manager) == [5]


@both
def test_allocate_for_prefill_of_covered_tokens_takes_no_block(caching: bool) -> None:
    manager = BlockManager(6, 4, enable_prefix_caching=caching)
    sequence = make_sequence("A", 10)
    manager.allocate_for_prefill(sequence, 10)
    manager.allocate_for_prefill(sequence, 10)
    manager.allocate_for_prefill(sequence, 5)
    assert sequence.block_table == [0, 1, 2]


@both
@checked
def test_failed_allocate_for_prefill_changes_nothing(caching: bool, validate: bool) -> None:
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
def test_append_slot_for_decode_is_idempotent_for_one_token(caching: bool) -> None:
    manager = BlockManager(3, 4, enable_prefix_caching=caching, validate=True)
    sequence = make_sequence("A", 4)
    prefill(manager, sequence)
    sequence.append_token(5)
    slots = [manager.append_slot_for_decode(sequence) for _ in range(3)]
    assert slots == [Slot(1, 0)] * 3
    assert sequence.block_table == [0, 1]
    assert manager.get_num_free_blocks() == 1


@both
def test_decode_without_a_free_block_raises_and_changes_nothing(caching: bool) -> None:
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
def test_decode_inside_a_block_needs_no_free_block(caching: bool) -> None:
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
def test_can_append_slots_counts_the_blocks_of_all_sequences_together(caching: bool) -> None:
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
    assert manager.can_append_slots([one]), "its slot is allocated already"
    assert not manager.can_append_slots([one, two])


def test_watermark_does_not_limit_decode() -> None:
    manager = BlockManager(4, 4, watermark=0.75)
    sequence = make_sequence("A", 12)
    prefill(manager, sequence)
    sequence.append_token(1)
    assert manager.can_append_slot(sequence)
    assert manager.can_append_slots([sequence])
    assert manager.append_slot_for_decode(sequence) == Slot(3, 0)


@both
def test_slot_mapping_follows_the_block_table(caching: bool) -> None:
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
def test_slot_mapping_of_an_uncovered_or_reversed_range_raises(caching: bool) -> None:
    manager = BlockManager(8, 4, enable_prefix_caching=caching)
    sequence = make_sequence("A", 20)
    manager.allocate_for_prefill(sequence, 8)
    with pytest.raises(ValueError, match="A"):
        manager.slot_mapping(sequence, 0, 9)
    with pytest.raises(ValueError, match="A"):
        manager.slot_mapping(sequence, 5, 4)


# Free


@both
def test_free_sequence_frees_the_last_block_first(caching: bool) -> None:
    """Without computed tokens no block is cached: one first-in first-out queue, last block of a sequence first."""
    manager = BlockManager(6, 4, enable_prefix_caching=caching)
    one, two = make_sequence("one", 8), make_sequence("two", 9)
    manager.allocate_for_prefill(one, 8)
    manager.allocate_for_prefill(two, 9)
    manager.free_sequence(two)
    manager.free_sequence(one)
    assert free_order(manager) == [5, 4, 3, 2, 1, 0]


def test_free_queue_without_prefix_caching_is_first_in_first_out() -> None:
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
def test_free_sequence_without_blocks_is_a_no_op(caching: bool, validate: bool) -> None:
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
def test_freed_sequence_keeps_its_tokens_and_can_be_prefilled_again(caching: bool) -> None:
    """Preemption frees the blocks and keeps the output; the next prefill covers prompt and output."""
    manager = BlockManager(4, 4, enable_prefix_caching=caching, validate=True)
    sequence = make_sequence("A", 6)
    prefill(manager, sequence)
    for token in (1, 2, 3):
        decode(manager, sequence, token)
    manager.free_sequence(sequence)
    assert (sequence.block_table, sequence.num_computed_tokens, sequence.num_tokens) == ([], 0, 9)
    manager.allocate_for_prefill(sequence, 9)
    assert len(sequence.block_table) == 3
    manager.mark_computed(sequence, 9)
    assert decode(manager, sequence, 4).offset == 1
    manager.check_integrity()


# Admission


@both
def test_queries_change_nothing(caching: bool) -> None:
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
        can_admit(manager, new)
        manager.can_append_slot(running)
        manager.can_append_slots([running])
        manager.slot_mapping(running, 0, 5)
        manager.get_num_free_blocks()
        manager.owners()
        manager.check_integrity()
    assert snapshot(manager, [cached, running, new]) == before


@both
@pytest.mark.parametrize(("num_tokens", "fits"), [(0, True), (1, True), (12, True), (13, False), (16, False)])
def test_admission_counts_only_free_blocks(caching: bool, num_tokens: int, fits: bool) -> None:
    manager = BlockManager(4, 4, enable_prefix_caching=caching)
    assert manager.can_allocate(16)
    assert not manager.can_allocate(17)
    prefill(manager, make_sequence("running", 3))
    assert manager.can_allocate(num_tokens) is fits
    if num_tokens:
        assert can_admit(manager, make_sequence("new", num_tokens)) is fits


@both
def test_watermark_does_not_limit_a_lone_request(caching: bool) -> None:
    manager = BlockManager(10, 4, enable_prefix_caching=caching, watermark=0.3)
    lone = make_sequence("lone", 40)
    assert manager.can_allocate(40)
    assert can_admit(manager, lone)
    manager.allocate_for_prefill(lone, 40)
    assert len(lone.block_table) == 10


@both
def test_watermark_reserves_blocks_while_another_sequence_runs(caching: bool) -> None:
    """Ten blocks, three reserved by the watermark, one in use: a new sequence gets at most six."""
    manager = BlockManager(10, 4, enable_prefix_caching=caching, watermark=0.3)
    running = make_sequence("running", 4)
    prefill(manager, running)
    assert manager.can_allocate(24)
    assert not manager.can_allocate(25)
    assert can_admit(manager, make_sequence("six", 24))
    assert not can_admit(manager, make_sequence("seven", 25))
    manager.free_sequence(running)
    assert manager.can_allocate(40)
    assert can_admit(manager, make_sequence("ten", 40))


def test_watermark_limits_admission_but_not_allocation() -> None:
    """`can_admit` returns False; `allocate_for_prefill` takes the last free block."""
    manager = BlockManager(10, 4, watermark=0.5)
    prefill(manager, make_sequence("running", 20))
    sequence = make_sequence("new", 20)
    assert not can_admit(manager, sequence)
    manager.allocate_for_prefill(sequence, 20)
    assert manager.get_num_free_blocks() == 0


def test_admission_of_a_preempted_sequence_counts_prompt_and_output() -> None:
    """Both are recomputed: the free blocks that fit the prompt alone do not suffice."""
    manager = BlockManager(5, 4, validate=True)
    sequence = make_sequence("A", 4)
    prefill(manager, sequence)
    for token in range(8):
        decode(manager, sequence, token)
    manager.free_sequence(sequence)
    prefill(manager, make_sequence("other", 12))
    assert not can_admit(manager, sequence)


# The sequence protocol


@both
@checked
def test_manager_accepts_any_object_with_the_block_sequence_fields(caching: bool, validate: bool) -> None:
    """The fields are the request id, the block table, two token counts and the token ids."""

    def plain(request_id: str) -> Any:
        return SimpleNamespace(
            request_id=request_id,
            prompt_token_ids=list(range(9)),
            output_token_ids=[],
            num_tokens=9,
            block_table=[],
            num_computed_tokens=0,
        )

    manager = BlockManager(8, 4, enable_prefix_caching=caching, validate=validate)
    one, two = plain("one"), plain("two")
    assert can_admit(manager, one)
    prefill(manager, one)
    one.output_token_ids.append(50)
    one.num_tokens = 10
    assert manager.append_slot_for_decode(one) == Slot(2, 1)
    manager.mark_computed(one, 10)
    manager.allocate_for_prefill(two, 9)
    assert two.num_computed_tokens == (8 if caching else 0)
    manager.mark_computed(two, 9)
    manager.check_integrity()
    manager.free_sequence(one)
    manager.free_sequence(two)
    assert manager.get_num_free_blocks() == 8


# Owners and integrity


@both
def test_owners_gives_state_and_request_ids_of_every_block(caching: bool) -> None:
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


def tamper_free_block_appended(manager: BlockManager, one: Any, two: Any) -> None:
    one.block_table.append(7)


def tamper_block_of_another_sequence(manager: BlockManager, one: Any, two: Any) -> None:
    one.block_table[1] = two.block_table[1]


def tamper_shared_partial_block(manager: BlockManager, one: Any, two: Any) -> None:
    one.block_table.append(two.block_table[-1])


def tamper_missing_last_block(manager: BlockManager, one: Any, two: Any) -> None:
    one.block_table.pop()


def tamper_cleared_block_table(manager: BlockManager, one: Any, two: Any) -> None:
    one.block_table.clear()
    one.num_computed_tokens = 0


def tamper_repeated_block(manager: BlockManager, one: Any, two: Any) -> None:
    one.block_table[1] = one.block_table[0]


def tamper_unknown_block_id(manager: BlockManager, one: Any, two: Any) -> None:
    one.block_table[0] = 99


def tamper_negative_block_id(manager: BlockManager, one: Any, two: Any) -> None:
    one.block_table[0] = -1


def tamper_computed_count_too_high(manager: BlockManager, one: Any, two: Any) -> None:
    one.num_computed_tokens = 9


def tamper_computed_count_negative(manager: BlockManager, one: Any, two: Any) -> None:
    one.num_computed_tokens = -1


TAMPERINGS = [
    tamper_free_block_appended,
    tamper_block_of_another_sequence,
    tamper_shared_partial_block,
    tamper_missing_last_block,
    tamper_cleared_block_table,
    tamper_repeated_block,
    tamper_unknown_block_id,
    tamper_negative_block_id,
    tamper_computed_count_too_high,
    tamper_computed_count_negative,
]


@both
@checked
@pytest.mark.parametrize("tamper", TAMPERINGS, ids=lambda tamper: tamper.__name__.removeprefix("tamper_"))
def test_check_integrity_raises_and_names_the_corrupted_sequence(caching: bool, validate: bool, tamper: Any) -> None:
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
def test_freeing_a_block_of_another_sequence_raises_and_frees_nothing(caching: bool) -> None:
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
def test_free_sequence_with_a_free_block_in_its_table_raises(caching: bool) -> None:
    manager = BlockManager(8, 4, enable_prefix_caching=caching, validate=True)
    sequence = make_sequence("request-one", 8)
    prefill(manager, sequence)
    sequence.block_table[1] = 5
    with pytest.raises(ValueError, match=r"request-one.*\b5\b|\b5\b.*request-one"):
        manager.free_sequence(sequence)


@both
def test_free_sequence_ignores_another_sequence_with_the_same_request_id(caching: bool) -> None:
    """A second object with a live request id owns no blocks; the first one keeps its blocks."""
    manager = BlockManager(8, 4, enable_prefix_caching=caching, validate=True)
    sequence, namesake = make_sequence("A", 8), make_sequence("A", 8)
    prefill(manager, sequence)
    manager.free_sequence(namesake)
    assert sequence.block_table == [0, 1]
    assert manager.get_num_free_blocks() == 6
    manager.check_integrity()


@both
@pytest.mark.parametrize("count", [9, 10, 16])
def test_mark_computed_beyond_the_covered_tokens_raises(caching: bool, count: int) -> None:
    """The block table covers the six tokens of the sequence and has eight slots; a count of nine or more is invalid."""
    manager = BlockManager(8, 4, enable_prefix_caching=caching, validate=True)
    sequence = make_sequence("request-one", 6)
    manager.allocate_for_prefill(sequence, 6)
    with pytest.raises(ValueError, match="request-one"):
        manager.mark_computed(sequence, count)
    assert sequence.num_computed_tokens == 0
