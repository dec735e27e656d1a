"""Helpers of the block manager tests: sequences without an engine, prefill and decode, order of the free blocks."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Any

from minivllm.core.kv_cache.block_manager import BlockManager
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.sequence import Sequence


def make_sequence(request_id: str, prompt: int | Items[int], **details: Any) -> Sequence:
    """Returns a sequence with this prompt; an int is a length, with token ids that depend on the request id."""
    if isinstance(prompt, int):
        base = 1000 * (1 + sum(ord(letter) * 31**i for i, letter in enumerate(request_id)) % 100_000)
        prompt = range(base, base + prompt)
    return Sequence(request_id, list(prompt), SamplingParams(), **details)


def manager_with_free_order(order: Items[int], block_size: int, **options: Any) -> BlockManager:
    """Returns a manager whose free queue is `order`, built with the public API; all other blocks are in use."""
    manager = BlockManager(max(order) + 1, block_size, **options)
    manager.allocate_blocks(max(order) + 1)
    manager.free_blocks(list(order))
    return manager


def free_order(manager: BlockManager) -> list[int]:
    """Returns the free blocks in allocation order, taken from a copy of the manager."""
    twin = copy.deepcopy(manager)
    return list(twin.allocate_blocks(twin.get_num_free_blocks()))


def can_admit(manager: BlockManager, sequence: Any) -> bool:
    """Returns whether the manager admits the sequence with all its tokens, as the scheduler asks it."""
    return manager.admission_rejection(sequence, manager.match_prefix(sequence), 0) is None


def prefill(manager: BlockManager, sequence: Sequence, num_tokens: int | None = None) -> None:
    """Allocates blocks for the first `num_tokens` tokens (default: all) and marks them as computed."""
    total = sequence.num_tokens if num_tokens is None else num_tokens
    manager.allocate_for_prefill(sequence, total)
    manager.mark_computed(sequence, total)


def decode(manager: BlockManager, sequence: Sequence, token_id: int) -> Any:
    """Runs one decode step: appends a sampled token, allocates its slot, marks it as computed. Returns the slot."""
    sequence.append_token(token_id)
    slot = manager.append_slot_for_decode(sequence)
    manager.mark_computed(sequence, sequence.num_tokens)
    return slot


def snapshot(manager: BlockManager, sequences: Iterable[Any] = ()) -> Any:
    """Returns the state that queries and failed calls leave unchanged."""
    return (
        free_order(manager),
        manager.get_num_free_blocks(),
        [(owner.state, tuple(owner.request_ids)) for owner in manager.owners()],
        [(list(sequence.block_table), sequence.num_computed_tokens) for sequence in sequences],
    )
