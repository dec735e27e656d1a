"""BlockPool: free queues, reference counts and prefix index of the physical blocks. Numbers only, no tensors.

A block is in exactly one of three places:

    free        reference count 0, no cached prefix    first in, first out
    evictable   reference count 0, cached prefix       least recently used first
    in use      reference count > 0, cached or not     in that many block tables

    take: free, then evictable -> in use       release: in use -> evictable if cached, else free
    reference: evictable -> in use (a hit)     cache: a block in use becomes findable     evict: it no longer is

Hash chains and the reuse of freed blocks follow vLLM's automatic prefix caching. Unlike there, a hit is also compared
token for token.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from minivllm.core.errors import BlockNotInUseError, IntegrityError, InvalidRequestError, NoFreeBlocksError

# Random key per process, so that clients cannot craft hash collisions.
_HASH_KEY = os.urandom(32)


def hash_block(parent_hash: Hashable, token_ids: tuple[int, ...], cache_salt: str | None) -> Hashable:
    """Returns the hash of a full block, chained over all tokens before it.

    Args:
        parent_hash: of the block before; None for the first block.
        token_ids: of this block.
        cache_salt: hashed into the first block only, and through the chain into all.
    """
    digest = hashlib.blake2b(key=_HASH_KEY, digest_size=16)
    if parent_hash is None:
        digest.update(b"root" if cache_salt is None else b"salt" + cache_salt.encode("utf-8", "surrogatepass") + b"\0")
    else:
        digest.update(parent_hash if isinstance(parent_hash, bytes) else repr(parent_hash).encode())
    digest.update(array("q", token_ids).tobytes())
    return digest.digest()


@dataclass(slots=True, eq=False)
class CachedPrefix:
    """The tokens of a full block and, through `parent`, all tokens before them.

    Never changed; not frozen, since a frozen dataclass takes three times as long to construct.
    """

    block_hash: Hashable
    token_ids: tuple[int, ...]
    parent: CachedPrefix | None
    cache_salt: str | None

    def has_tokens(self, token_ids: tuple[int, ...], parent: CachedPrefix | None, cache_salt: str | None) -> bool:
        """Compares the whole prefix. O(1) if the parents are one object, as they are unless one was evicted."""
        if self.token_ids != token_ids or self.cache_salt != cache_salt:
            return False
        mine, other = self.parent, parent
        while mine is not other:
            if mine is None or other is None or mine.token_ids != other.token_ids:
                return False
            mine, other = mine.parent, other.parent
        return True


class BlockPool:
    """Free queues, reference counts and prefix index of `num_blocks` blocks. Every operation is O(1) per block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.reference_counts = [0] * num_blocks
        self.prefixes: list[CachedPrefix | None] = [None] * num_blocks
        self.free: deque[int] = deque(range(num_blocks))
        # An OrderedDict and not a dict: popping the first entry of a dict repeatedly costs O(n).
        self.evictable: OrderedDict[int, None] = OrderedDict()
        self.block_of_hash: dict[Hashable, int] = {}

    @property
    def num_free(self) -> int:
        return len(self.free) + len(self.evictable)

    def take(self, count: int) -> list[int]:
        """Takes `count` blocks with reference count 1. Raises NoFreeBlocksError, and then takes none."""
        if count > self.num_free:
            raise NoFreeBlocksError(f"{count} blocks needed, {self.num_free} of {self.num_blocks} free")
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> int:
        if self.free:
            block_id = self.free.popleft()
        else:
            block_id, _ = self.evictable.popitem(last=False)
            self._evict(block_id)
        if self.reference_counts[block_id]:
            raise IntegrityError(f"block {block_id} is free and in use at the same time", block_id=block_id)
        self.reference_counts[block_id] = 1
        return block_id

    def reference(self, block_id: int) -> None:
        """Adds a reference to a cached block."""
        if self.reference_counts[block_id] == 0:
            del self.evictable[block_id]
        self.reference_counts[block_id] += 1

    def release(self, block_id: int) -> None:
        """Drops a reference; the last one appends the block to its free queue."""
        self.reference_counts[block_id] -= 1
        if self.reference_counts[block_id] == 0:
            if self.prefixes[block_id] is None:
                self.free.append(block_id)
            else:
                self.evictable[block_id] = None

    def check_in_use(self, block_ids: Iterable[int]) -> None:
        """Raises BlockNotInUseError on an unknown id, a free block or a repeated block."""
        seen: set[int] = set()
        for block_id in block_ids:
            if type(block_id) is not int or not 0 <= block_id < self.num_blocks:
                raise BlockNotInUseError(
                    f"there is no block {block_id!r}; ids go from 0 to {self.num_blocks - 1}", block_id=block_id
                )
            if self.reference_counts[block_id] == 0:
                raise BlockNotInUseError(f"block {block_id} is not in use (a double free?)", block_id=block_id)
            if block_id in seen:
                raise BlockNotInUseError(f"block {block_id} is repeated in one call", block_id=block_id)
            seen.add(block_id)

    def find(
        self, block_hash: Hashable, token_ids: tuple[int, ...], parent: CachedPrefix | None, cache_salt: str | None
    ) -> int | None:
        """Returns the block that caches exactly this prefix. The hash proposes it, the tokens decide."""
        block_id = self.block_of_hash.get(block_hash)
        if block_id is None:
            return None
        prefix = self.prefixes[block_id]
        return block_id if prefix is not None and prefix.has_tokens(token_ids, parent, cache_salt) else None

    def cache(self, block_id: int, prefix: CachedPrefix) -> None:
        """Makes a block in use findable, unless another prefix of the same hash is cached already."""
        if prefix.block_hash not in self.block_of_hash:
            self.block_of_hash[prefix.block_hash] = block_id
            self.prefixes[block_id] = prefix

    def evict_all(self) -> None:
        """Moves all evictable blocks to the free queue, in their order."""
        while self.evictable:
            block_id, _ = self.evictable.popitem(last=False)
            self._evict(block_id)
            self.free.append(block_id)

    def _evict(self, block_id: int) -> None:
        prefix = self.prefixes[block_id]
        if prefix is None or self.block_of_hash.pop(prefix.block_hash, None) != block_id:
            raise IntegrityError(f"block {block_id} is evictable, but not in the prefix index", block_id=block_id)
        self.prefixes[block_id] = None


def require_count(value: int, name: str, *, at_least: int = 0) -> None:
    """Raises InvalidRequestError naming the argument unless it is an int of at least `at_least`."""
    if type(value) is not int or value < at_least:
        raise InvalidRequestError(f"{name} must be an integer of at least {at_least}, not {value!r}", param=name)
