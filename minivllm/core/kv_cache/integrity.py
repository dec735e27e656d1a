"""Checks all invariants of the block manager at once, recounting everything from the block tables in use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from minivllm.core.errors import IntegrityError
from minivllm.core.kv_cache.block_pool import BlockPool, CachedPrefix


class BlockSequence(Protocol):
    """What the manager needs of a sequence; optional: `seq_id`, `cache_salt`, `skip_prefix_lookup`, `block_hashes`."""

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    num_tokens: int
    num_computed_tokens: int
    block_table: list[int]


@dataclass(slots=True)
class TableInUse:
    """What the block manager knows of a sequence with blocks.

    `covered_tokens` is what the table was last extended to. `prefix` describes the first `num_full_blocks` blocks.
    """

    sequence: BlockSequence
    covered_tokens: int = 0
    num_full_blocks: int = 0
    prefix: CachedPrefix | None = None


def sequence_name(sequence: BlockSequence) -> str:
    """Returns the id of the sample, or of the request if the sequence has no `seq_id`."""
    return str(getattr(sequence, "seq_id", sequence.request_id))


def check_table(table: TableInUse, block_size: int) -> None:
    """Raises IntegrityError unless the block table is as long as it was allocated and covers the computed tokens."""
    sequence, covered = table.sequence, table.covered_tokens
    expected = -(-covered // block_size)
    if len(sequence.block_table) != expected or not 0 <= sequence.num_computed_tokens <= covered:
        name, block_table = sequence_name(sequence), sequence.block_table
        found = f"{sequence.num_computed_tokens} computed tokens and {len(block_table)} blocks {block_table}"
        message = f"{name} has {found}, but {expected} blocks were allocated for {covered} tokens"
        _fail(message, block_table[-1] if block_table else None, (name,))


def check_all(pool: BlockPool, block_size: int, tables: Collection[TableInUse], unassigned: set[int]) -> None:
    """Raises IntegrityError naming the first violation. O(blocks).

    `tables` are those in use; `unassigned` are the blocks from `allocate_blocks` that are in none of these.
    """
    users: dict[int, list[str]] = {}
    for table in tables:
        name = sequence_name(table.sequence)
        _check_block_ids(pool, name, table.sequence.block_table)
        check_table(table, block_size)
        for block_id in table.sequence.block_table:
            users.setdefault(block_id, []).append(name)
    _check_places(pool, users)
    # Blocks in use first: their errors name the sequences concerned.
    for block_id in (*users, *range(pool.num_blocks)):
        _check_references(pool, block_id, tuple(users.get(block_id, ())), block_id in unassigned)
    _check_index(pool)


def _check_block_ids(pool: BlockPool, name: str, block_table: list[int]) -> None:
    for block_id, count in Counter(block_table).items():
        if type(block_id) is not int or not 0 <= block_id < pool.num_blocks:
            _fail(f"the table of {name} contains block {block_id!r}, which does not exist", block_id, (name,))
        if count > 1:
            _fail(f"the table of {name} contains block {block_id} {count} times: {block_table}", block_id, (name,))


def _check_places(pool: BlockPool, users: Mapping[int, list[str]]) -> None:
    """Every block is in exactly one place: free, evictable or in use."""
    places = Counter(pool.free)
    places.update(list(pool.evictable))
    places.update(block_id for block_id, count in enumerate(pool.reference_counts) if count)
    for block_id in range(pool.num_blocks):
        if places[block_id] != 1:
            names = tuple(users.get(block_id, ()))
            where = "lost" if not places[block_id] else "in more than one place of free, evictable and in use"
            _fail(f"block {block_id} (in the tables of {list(names)}) is {where}", block_id, names)
    if len(places) != pool.num_blocks:
        _fail(f"the pool of {pool.num_blocks} blocks contains unknown blocks: {sorted(places)[-3:]}", None, ())


def _check_references(pool: BlockPool, block_id: int, users: tuple[str, ...], is_unassigned: bool) -> None:
    count = pool.reference_counts[block_id]
    if count != len(users) + is_unassigned:
        also = " and allocated without a sequence" if is_unassigned else ""
        message = f"block {block_id} has reference count {count}, but is in the tables of {list(users)}{also}"
        _fail(message, block_id, users)
    if count > 1 and pool.prefixes[block_id] is None:
        _fail(f"block {block_id} is shared by {list(users)}, but not cached", block_id, users)


def _check_index(pool: BlockPool) -> None:
    """The prefix index and the prefixes of the blocks refer to each other."""
    for block_id, prefix in enumerate(pool.prefixes):
        if prefix is None and block_id in pool.evictable:
            _fail(f"block {block_id} is evictable, but not cached", block_id, ())
        if prefix is not None and (pool.prefix_of_hash.get(prefix.block_hash), prefix.block_id) != (prefix, block_id):
            _fail(f"block {block_id} is cached, but not in the prefix index", block_id, ())
    num_indexed, num_cached = len(pool.prefix_of_hash), pool.num_blocks - pool.prefixes.count(None)
    if num_indexed != num_cached:
        _fail(f"the prefix index has {num_indexed} blocks, {num_cached} are cached", None, ())


def _fail(message: str, block_id: int | None, request_ids: tuple[str, ...]) -> None:
    raise IntegrityError(message, block_id=block_id, request_ids=request_ids)
