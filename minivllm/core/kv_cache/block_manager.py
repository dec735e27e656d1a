"""BlockManager: block tables, slots and admission checks over one pool of physical blocks.

Questions (`can_*`, `admission_refusal`) change nothing. Allocations are all or nothing. Of a sequence the manager reads
`request_id`, `block_table`, `num_computed_tokens`, `num_tokens` and the token ids. Token i of a sequence is in block
`block_table[i // block_size]` at offset `i % block_size`.

The block table is vLLM's (PagedAttention); the owner table that a debug build checks every release against is an idea
of the article this system follows.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from minivllm.core.errors import IntegrityError, InvalidRequestError, NoFreeBlocksError
from minivllm.core.kv_cache import block_pool
from minivllm.core.kv_cache.block_pool import BlockPool, CachedContent, require_count
from minivllm.core.kv_cache.integrity import OwnerTable, audit

Refusal = Literal["no_free_blocks", "watermark"]


class Slot(NamedTuple):
    """Where the K and V of one token go. The flat slot is `physical_block_id * block_size + offset`."""

    physical_block_id: int
    offset: int


class BlockOwner(NamedTuple):
    """Who has a block: "free", "owned" (raw allocations name no request), or "cached" (free, content kept)."""

    block_id: int
    state: Literal["free", "owned", "cached"]
    request_ids: tuple[str, ...]


class BlockSequence(Protocol):
    """All the manager needs of a sequence. `cache_salt`, `skip_prefix_lookup`, `block_hashes` are optional."""

    request_id: str
    block_table: list[int]
    num_computed_tokens: int

    @property
    def num_tokens(self) -> int: ...
    @property
    def prompt_token_ids(self) -> list[int]: ...
    @property
    def output_token_ids(self) -> list[int]: ...


@dataclass(slots=True)
class Holding:
    """A sequence that holds blocks, and how many of its tokens the table was asked to cover."""

    sequence: Any
    covered_tokens: int


class BlockManager:
    """The ledger of one KV pool.

    Args:
        num_blocks: usable blocks; a fresh pool hands out 0, 1, 2, ...
        block_size: tokens a block.
        enable_prefix_caching: share full blocks of equal prefixes, and keep them after release.
        watermark: share of `num_blocks` that admission leaves free while another sequence holds blocks.
        validate: check an owner table on every operation, and tables and counts on every call.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = False,
        watermark: float = 0.0,
        validate: bool = False,
    ) -> None:
        require_count(num_blocks, "num_blocks", at_least=1)
        require_count(block_size, "block_size", at_least=1)
        if not 0 <= watermark < 1:
            raise InvalidRequestError(f"watermark must be at least 0 and below 1, not {watermark!r}", param="watermark")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        # The tiny subtraction undoes float noise: 0.07 * 100 is a hair over 7.
        self.watermark_blocks = math.ceil(watermark * num_blocks - 1e-9)
        self.validate = validate
        self.pool = BlockPool(num_blocks)
        self._holdings: dict[str, Holding] = {}
        self._raw_blocks: set[int] = set()
        self._owner_table = OwnerTable() if validate else None

    # ---------------------------------------------------------------- blocks without a sequence

    def allocate_blocks(self, num_blocks: int) -> list[int]:
        """Takes blocks that no sequence owns. Raises NoFreeBlocksError, and then took none."""
        require_count(num_blocks, "num_blocks")
        block_ids = self.pool.take(num_blocks)
        self._raw_blocks.update(block_ids)
        if self._owner_table:
            self._owner_table.taken(block_ids, None)
        return block_ids

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """Gives blocks back in the order given.

        Raises BlockNotInUseError on an unknown id, a block not in use or one that stands twice, and then freed none.
        """
        block_ids = list(block_ids)
        self.pool.check_in_use(block_ids)
        if self._owner_table:
            self._owner_table.check_released(block_ids, None)
            self._owner_table.released(block_ids, None)
        self._raw_blocks.difference_update(block_ids)
        for block_id in block_ids:
            self.pool.release(block_id)

    def get_num_free_blocks(self) -> int:
        """Blocks that can be had now, evictable cached ones included."""
        return self.pool.num_free

    # ---------------------------------------------------------------- questions: they change nothing

    def blocks_needed(self, sequence: BlockSequence, num_tokens: int) -> int:
        """Blocks missing until the table covers `num_tokens` tokens; at most 0 when it does."""
        return -(-num_tokens // self.block_size) - len(sequence.block_table)

    def can_allocate(self, num_tokens: int) -> bool:
        """Is there room to admit a new sequence of so many tokens, should none of them be cached?"""
        require_count(num_tokens, "num_tokens")
        return self._refusal(-(-num_tokens // self.block_size)) is None

    def can_admit(self, sequence: BlockSequence) -> bool:
        """Is there room to admit this sequence whole, its cache hits known?"""
        return self.admission_refusal(sequence) is None

    def admission_refusal(self, sequence: BlockSequence, reserved_blocks: int = 0) -> Refusal | None:
        """Why the sequence cannot be admitted; None if it can.

        `reserved_blocks` are spoken for already: the rest of prompts whose first chunks were admitted.
        """
        needed = self.blocks_needed(sequence, sequence.num_tokens)
        if not sequence.block_table:
            # Hits that others hold cost nothing; evictable hits leave the free blocks like new ones do.
            hits = self._find_prefix(sequence, sequence.num_tokens)
            needed -= sum(1 for block_id in hits if self.pool.reference_counts[block_id])
        return self._refusal(needed + reserved_blocks)

    def _refusal(self, needed: int) -> Refusal | None:
        free = self.pool.num_free
        if needed > free:
            return "no_free_blocks"
        someone_runs = free < self.num_blocks
        return "watermark" if someone_runs and free - needed < self.watermark_blocks else None

    def can_append_slot(self, sequence: BlockSequence) -> bool:
        """Is there a slot for its last token?"""
        return self.blocks_needed(sequence, sequence.num_tokens) <= self.pool.num_free

    def can_append_slots(self, sequences: Iterable[BlockSequence]) -> bool:
        """Is there a slot for the last token of every one of them together?"""
        needed = sum(max(0, self.blocks_needed(sequence, sequence.num_tokens)) for sequence in sequences)
        return needed <= self.pool.num_free

    def num_cached_prefix_tokens(self, sequence: BlockSequence) -> int:
        """Tokens of this sequence that `allocate_for_prefill` would find in the cache now."""
        return len(self._find_prefix(sequence, sequence.num_tokens)) * self.block_size

    def owners(self) -> list[BlockOwner]:
        """Who has which block, in order of block ids. O(blocks): for people, not for the step."""
        holders: dict[int, list[str]] = {}
        for request_id, holding in self._holdings.items():
            for block_id in holding.sequence.block_table:
                holders.setdefault(block_id, []).append(request_id)
        return [self._owner(block_id, tuple(holders.get(block_id, ()))) for block_id in range(self.num_blocks)]

    def _owner(self, block_id: int, request_ids: tuple[str, ...]) -> BlockOwner:
        if self.pool.reference_counts[block_id]:
            return BlockOwner(block_id, "owned", request_ids)
        return BlockOwner(block_id, "free" if self.pool.contents[block_id] is None else "cached", ())

    # ---------------------------------------------------------------- a sequence's life

    def allocate_for_prefill(self, sequence: BlockSequence, num_tokens: int) -> None:
        """Makes the table cover the first `num_tokens` tokens (a total: cache hits and earlier chunks included).

        On an empty table the longest cached prefix is taken over first, at least one of the tokens being left to
        compute, and `num_computed_tokens` is set to it. Raises NoFreeBlocksError, and then nothing has changed.
        """
        require_count(num_tokens, "num_tokens", at_least=1)
        if num_tokens > sequence.num_tokens:
            raise InvalidRequestError(
                f"num_tokens is {num_tokens}, but {sequence.request_id} has {sequence.num_tokens}", param="num_tokens"
            )
        holding = self._holding(sequence)
        hits = [] if sequence.block_table else self._find_prefix(sequence, num_tokens)
        needed = self.blocks_needed(sequence, num_tokens) - len(hits)
        self._require_free(needed + sum(1 for block_id in hits if not self.pool.reference_counts[block_id]))
        self._share(sequence, hits)
        self._extend(sequence, needed)
        self._cover(sequence, holding, num_tokens)

    def append_slot_for_decode(self, sequence: BlockSequence) -> Slot:
        """The slot of `last_token_id`, which was sampled, appended and not yet computed: position `num_tokens - 1`.

        A new block is opened at a block's border. Asked twice for one token, it gives the same slot twice. Raises
        NoFreeBlocksError, and then nothing has changed.
        """
        num_tokens, table = sequence.num_tokens, sequence.block_table
        logical_block, offset = divmod(num_tokens - 1, self.block_size)
        holding = self._holdings.get(sequence.request_id)
        if holding is None or holding.sequence is not sequence or self.validate:
            holding = self._holding(sequence)
        if logical_block >= len(table):
            self._open_block(sequence, logical_block)
            self._holdings[sequence.request_id] = holding
        if holding.covered_tokens < num_tokens:
            holding.covered_tokens = num_tokens
        return Slot(table[logical_block], offset)

    def _open_block(self, sequence: BlockSequence, logical_block: int) -> None:
        if logical_block > len(sequence.block_table):
            raise IntegrityError(
                f"{sequence.request_id}: its table of {len(sequence.block_table)} blocks ends before logical block "
                f"{logical_block}",
                request_ids=(sequence.request_id,),
            )
        self._require_free(1)
        self._extend(sequence, 1)

    def slot_mapping(self, sequence: BlockSequence, start: int, end: int) -> list[int]:
        """Flat slots of tokens start..end, all of which the table must cover."""
        require_count(start, "start")
        if not start <= end <= len(sequence.block_table) * self.block_size:
            raise InvalidRequestError(
                f"tokens {start}..{end} of {sequence.request_id} are not within {len(sequence.block_table)} blocks",
                param="end",
            )
        size, table = self.block_size, sequence.block_table
        return [table[position // size] * size + position % size for position in range(start, end)]

    def mark_computed(self, sequence: BlockSequence, num_tokens: int) -> None:
        """The K and V of the first `num_tokens` tokens are written: counts them, and publishes blocks now full.

        A block that turns out to be a copy of a cached one is swapped for it: the table is rewritten before the copy
        is freed, so that no table ever names a free block.
        """
        holding = self._holdings.get(sequence.request_id)
        if holding is None or holding.sequence is not sequence or self.validate:
            holding = self._holding(sequence)
        before = sequence.num_computed_tokens
        if not (before <= num_tokens <= holding.covered_tokens and num_tokens <= sequence.num_tokens):
            raise IntegrityError(
                f"{sequence.request_id}: {num_tokens} tokens cannot be computed; {before} were, "
                f"{holding.covered_tokens} are covered, {sequence.num_tokens} exist",
                request_ids=(sequence.request_id,),
            )
        sequence.num_computed_tokens = num_tokens
        if self.enable_prefix_caching:
            first, end = before // self.block_size, num_tokens // self.block_size
            for index in range(first, end):
                if not self._publish(sequence, index):
                    break

    def free_sequence(self, sequence: BlockSequence) -> None:
        """Gives all blocks of the sequence back, the last one first. A no-op if it holds none.

        Raises BlockNotInUseError, or with `validate` IntegrityError, if a block in the table is not this sequence's;
        then nothing has changed.
        """
        block_ids = sequence.block_table[::-1]
        if block_ids:
            if self._owner_table:  # asked first: its error names the sequence too
                self._owner_table.check_released(block_ids, sequence.request_id, raw=self._raw_blocks)
            self.pool.check_in_use(block_ids)
            if self._owner_table:
                self._owner_table.released(block_ids, sequence.request_id)
            self._raw_blocks.difference_update(block_ids)
            for block_id in block_ids:
                self.pool.release(block_id)
        holding = self._holdings.get(sequence.request_id)
        if holding is not None and holding.sequence is sequence:  # and not a namesake that holds nothing
            del self._holdings[sequence.request_id]
        sequence.block_table.clear()
        sequence.num_computed_tokens = 0

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content. False, and nothing changed, while a sequence holds a cached block."""
        if len(self.pool.block_of_hash) > len(self.pool.evictable):
            return False
        self.pool.drop_evictable()
        return True

    # ---------------------------------------------------------------- guarding the invariants

    def check_integrity(self) -> None:
        """Raises IntegrityError naming the first violation of the ledger's invariants. O(blocks)."""
        audit(self.pool, self.block_size, self._holdings, self._raw_blocks, self._owner_table)

    def repair(self, damaged: Iterable[BlockSequence] = ()) -> None:
        """Drops damaged sequences and rebuilds the free list from the tables that remain, after a violation."""
        for sequence in damaged:
            self._holdings.pop(sequence.request_id, None)
            sequence.block_table.clear()
            sequence.num_computed_tokens = 0
        counts = dict.fromkeys(self._raw_blocks, 1)
        for holding in self._holdings.values():
            for block_id in holding.sequence.block_table:
                counts[block_id] = counts.get(block_id, 0) + 1
        self.pool.rebuild(counts)
        if self._owner_table:
            self._owner_table.rebuild(self._holdings, self._raw_blocks)

    # ---------------------------------------------------------------- the steps these are made of

    def _holding(self, sequence: BlockSequence) -> Holding:
        """The record of a sequence; a new one if it holds nothing yet."""
        holding = self._holdings.get(sequence.request_id)
        if holding is None:
            return self._adopt(sequence) if sequence.block_table else Holding(sequence, 0)
        if holding.sequence is not sequence:
            raise IntegrityError(
                f"two live sequences are called {sequence.request_id}", request_ids=(sequence.request_id,)
            )
        if self.validate:
            self._check_counts(holding)
        return holding

    def _adopt(self, sequence: BlockSequence) -> Holding:
        """Takes a table into the ledger that was filled by hand from `allocate_blocks`."""
        table = sequence.block_table
        foreign = [block_id for block_id in table if block_id not in self._raw_blocks]
        if foreign:
            raise IntegrityError(
                f"{sequence.request_id} has block {foreign[0]} in its table, which was not given to it",
                block_id=foreign[0],
                request_ids=(sequence.request_id,),
            )
        self._raw_blocks.difference_update(table)
        if self._owner_table:
            self._owner_table.adopted(table, sequence.request_id)
        holding = Holding(sequence, min(sequence.num_tokens, len(table) * self.block_size))
        self._holdings[sequence.request_id] = holding
        return holding

    def _check_counts(self, holding: Holding) -> None:
        sequence = holding.sequence
        expected = -(-holding.covered_tokens // self.block_size)
        if len(sequence.block_table) != expected or not 0 <= sequence.num_computed_tokens <= holding.covered_tokens:
            raise IntegrityError(
                f"{sequence.request_id}: {len(sequence.block_table)} blocks {sequence.block_table} and "
                f"{sequence.num_computed_tokens} cached tokens, where {holding.covered_tokens} covered tokens need "
                f"{expected} blocks",
                block_id=sequence.block_table[-1] if sequence.block_table else None,
                request_ids=(sequence.request_id,),
            )

    def _require_free(self, needed: int) -> None:
        if needed > self.pool.num_free:
            raise NoFreeBlocksError(f"{needed} blocks needed, {self.pool.num_free} of {self.num_blocks} free")

    def _share(self, sequence: BlockSequence, hits: list[int]) -> None:
        if not hits:
            return
        for block_id in hits:
            self.pool.hold(block_id)
        if self._owner_table:
            self._owner_table.shared(hits, sequence.request_id)
        sequence.block_table.extend(hits)
        sequence.num_computed_tokens = len(hits) * self.block_size

    def _extend(self, sequence: BlockSequence, count: int) -> None:
        if count <= 0:
            return
        block_ids = self.pool.take(count)
        if self._owner_table:
            self._owner_table.taken(block_ids, sequence.request_id)
        sequence.block_table.extend(block_ids)

    def _cover(self, sequence: BlockSequence, holding: Holding, num_tokens: int) -> None:
        holding.covered_tokens = max(holding.covered_tokens, num_tokens)
        self._holdings[sequence.request_id] = holding

    def _find_prefix(self, sequence: BlockSequence, num_tokens: int) -> list[int]:
        """Blocks of the longest cached prefix that leaves at least one of `num_tokens` tokens to compute."""
        if not self.enable_prefix_caching or getattr(sequence, "skip_prefix_lookup", False):
            return []
        found: list[int] = []
        parent: CachedContent | None = None
        salt = getattr(sequence, "cache_salt", None)
        for index in range((num_tokens - 1) // self.block_size):
            block_hash = self._hash_of(sequence, index)
            block_id = self.pool.find(block_hash, self._block_tokens(sequence, index), parent, salt)
            if block_id is None:
                break
            found.append(block_id)
            parent = self.pool.contents[block_id]
        return found

    def _publish(self, sequence: BlockSequence, index: int) -> bool:
        """Publishes logical block `index`, or swaps it for the cached copy. False if the chain ends here."""
        table = sequence.block_table
        if self.pool.contents[table[index]] is not None:
            return True
        parent = self.pool.contents[table[index - 1]] if index else None
        if index and parent is None:
            return False  # the block before stayed private, so nothing could ever find this one
        token_ids = self._block_tokens(sequence, index)
        salt = getattr(sequence, "cache_salt", None)
        block_hash = self._hash_of(sequence, index)
        cached = self.pool.find(block_hash, token_ids, parent, salt)
        if cached is None:
            return self.pool.publish(table[index], CachedContent(block_hash, token_ids, parent, salt))
        self._swap(sequence, index, cached)
        return True

    def _swap(self, sequence: BlockSequence, index: int, cached: int) -> None:
        copy = sequence.block_table[index]
        self.pool.hold(cached)
        sequence.block_table[index] = cached
        if self._owner_table:
            self._owner_table.shared([cached], sequence.request_id)
            self._owner_table.released([copy], sequence.request_id)
        self.pool.release(copy)

    def _hash_of(self, sequence: BlockSequence, index: int) -> Hashable:
        """Chained hash of logical block `index`, remembered on the sequence: tokens only ever grow at the end."""
        known: list[Hashable] = getattr(sequence, "block_hashes", [])
        salt = getattr(sequence, "cache_salt", None)
        while len(known) <= index:
            parent = known[-1] if known else None
            known.append(block_pool.hash_block(parent, self._block_tokens(sequence, len(known)), salt))
        return known[index]

    def _block_tokens(self, sequence: BlockSequence, index: int) -> tuple[int, ...]:
        # A tuple, since Python's garbage collector leaves tuples of numbers alone: of lists it would walk every one.
        start, end = index * self.block_size, (index + 1) * self.block_size
        prompt = sequence.prompt_token_ids
        if end <= len(prompt):
            return tuple(prompt[start:end])
        split = len(prompt)
        return (*prompt[start:], *sequence.output_token_ids[max(0, start - split) : end - split])
