"""Worked examples with explicit block ids and slots: prefill, decode, block boundaries, free.

Unless a test says otherwise a block has 16 slots and the free queue is [3, 8, 1, 5, 7].
"""

from __future__ import annotations

import pytest

from minivllm.core.errors import NoFreeBlocksError
from minivllm.core.kv_cache.block_manager import BlockManager, Slot
from tests.core.kv_cache.helpers import decode, free_order, make_sequence, manager_with_free_order, prefill

FREE_QUEUE = [3, 8, 1, 5, 7]

pytestmark = pytest.mark.parametrize("caching", [False, True], ids=["no-caching", "prefix-caching"])


def example_manager(caching: bool) -> BlockManager:
    return manager_with_free_order(FREE_QUEUE, 16, enable_prefix_caching=caching, validate=True)


def test_fresh_pool_hands_out_blocks_in_order(caching: bool) -> None:
    manager = BlockManager(6, 16, enable_prefix_caching=caching)
    assert manager.get_num_free_blocks() == 6
    assert manager.allocate_blocks(2) == [0, 1]
    assert manager.allocate_blocks(3) == [2, 3, 4]
    assert manager.get_num_free_blocks() == 1


def test_prefill_takes_the_first_blocks_of_the_free_queue(caching: bool) -> None:
    manager = example_manager(caching)
    assert free_order(manager) == FREE_QUEUE
    sequence = make_sequence("A", 40)
    manager.allocate_for_prefill(sequence, 40)
    assert sequence.block_table == [3, 8, 1]
    assert free_order(manager) == [5, 7]
    assert manager.get_num_free_blocks() == 2


def test_prompt_tokens_get_the_slots_of_their_block_table(caching: bool) -> None:
    manager = example_manager(caching)
    sequence = make_sequence("A", 40)
    manager.allocate_for_prefill(sequence, 40)
    slots = manager.slot_mapping(sequence, 0, 40)
    assert slots[0] == 3 * 16 + 0
    assert slots[1] == 3 * 16 + 1
    assert slots[15] == 3 * 16 + 15
    assert slots[16] == 8 * 16 + 0
    assert slots[39] == 1 * 16 + 7
    assert list(slots) == [*range(48, 64), *range(128, 144), *range(16, 24)]
    assert list(manager.slot_mapping(sequence, 15, 17)) == [63, 128]


def test_decode_at_40_tokens_writes_into_the_last_block(caching: bool) -> None:
    manager = example_manager(caching)
    sequence = make_sequence("A", 40)
    prefill(manager, sequence)
    slots = [decode(manager, sequence, 7000 + step) for step in range(8)]
    assert slots[0] == Slot(physical_block_id=1, offset=8)
    assert slots == [Slot(1, 8 + step) for step in range(8)]
    assert sequence.block_table == [3, 8, 1]
    assert free_order(manager) == [5, 7]


def test_decode_at_48_tokens_allocates_a_new_block(caching: bool) -> None:
    manager = example_manager(caching)
    sequence = make_sequence("A", 40)
    prefill(manager, sequence)
    for step in range(8):
        decode(manager, sequence, 7000 + step)
    assert decode(manager, sequence, 7008) == Slot(physical_block_id=5, offset=0)
    assert sequence.block_table == [3, 8, 1, 5]
    assert free_order(manager) == [7]


@pytest.mark.parametrize("context_len", [16, 32, 48])
def test_decode_allocates_a_block_only_at_a_block_boundary(caching: bool, context_len: int) -> None:
    """The token after 16, 32 or 48 tokens allocates a block; one token earlier or later does not."""
    for length, opens in ((context_len - 1, 0), (context_len, 1), (context_len + 1, 0)):
        manager = BlockManager(8, 16, enable_prefix_caching=caching, validate=True)
        sequence = make_sequence("A", length)
        prefill(manager, sequence)
        free = manager.get_num_free_blocks()
        slot = decode(manager, sequence, 9)
        assert free - manager.get_num_free_blocks() == opens
        assert slot == Slot(sequence.block_table[length // 16], length % 16)


def test_prompt_and_output_tokens_fill_the_block_table_in_order(caching: bool) -> None:
    """Block size 4, prompt A..F in blocks 10 and 3; G goes to (3, 2), H to (3, 3), I to offset 0 of the new block 6."""
    manager = manager_with_free_order([10, 3, 6, 2], 4, enable_prefix_caching=caching, validate=True)
    sequence = make_sequence("request", [ord(letter) for letter in "ABCDEF"])
    assert sequence.block_table == []
    assert sequence.num_computed_tokens == 0

    manager.allocate_for_prefill(sequence, 6)
    assert sequence.block_table == [10, 3]
    assert list(manager.slot_mapping(sequence, 0, 6)) == [40, 41, 42, 43, 12, 13]
    assert sequence.num_computed_tokens == 0, "no token is computed before the model has run"

    manager.mark_computed(sequence, 6)
    sequence.append_token(ord("G"))
    assert (sequence.num_computed_tokens, sequence.num_tokens) == (6, 7)
    assert sequence.output_token_ids == [ord("G")]
    assert sequence.last_token_id == ord("G")

    assert manager.append_slot_for_decode(sequence) == Slot(3, 2)
    manager.mark_computed(sequence, 7)
    sequence.append_token(ord("H"))
    assert manager.append_slot_for_decode(sequence) == Slot(3, 3)
    manager.mark_computed(sequence, 8)
    sequence.append_token(ord("I"))
    assert manager.append_slot_for_decode(sequence) == Slot(6, 0)
    assert sequence.block_table == [10, 3, 6]
    manager.mark_computed(sequence, 9)
    assert free_order(manager) == [2]
    manager.check_integrity()


def test_prompt_of_100_tokens_needs_7_blocks_of_16(caching: bool) -> None:
    for num_blocks, fits in ((6, False), (7, True)):
        manager = BlockManager(num_blocks, 16, enable_prefix_caching=caching)
        assert manager.can_allocate(100) is fits
    sequence = make_sequence("A", 100)
    manager.allocate_for_prefill(sequence, 100)
    assert len(sequence.block_table) == 7
    with pytest.raises(NoFreeBlocksError):
        BlockManager(6, 16, enable_prefix_caching=caching).allocate_for_prefill(make_sequence("B", 100), 100)


def test_prompt_of_129_tokens_takes_2_blocks_of_128(caching: bool) -> None:
    manager = BlockManager(4, 128, enable_prefix_caching=caching)
    sequence = make_sequence("A", 129)
    manager.allocate_for_prefill(sequence, 129)
    assert len(sequence.block_table) == 2
    assert manager.get_num_free_blocks() == 2


def test_free_sequence_returns_its_blocks_last_block_first(caching: bool) -> None:
    manager = example_manager(caching)
    sequence = make_sequence("A", 40)
    manager.allocate_for_prefill(sequence, 40)
    manager.free_sequence(sequence)
    assert sequence.block_table == []
    assert sequence.num_computed_tokens == 0
    assert free_order(manager) == [5, 7, 1, 8, 3]


def test_second_free_sequence_is_a_no_op(caching: bool) -> None:
    manager = example_manager(caching)
    sequence = make_sequence("A", 40)
    prefill(manager, sequence)
    manager.free_sequence(sequence)
    manager.free_sequence(sequence)
    assert sorted(free_order(manager)) == sorted(FREE_QUEUE)
    manager.check_integrity()
