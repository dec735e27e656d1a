"""What the tests of the block manager share: sequences without an engine, and a look at the free order from outside."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Any

from minivllm.core.kv_cache.block_manager import BlockManager
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.sequence import Sequence


def make_sequence(request_id: str, prompt: int | Items[int], **details: Any) -> Sequence:
    """A sequence of this prompt; a number stands for so many tokens that no other request id shares."""
    if isinstance(prompt, int):
        base = 1000 * (1 + sum(ord(letter) * 31**i for i, letter in enumerate(request_id)) % 100_000)
        prompt = range(base, base + prompt)
    return Sequence(request_id, list(prompt), SamplingParams(), **details)


def manager_with_free_order(order: Items[int], block_size: int, **options: Any) -> BlockManager:
    """A pool whose free list is `order`, made with the public API alone; blocks not named there are in use."""
    manager = BlockManager(max(order) + 1, block_size, **options)
    manager.allocate_blocks(max(order) + 1)
    manager.free_blocks(list(order))
    return manager


def free_order(manager: BlockManager) -> list[int]:
    """In which order the free blocks would be handed out, asked of a copy."""
    twin = copy.deepcopy(manager)
    return list(twin.allocate_blocks(twin.get_num_free_blocks()))


def prefill(manager: BlockManager, sequence: Sequence, num_tokens: int | None = None) -> None:
    """Allocates, "computes" and marks the first `num_tokens` (default: all) tokens."""
    total = sequence.num_tokens if num_tokens is None else num_tokens
    manager.allocate_for_prefill(sequence, total)
    manager.mark_computed(sequence, total)


def decode(manager: BlockManager, sequence: Sequence, token_id: int) -> Any:
    """One decode step of the ledger: a token was sampled, its slot is taken and written."""
    sequence.append_token(token_id)
    slot = manager.append_slot_for_decode(sequence)
    manager.mark_computed(sequence, sequence.num_tokens)
    return slot


def snapshot(manager: BlockManager, sequences: Iterable[Any] = ()) -> Any:
    """Everything one can ask that a question or a failure must not change."""
    return (
        free_order(manager),
        manager.get_num_free_blocks(),
        [(owner.state, tuple(owner.request_ids)) for owner in manager.owners()],
        [(list(sequence.block_table), sequence.cached_token_count) for sequence in sequences],
    )
