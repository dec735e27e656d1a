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
from typing import TypeAlias

from minivllm.core.errors import BlockNotInUseError, IntegrityError, InvalidRequestError, NoFreeBlocksError

# Random key per process, so that clients cannot craft hash collisions.
_HASH_KEY = os.urandom(32)


def hash_block(parent_hash: Hashable, token_ids: tuple[int, ...], cache_salt: str | None) -> Hashable:
    """Returns the hash of a full block, chained over all tokens before it.

    `parent_hash` is None for the first block; `cache_salt` is hashed into that one only, and so chained into all.
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
    block_id: int


PrefixKey: TypeAlias = tuple[Hashable, tuple[int, ...], CachedPrefix | None, str | None]
"""All of a CachedPrefix but the block."""


class BlockPool:
    """Free queues, reference counts and prefix index of `num_blocks` blocks. Every operation is O(1) per block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.reference_counts = [0] * num_blocks
        self.prefixes: list[CachedPrefix | None] = [None] * num_blocks
        self.free: deque[int] = deque(range(num_blocks))
        # An OrderedDict and not a dict: popping the first entry of a dict repeatedly costs O(n).
        self.evictable: OrderedDict[int, None] = OrderedDict()
        self.prefix_of_hash: dict[Hashable, CachedPrefix] = {}

    @property
    def num_free(self) -> int:
        return len(self.free) + len(self.evictable)

    def require_free(self, count: int) -> None:
        """Raises NoFreeBlocksError unless `count` blocks can be taken."""
        if count > self.num_free:
            raise NoFreeBlocksError(f"{count} blocks needed, {self.num_free} of {self.num_blocks} free")

    def take(self, count: int) -> list[int]:
        """Takes `count` blocks with reference count 1. Raises NoFreeBlocksError, and then takes none."""
        self.require_free(count)
        block_ids = []
        for _ in range(count):
            block_id = self.free.popleft() if self.free else self._evict()
            if self.reference_counts[block_id]:
                raise IntegrityError(f"block {block_id} is free and in use at the same time", block_id=block_id)
            self.reference_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

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
                problem = f"there is no block {block_id!r}; ids go from 0 to {self.num_blocks - 1}"
            elif self.reference_counts[block_id] == 0:
                problem = f"block {block_id} is not in use (a double free?)"
            elif block_id in seen:
                problem = f"block {block_id} is repeated in one call"
            else:
                seen.add(block_id)
                continue
            raise BlockNotInUseError(problem, block_id=block_id)

    def find(self, key: PrefixKey) -> CachedPrefix | None:
        """Returns the cached prefix of exactly these tokens. The hash proposes it, the tokens decide.

        O(1) if the parents are one object, as they are unless one was evicted.
        """
        block_hash, token_ids, parent, cache_salt = key
        prefix = self.prefix_of_hash.get(block_hash)
        if prefix is None or prefix.token_ids != token_ids or prefix.cache_salt != cache_salt:
            return None
        mine = prefix.parent
        while mine is not parent:
            if mine is None or parent is None or mine.token_ids != parent.token_ids:
                return None
            mine, parent = mine.parent, parent.parent
        return prefix

    def cache(self, prefix: CachedPrefix) -> None:
        """Makes a block in use findable, unless another prefix of the same hash is cached already."""
        if self.prefix_of_hash.setdefault(prefix.block_hash, prefix) is prefix:
            self.prefixes[prefix.block_id] = prefix

    def forget(self, block_id: int) -> None:
        """Removes the prefix of a block in use from the index."""
        prefix = self.prefixes[block_id]
        if prefix is not None:
            del self.prefix_of_hash[prefix.block_hash]
            self.prefixes[block_id] = None

    def evict_all(self) -> None:
        """Moves all evictable blocks to the free queue, in their order."""
        while self.evictable:
            self.free.append(self._evict())

    def _evict(self) -> int:
        """Removes the least recently used evictable block, and its prefix from the index."""
        block_id, _ = self.evictable.popitem(last=False)
        prefix = self.prefixes[block_id]
        if prefix is None or self.prefix_of_hash.pop(prefix.block_hash, None) is not prefix:
            raise IntegrityError(f"block {block_id} is evictable, but not in the prefix index", block_id=block_id)
        self.prefixes[block_id] = None
        return block_id


def require_count(value: int, name: str, *, at_least: int = 0) -> None:
    """Raises InvalidRequestError naming the argument unless it is an int of at least `at_least`."""
    if type(value) is not int or value < at_least:
        raise InvalidRequestError(f"{name} must be an integer of at least {at_least}, not {value!r}", param=name)
