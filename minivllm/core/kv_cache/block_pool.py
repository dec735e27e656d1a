"""BlockPool: which physical blocks are free, how many hold each, and which cached prefix each one carries.

No tensors here, only numbers. A block is in exactly one of three places:

    free        nobody holds it, no cached content      first in, first out
    evictable   nobody holds it, content kept           least recently used first
    held        reference count > 0, content or not     in the tables of its holders

    take: free, then evictable -> held      release: held -> evictable if it has content, else free
    hold: evictable -> held (a hit)         publish: a held block gets content      evict: content dropped

Keeping the content of released blocks and giving hits by a hash chain follow vLLM's automatic prefix caching; that a
hit must also be the same content object chain, token for token, is ours.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from minivllm.core.errors import BlockNotInUseError, InvalidRequestError, NoFreeBlocksError

# Keyed anew in every process, so that nobody outside can construct two prompts of one hash.
_HASH_KEY = os.urandom(32)


def hash_block(parent_hash: Hashable, token_ids: tuple[int, ...], cache_salt: str | None) -> Hashable:
    """The hash of a full block, chained: it stands for the block's tokens and all tokens before them.

    Args:
        parent_hash: of the block before; None for the first.
        token_ids: of this block.
        cache_salt: goes into the first block only, and through the chain into all.
    """
    digest = hashlib.blake2b(key=_HASH_KEY, digest_size=16)
    if parent_hash is None:
        digest.update(b"root" if cache_salt is None else b"salt" + cache_salt.encode("utf-8", "surrogatepass") + b"\0")
    else:
        digest.update(parent_hash if isinstance(parent_hash, bytes) else repr(parent_hash).encode())
    digest.update(array("q", token_ids).tobytes())
    return digest.digest()


@dataclass(slots=True, eq=False)
class CachedContent:
    """What a published block holds. Two contents are one prefix only if their chains are the same objects."""

    block_hash: Hashable
    token_ids: tuple[int, ...]
    parent: CachedContent | None
    cache_salt: str | None

    def is_prefix(self, token_ids: tuple[int, ...], parent: CachedContent | None, cache_salt: str | None) -> bool:
        return self.parent is parent and self.token_ids == token_ids and self.cache_salt == cache_salt


class BlockPool:
    """Free list, reference counts and hash index of `num_blocks` blocks. Every operation is O(1) per block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.reference_counts = [0] * num_blocks
        self.contents: list[CachedContent | None] = [None] * num_blocks
        self.free: deque[int] = deque(range(num_blocks))
        # An OrderedDict and not a dict: popping the first of a dict again and again costs O(n).
        self.evictable: OrderedDict[int, None] = OrderedDict()
        self.block_of_hash: dict[Hashable, int] = {}
        self.num_evictions = 0

    @property
    def num_free(self) -> int:
        return len(self.free) + len(self.evictable)

    def take(self, count: int) -> list[int]:
        """`count` blocks, each held once. All or nothing: NoFreeBlocksError changes nothing."""
        if count > self.num_free:
            raise NoFreeBlocksError(f"{count} blocks asked for, {self.num_free} of {self.num_blocks} free")
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> int:
        if self.free:
            block_id = self.free.popleft()
        else:
            block_id, _ = self.evictable.popitem(last=False)
            self._forget_content(block_id)
            self.num_evictions += 1
        self.reference_counts[block_id] = 1
        return block_id

    def hold(self, block_id: int) -> None:
        """One more holder of a published block, which may have been evictable until now."""
        if self.reference_counts[block_id] == 0:
            del self.evictable[block_id]
        self.reference_counts[block_id] += 1

    def release(self, block_id: int) -> None:
        """One holder less; the last one leaves the block at the tail of its queue."""
        self.reference_counts[block_id] -= 1
        if self.reference_counts[block_id] == 0:
            if self.contents[block_id] is None:
                self.free.append(block_id)
            else:
                self.evictable[block_id] = None

    def check_in_use(self, block_ids: Iterable[int]) -> None:
        """Raises BlockNotInUseError on an unknown id, a free block, or a block that stands twice."""
        seen: set[int] = set()
        for block_id in block_ids:
            if type(block_id) is not int or not 0 <= block_id < self.num_blocks:
                raise BlockNotInUseError(f"there is no block {block_id!r}; ids go from 0 to {self.num_blocks - 1}")
            if self.reference_counts[block_id] == 0:
                raise BlockNotInUseError(f"block {block_id} is not in use (a double free?)", block_id=block_id)
            if block_id in seen:
                raise BlockNotInUseError(f"block {block_id} stands twice in one call", block_id=block_id)
            seen.add(block_id)

    def find(
        self, block_hash: Hashable, token_ids: tuple[int, ...], parent: CachedContent | None, cache_salt: str | None
    ) -> int | None:
        """The block that carries exactly this prefix. The hash only proposes it; the tokens decide."""
        block_id = self.block_of_hash.get(block_hash)
        if block_id is None:
            return None
        content = self.contents[block_id]
        if content is None or not content.is_prefix(token_ids, parent, cache_salt):
            return None
        return block_id

    def publish(self, block_id: int, content: CachedContent) -> bool:
        """Makes a held block findable. False if other content has the same hash: then the block stays private."""
        if content.block_hash in self.block_of_hash:
            return False
        self.block_of_hash[content.block_hash] = block_id
        self.contents[block_id] = content
        return True

    def drop_evictable(self) -> None:
        """Forgets the content of all blocks that nobody holds; they join the free queue in their order."""
        while self.evictable:
            block_id, _ = self.evictable.popitem(last=False)
            self._forget_content(block_id)
            self.free.append(block_id)

    def rebuild(self, reference_counts: dict[int, int]) -> None:
        """Starts over from what is really held, after a violation. Content survives only in held blocks."""
        held_contents = {block_id: self.contents[block_id] for block_id in reference_counts}
        self.reference_counts = [reference_counts.get(block_id, 0) for block_id in range(self.num_blocks)]
        self.contents = [held_contents.get(block_id) for block_id in range(self.num_blocks)]
        self.free = deque(block_id for block_id in range(self.num_blocks) if block_id not in reference_counts)
        self.evictable = OrderedDict()
        self.block_of_hash = {
            content.block_hash: block_id for block_id, content in held_contents.items() if content is not None
        }

    def _forget_content(self, block_id: int) -> None:
        content = self.contents[block_id]
        if content is None:
            raise InvalidRequestError(f"block {block_id} has no cached content", param="block_id")
        del self.block_of_hash[content.block_hash]
        self.contents[block_id] = None


def require_count(value: int, name: str, *, at_least: int = 0) -> None:
    """Raises InvalidRequestError naming the argument unless it is an int of at least `at_least`."""
    if type(value) is not int or value < at_least:
        raise InvalidRequestError(f"{name} must be a whole number of at least {at_least}, not {value!r}", param=name)
