"""Checks of the block ledger: the owner table of validation mode, and the audit of all invariants at once.

Both keep their own view and compare, so that a fault in the ledger cannot hide itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from minivllm.core.errors import IntegrityError
from minivllm.core.kv_cache.block_pool import BlockPool

if TYPE_CHECKING:
    from minivllm.core.kv_cache.block_manager import Holding

Owner = str | None  # None owns the blocks that were allocated without a sequence


class OwnerTable:
    """block -> its owners. `taken` wants no owner there, a release wants exactly this owner there."""

    def __init__(self) -> None:
        self._owners: dict[int, set[Owner]] = {}

    def owners_of(self, block_id: int) -> set[Owner]:
        return self._owners.get(block_id, set())

    def taken(self, block_ids: Iterable[int], owner: Owner) -> None:
        for block_id in block_ids:
            if self._owners.get(block_id):
                raise IntegrityError(
                    f"block {block_id} was handed to {_name(owner)} while {_names(self._owners[block_id])} own it",
                    block_id=block_id,
                    request_ids=_requests({owner} | self._owners[block_id]),
                )
            self._owners[block_id] = {owner}

    def shared(self, block_ids: Iterable[int], owner: Owner) -> None:
        for block_id in block_ids:
            self._owners.setdefault(block_id, set()).add(owner)

    def adopted(self, block_ids: Iterable[int], owner: Owner) -> None:
        for block_id in block_ids:
            self._owners[block_id] = {owner}

    def check_released(self, block_ids: Iterable[int], owner: Owner, raw: Collection[int] = ()) -> None:
        """Every block must be this owner's. A sequence may also hold blocks of `raw`, put in its table by hand."""
        for block_id in block_ids:
            owners = self.owners_of(block_id)
            if owner not in owners and not (block_id in raw and owners == {None}):
                raise IntegrityError(
                    f"{_name(owner)} gives back block {block_id}, which belongs to {_names(owners)}",
                    block_id=block_id,
                    request_ids=_requests({owner}),
                )

    def released(self, block_ids: Iterable[int], owner: Owner) -> None:
        for block_id in block_ids:
            owners = self._owners.get(block_id, set())
            owners.discard(owner if owner in owners else None)
            if not owners:
                self._owners.pop(block_id, None)

    def rebuild(self, holdings: Mapping[str, Holding], raw_blocks: Iterable[int]) -> None:
        self._owners = {block_id: {None} for block_id in raw_blocks}
        for request_id, holding in holdings.items():
            self.shared(holding.sequence.block_table, request_id)


def audit(
    pool: BlockPool,
    block_size: int,
    holdings: Mapping[str, Holding],
    raw_blocks: Collection[int],
    owner_table: OwnerTable | None,
) -> None:
    """Raises IntegrityError naming the first violation. The holders' tables are the truth to compare with."""
    holders: dict[int, list[str]] = {}
    for request_id, holding in holdings.items():
        _audit_table(pool, block_size, holding)
        for block_id in holding.sequence.block_table:
            holders.setdefault(block_id, []).append(request_id)
    _audit_places(pool, holders)
    # Held blocks first: a block in too many tables names the requests concerned, the one it displaced names nobody.
    for block_id in (*holders, *range(pool.num_blocks)):
        _audit_block(pool, block_id, tuple(holders.get(block_id, ())), block_id in raw_blocks, owner_table)
    _audit_contents(pool)


def _audit_table(pool: BlockPool, block_size: int, holding: Holding) -> None:
    sequence, covered = holding.sequence, holding.covered_tokens
    name, table = sequence.request_id, sequence.block_table
    for block_id in table:
        if not isinstance(block_id, int) or not 0 <= block_id < pool.num_blocks:
            _fail(f"the table of {name} names block {block_id!r}, which does not exist", block_id, (name,))
    twice = [block_id for block_id, count in Counter(table).items() if count > 1]
    if twice:
        _fail(f"the table of {name} names block {twice[0]} twice: {table}", twice[0], (name,))
    expected = -(-covered // block_size)
    if len(table) != expected:
        last = table[-1] if table else None
        _fail(f"the table of {name} has {len(table)} blocks, {covered} tokens need {expected}", last, (name,))
    if not 0 <= sequence.num_computed_tokens <= covered:
        _fail(f"{name} counts {sequence.num_computed_tokens} cached tokens, {covered} are covered", None, (name,))


def _audit_places(pool: BlockPool, holders: Mapping[int, list[str]]) -> None:
    """Every block is in exactly one of: free queue, evictable, held."""
    places = Counter(pool.free)
    places.update(list(pool.evictable))
    places.update(block_id for block_id, count in enumerate(pool.reference_counts) if count)
    for block_id in range(pool.num_blocks):
        if places[block_id] != 1:
            names = tuple(holders.get(block_id, ()))
            how = "nowhere: it is lost" if not places[block_id] else "in more than one place of free, cached and held"
            _fail(f"block {block_id} (in the tables of {list(names)}) is {how}", block_id, names)
    if len(places) != pool.num_blocks:
        _fail(f"the pool of {pool.num_blocks} blocks names others: {sorted(places)[-3:]}", None, ())


def _audit_block(
    pool: BlockPool, block_id: int, holders: tuple[str, ...], is_raw: bool, owner_table: OwnerTable | None
) -> None:
    count = pool.reference_counts[block_id]
    if count != len(holders) + is_raw:
        _fail(
            f"block {block_id} has reference count {count}, but is in the tables of {list(holders)}"
            + (" and allocated raw" if is_raw else ""),
            block_id,
            holders,
        )
    if count > 1 and pool.contents[block_id] is None:
        _fail(f"block {block_id} is shared by {list(holders)} without being full and hashed", block_id, holders)
    if owner_table is not None:
        expected: set[Owner] = set(holders) | ({None} if is_raw else set())
        if owner_table.owners_of(block_id) != expected:
            owners = _names(owner_table.owners_of(block_id))
            _fail(f"block {block_id} belongs to {owners}, but is in the tables of {list(holders)}", block_id, holders)


def _audit_contents(pool: BlockPool) -> None:
    """The index and the contents name each other, and no cached block has lost the block before it."""
    live = {id(content) for content in pool.contents if content is not None}
    for block_id, content in enumerate(pool.contents):
        if content is None:
            if block_id in pool.evictable:
                _fail(f"block {block_id} waits for eviction without cached content", block_id, ())
            continue
        if pool.block_of_hash.get(content.block_hash) != block_id:
            _fail(f"block {block_id} holds a cached prefix that the index does not know", block_id, ())
        if content.parent is not None and id(content.parent) not in live:
            _fail(f"block {block_id} is cached, but the block before it was evicted first", block_id, ())
    if len(pool.block_of_hash) != len(live):
        _fail(f"the index knows {len(pool.block_of_hash)} cached blocks, {len(live)} exist", None, ())


def _fail(message: str, block_id: int | None, request_ids: tuple[str, ...]) -> None:
    raise IntegrityError(message, block_id=block_id, request_ids=request_ids)


def _name(owner: Owner) -> str:
    return "an allocation without a sequence" if owner is None else f"sequence {owner}"


def _names(owners: Iterable[Owner]) -> str:
    return ", ".join(sorted(map(_name, owners))) or "nobody"


def _requests(owners: Iterable[Owner]) -> tuple[str, ...]:
    return tuple(sorted(owner for owner in owners if owner is not None))
