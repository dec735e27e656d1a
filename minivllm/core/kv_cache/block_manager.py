"""BlockManager: block tables, slots, prefix hits and admission checks on one pool of physical blocks.

Questions (`can_*`, `match_prefix`, `admission_rejection`) change nothing. Allocations are all or nothing. Token i of a
sequence is in block `block_table[i // block_size]` at offset `i % block_size`. Block tables are append-only: a block
that duplicates a cached one stays in its table and is not cached.

The block table is vLLM's (PagedAttention).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from minivllm.core.errors import BlockNotInUseError, IntegrityError, InvalidRequestError
from minivllm.core.kv_cache import block_pool
from minivllm.core.kv_cache.block_pool import BlockPool, CachedPrefix, PrefixKey, require_count
from minivllm.core.kv_cache.integrity import BlockSequence, TableInUse, check_all, check_table, sequence_name
from minivllm.core.stats import RejectionReason

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Index = TypeVar("Index", int, "npt.NDArray[np.int64]")


class Slot(NamedTuple):
    """Where the K and V of one token are written."""

    physical_block_id: int
    offset: int


def flat_slots(block_ids: Index, offsets: Index, block_size: int) -> Index:
    """Returns the slot numbers of one token (ints) or of several (arrays), as the runner writes K and V to them."""
    return block_ids * block_size + offsets


class BlockOwner(NamedTuple):
    """State of a block: "free", "owned" or "cached" (free, content kept).

    `request_ids` of an owned block is empty while `allocate_blocks` has taken it and no block table contains it.
    """

    block_id: int
    state: Literal["free", "owned", "cached"]
    request_ids: tuple[str, ...]


class PrefixMatch(NamedTuple):
    """The blocks of the longest cached prefix of a sequence, and the prefix that each block caches."""

    block_ids: tuple[int, ...] = ()
    prefixes: tuple[CachedPrefix, ...] = ()
    num_cached_tokens: int = 0


class BlockManager:
    """Manages the `num_blocks` usable blocks of one KV pool, of `block_size` tokens each.

    Prefix caching shares full blocks of equal prefixes, and keeps them after their release. `watermark` is the share of
    the blocks that admission leaves free while another sequence has blocks. `validate` checks all invariants before the
    blocks of a sequence are freed.
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
        # The small subtraction undoes rounding errors: 0.07 * 100 is slightly more than 7.
        self.watermark_blocks = math.ceil(watermark * num_blocks - 1e-9)
        self.validate = validate
        self.pool = BlockPool(num_blocks)
        self._tables: dict[int, TableInUse] = {}  # by id() of the sequence
        self._unassigned: set[int] = set()  # from allocate_blocks, in no table yet

    # ---- blocks

    def allocate_blocks(self, num_blocks: int) -> list[int]:
        """Takes blocks from the pool. Raises NoFreeBlocksError, and then takes none."""
        require_count(num_blocks, "num_blocks")
        block_ids = self.pool.take(num_blocks)
        self._unassigned.update(block_ids)
        return block_ids

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """Frees blocks in the order given.

        Raises BlockNotInUseError on an unknown id, a block not in use or a repeated one, and then frees none.
        """
        block_ids = list(block_ids)
        self.pool.check_in_use(block_ids)
        self._unassigned.difference_update(block_ids)
        for block_id in block_ids:
            self.pool.release(block_id)

    def get_num_free_blocks(self) -> int:
        """Returns the number of blocks that can be allocated, evictable cached blocks included."""
        return self.pool.num_free

    # ---- questions

    def can_allocate(self, num_tokens: int) -> bool:
        """Returns whether a new sequence of `num_tokens` tokens can be admitted without any cache hit."""
        require_count(num_tokens, "num_tokens")
        return self._rejection(-(-num_tokens // self.block_size)) is None

    def match_prefix(self, sequence: BlockSequence) -> PrefixMatch:
        """Looks up the longest cached prefix that leaves at least one token to compute.

        Empty for a sequence that has blocks: only the first allocation takes over cached blocks.
        """
        if not self.enable_prefix_caching or sequence.block_table or getattr(sequence, "skip_prefix_lookup", False):
            return PrefixMatch()
        prefixes: list[CachedPrefix] = []
        prefix: CachedPrefix | None = None
        for index in range((sequence.num_tokens - 1) // self.block_size):
            prefix = self.pool.find(self._prefix_key(sequence, index, prefix))
            if prefix is None:
                break
            prefixes.append(prefix)
        block_ids = tuple(prefix.block_id for prefix in prefixes)
        return PrefixMatch(block_ids, tuple(prefixes), len(prefixes) * self.block_size)

    def admission_rejection(
        self, sequence: BlockSequence, match: PrefixMatch, reserved: int = 0
    ) -> RejectionReason | None:
        """Returns why the sequence cannot be admitted with all its tokens; None if it can.

        Hits in use cost nothing, evictable hits cost a free block like new ones. `reserved` counts the free blocks
        that admitted prompts still need for their later chunks.
        """
        missing = -(-sequence.num_tokens // self.block_size) - len(sequence.block_table)
        hits_in_use = sum(1 for block_id in match.block_ids if self.pool.reference_counts[block_id])
        return self._rejection(missing - hits_in_use + reserved)

    def can_append_slot(self, sequence: BlockSequence) -> bool:
        """Returns whether the blocks suffice for all tokens of the sequence."""
        return self.can_append_slots((sequence,))

    def can_append_slots(self, sequences: Iterable[BlockSequence]) -> bool:
        """Returns whether the blocks suffice for all tokens of these sequences together."""
        size, needed = self.block_size, 0
        for sequence in sequences:
            missing = -(-sequence.num_tokens // size) - len(sequence.block_table)
            if missing > 0:
                needed += missing
        return needed <= self.pool.num_free

    def owners(self) -> list[BlockOwner]:
        """Returns the state of every block, in order of block ids. O(blocks), for monitoring."""
        users: dict[int, list[str]] = {}
        for table in self._tables.values():
            for block_id in table.sequence.block_table:
                users.setdefault(block_id, []).append(sequence_name(table.sequence))
        owners = []
        for block_id, count in enumerate(self.pool.reference_counts):
            kept: Literal["free", "cached"] = "free" if self.pool.prefixes[block_id] is None else "cached"
            owners.append(BlockOwner(block_id, "owned" if count else kept, tuple(users.get(block_id, ()))))
        return owners

    # ---- the blocks of a sequence

    def allocate_for_prefill(self, sequence: BlockSequence, num_tokens: int, match: PrefixMatch | None = None) -> None:
        """Makes the table cover the first `num_tokens` tokens (a total: cache hits and earlier chunks included).

        An empty table starts with the cached prefix, of which at least one of the tokens is left to compute, and
        `num_computed_tokens` becomes its length. Raises NoFreeBlocksError, and then changes nothing.
        `match` is looked up if it is not given, or if a block of it was evicted since.
        """
        require_count(num_tokens, "num_tokens", at_least=1)
        if num_tokens > sequence.num_tokens:
            message = f"num_tokens is {num_tokens}, but {sequence_name(sequence)} has {sequence.num_tokens}"
            raise InvalidRequestError(message, param="num_tokens")
        if sequence.block_table:
            self._allocate_up_to(sequence, num_tokens)
            return
        if match is None or any(self.pool.prefixes[prefix.block_id] is not prefix for prefix in match.prefixes):
            match = self.match_prefix(sequence)
        num_hits = min(len(match.block_ids), (num_tokens - 1) // self.block_size)
        table = self._allocate_up_to(sequence, num_tokens, match.block_ids[:num_hits])
        if num_hits:
            table.num_full_blocks, table.prefix = num_hits, match.prefixes[num_hits - 1]
            sequence.num_computed_tokens = num_hits * self.block_size

    def append_slot_for_decode(self, sequence: BlockSequence) -> Slot:
        """Returns the slot of `last_token_id`, which is sampled and not yet computed: position `num_tokens - 1`.

        Allocates a block at a block boundary; a second call for the same token returns the same slot. Raises
        NoFreeBlocksError, and then changes nothing.
        """
        num_tokens, size = sequence.num_tokens, self.block_size
        self._allocate_up_to(sequence, num_tokens)
        position = num_tokens - 1
        return Slot(sequence.block_table[position // size], position % size)

    def slot_mapping(self, sequence: BlockSequence, start: int, end: int) -> list[int]:
        """Returns the flat slots of tokens start..end, all of which the table must cover."""
        require_count(start, "start")
        size, block_table = self.block_size, sequence.block_table
        if not start <= end <= len(block_table) * size:
            name = sequence_name(sequence)
            message = f"tokens {start}..{end} of {name} are not within {len(block_table)} blocks"
            raise InvalidRequestError(message, param="end")
        return [flat_slots(block_table[position // size], position % size, size) for position in range(start, end)]

    def mark_computed(self, sequence: BlockSequence, num_tokens: int) -> None:
        """Records that the K and V of the first `num_tokens` tokens are written, and caches the blocks now full."""
        table = self._tables.get(id(sequence)) or self._table_of(sequence)
        computed, covered, total = sequence.num_computed_tokens, table.covered_tokens, sequence.num_tokens
        if not (0 <= computed <= num_tokens <= covered and num_tokens <= total):
            name = sequence_name(sequence)
            counts = f"{computed} are, {covered} are covered, {total} exist"
            raise IntegrityError(f"{name}: {num_tokens} tokens cannot be computed; {counts}", request_ids=(name,))
        sequence.num_computed_tokens = num_tokens
        while (table.num_full_blocks + 1) * self.block_size <= num_tokens and self.enable_prefix_caching:
            # A block that duplicates a cached one stays uncached; the chain continues with the cached prefix.
            key = self._prefix_key(sequence, table.num_full_blocks, table.prefix)
            table.prefix = self.pool.find(key)
            if table.prefix is None:
                table.prefix = CachedPrefix(*key, sequence.block_table[table.num_full_blocks])
                self.pool.cache(table.prefix)
            table.num_full_blocks += 1

    def forget_prefixes(self, sequence: BlockSequence) -> None:
        """Makes the blocks that only this sequence uses unfindable, since their K and V are wrong."""
        for block_id in sequence.block_table:
            if self.pool.reference_counts[block_id] == 1:
                self.pool.forget(block_id)

    def free_sequence(self, sequence: BlockSequence) -> None:
        """Frees all blocks of the sequence, the last one first. A no-op if it has none.

        Raises IntegrityError if the block table is not what was allocated; with `validate`, on any broken invariant.
        """
        if sequence.block_table or id(sequence) in self._tables:
            check_table(self._table_of(sequence), self.block_size)
            if self.validate:
                self.check_integrity()
            try:
                self.free_blocks(reversed(sequence.block_table))
            except BlockNotInUseError as error:
                name = sequence_name(sequence)
                message = f"{name} frees a block that it does not own: {error.message}"
                raise IntegrityError(message, block_id=error.block_id, request_ids=(name,)) from error
            del self._tables[id(sequence)]
            sequence.block_table.clear()
        sequence.num_computed_tokens = 0

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. Returns False, and changes nothing, while a cached block is in use."""
        if len(self.pool.prefix_of_hash) > len(self.pool.evictable):
            return False
        self.pool.evict_all()
        return True

    def check_integrity(self) -> None:
        """Raises IntegrityError naming the first violation of an invariant. O(blocks)."""
        check_all(self.pool, self.block_size, self._tables.values(), self._unassigned)

    # ---- inside

    def _rejection(self, needed: int) -> RejectionReason | None:
        free = self.pool.num_free
        if needed > free:
            return RejectionReason.NO_FREE_BLOCKS
        others_run = free < self.num_blocks
        return RejectionReason.WATERMARK if others_run and free - needed < self.watermark_blocks else None

    def _allocate_up_to(self, sequence: BlockSequence, num_tokens: int, hits: tuple[int, ...] = ()) -> TableInUse:
        """Extends the table by `hits` and then by new blocks until it covers `num_tokens` tokens."""
        table = self._tables.get(id(sequence)) or self._table_of(sequence)
        block_table, size = sequence.block_table, self.block_size
        covered = table.covered_tokens
        if -(-covered // size) != len(block_table) or not 0 <= sequence.num_computed_tokens <= covered:
            check_table(table, size)  # raises
        needed = -(-num_tokens // size) - len(block_table)
        if needed > 0:
            self.pool.require_free(needed - sum(1 for hit in hits if self.pool.reference_counts[hit]))
            for block_id in hits:
                self.pool.reference(block_id)
            block_ids = self.allocate_blocks(needed - len(hits))
            self._unassigned.difference_update(block_ids)
            block_table += (*hits, *block_ids)
            self._tables[id(sequence)] = table
        if covered < num_tokens:
            table.covered_tokens = num_tokens
        return table

    def _table_of(self, sequence: BlockSequence) -> TableInUse:
        """Returns what is known of a sequence. A table filled by hand from `allocate_blocks` is in use from now on."""
        if known := self._tables.get(id(sequence)):
            return known
        block_table = sequence.block_table
        table = TableInUse(sequence, min(sequence.num_tokens, len(block_table) * self.block_size))
        if block_table:
            if foreign := set(block_table) - self._unassigned:
                name, block_id = sequence_name(sequence), min(foreign)
                message = f"{name} has block {block_id} in its table, which was not allocated to it"
                raise IntegrityError(message, block_id=block_id, request_ids=(name,))
            self._unassigned.difference_update(block_table)
            self._tables[id(sequence)] = table
        return table

    def _prefix_key(self, sequence: BlockSequence, index: int, parent: CachedPrefix | None) -> PrefixKey:
        """Returns what identifies the prefix that ends with logical block `index`; `parent` is the prefix before it.

        Hashes are memoized on the sequence, since tokens are only appended.
        """
        known: list[Hashable] = getattr(sequence, "block_hashes", [])
        salt = getattr(sequence, "cache_salt", None)
        while len(known) <= index:
            tokens = self._block_tokens(sequence, len(known))
            known.append(block_pool.hash_block(known[-1] if known else None, tokens, salt))
        return known[index], self._block_tokens(sequence, index), parent, salt

    def _block_tokens(self, sequence: BlockSequence, index: int) -> tuple[int, ...]:
        # A tuple, since Python's garbage collector does not traverse tuples of numbers.
        start, end = index * self.block_size, (index + 1) * self.block_size
        prompt, split = sequence.prompt_token_ids, len(sequence.prompt_token_ids)
        if end <= split:
            return tuple(prompt[start:end])
        return (*prompt[start:], *sequence.output_token_ids[max(0, start - split) : end - split])
