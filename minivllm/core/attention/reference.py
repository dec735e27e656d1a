"""Paged attention in plain torch on any device: the reference for the other backends.

A step is split into tiles, runs of queries of one sequence. Tiles with the same number of queries form groups. The K
and V of a group are gathered through the block tables, padded to the longest context, and attended to under a mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn import functional

from minivllm.core.attention.base import AttentionBackend, AttentionLayer
from minivllm.core.attention.metadata import AttentionMetadata

MAX_TILE_QUERIES = 128
"""Queries per tile. Fewer waste less work on masked scores, more make larger products."""

MAX_GROUP_SCORES = 2**22
MAX_GROUP_KEYS = 2**16
"""Scores per head and keys of a group with more than one tile; they bound the memory of a layer."""


class Tile(NamedTuple):
    """`num_queries` rows of one sequence, from `first_row` on; the last one is at the end of `context_len` tokens.

    It attends to `num_blocks` blocks of the block table, from `first_block` on.
    """

    num_queries: int
    num_blocks: int
    sequence: int
    first_row: int
    context_len: int
    first_block: int


@dataclass(frozen=True, slots=True)
class Group:
    """G tiles of Q queries each, padded to K keys. All tensors are on the device of the pool.

    Attributes:
        rows: (G, Q) packed rows of the queries.
        blocks: (G, N) physical blocks of the keys; K = N * block_size.
        hidden: (G, K) True for keys beyond the context, whose slots may be unwritten.
        allowed: (G, Q, K) True where the query attends to the key.
    """

    rows: torch.Tensor
    blocks: torch.Tensor
    hidden: torch.Tensor
    allowed: torch.Tensor


class ReferenceBackend(AttentionBackend):
    """Computes scores and softmax in at least float32."""

    name = "reference"

    def forward(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        layer = self.layers[layer_index]
        key_cache = metadata.kv_cache.key_cache[layer_index]
        value_cache = metadata.kv_cache.value_cache[layer_index]
        block_size = metadata.kv_cache.block_size
        blocks, offsets = metadata.slot_mapping // block_size, metadata.slot_mapping % block_size
        key_cache[blocks, :, offsets] = key
        value_cache[blocks, :, offsets] = value
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in metadata.plan(plan, layer.sliding_window):
            queries = query[group.rows].transpose(1, 2)
            keys, values = gather(key_cache, group), gather(value_cache, group)
            attended = self.attend(queries, keys, values, group.allowed.unsqueeze(1), layer)
            output[group.rows] = attended.transpose(1, 2)
        return output

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor, layer: AttentionLayer
    ) -> torch.Tensor:
        """Computes attention within a group.

        Args:
            query: (G, num_query_heads, Q, head_size).
            key, value: (G, num_kv_heads, K, head_size), finite everywhere.
            allowed: (G, 1, Q, K); every query attends to at least one key.

        Returns:
            The shape and dtype of `query`.
        """
        group_size, num_query_heads, num_queries, head_size = query.shape
        num_kv_heads = key.shape[1]
        wide = torch.promote_types(query.dtype, torch.float32)
        # Query heads that share a KV head are adjacent: (G, num_kv_heads, heads per KV head * Q, head_size).
        shared = query.to(wide).reshape(group_size, num_kv_heads, -1, head_size)
        scores = torch.matmul(shared, key.to(wide).transpose(2, 3)) * layer.scale
        if layer.softcap is not None:
            scores = torch.tanh(scores / layer.softcap) * layer.softcap
        scores = scores.view(group_size, num_query_heads, num_queries, -1).masked_fill(~allowed, -torch.inf)
        weights = torch.softmax(scores, dim=-1).view(group_size, num_kv_heads, shared.shape[2], -1)
        return torch.matmul(weights, value.to(wide)).view(query.shape).to(query.dtype)


class SdpaBackend(ReferenceBackend):
    """Uses torch's fused attention within a group, which keeps no scores in memory, on CPU and CUDA."""

    name = "sdpa"

    @classmethod
    def why_not(cls, layers: tuple[AttentionLayer, ...], dtype: torch.dtype, device: torch.device) -> str | None:
        if any(layer.softcap is not None for layer in layers):
            return "torch's fused attention cannot cap its scores"
        return None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor, layer: AttentionLayer
    ) -> torch.Tensor:
        heads_per_key = query.shape[1] // key.shape[1]
        if heads_per_key > 1:
            key, value = (states.repeat_interleave(heads_per_key, dim=1) for states in (key, value))
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=layer.scale)


def gather(cache: torch.Tensor, group: Group) -> torch.Tensor:
    """Returns K or V of a group, (G, num_kv_heads, K, head_size). Keys beyond a context are zeroed, since NaN in an
    unwritten slot would survive a weight of zero."""
    _, num_kv_heads, _, head_size = cache.shape
    blocks = cache[group.blocks].transpose(1, 2)
    states = blocks.reshape(group.blocks.shape[0], num_kv_heads, -1, head_size)
    return states.masked_fill_(group.hidden[:, None, :, None], 0)


def plan(metadata: AttentionMetadata, sliding_window: int | None) -> list[Group]:
    """Returns the groups of a step; layers of the same window share them."""
    stacks = stack(tiles(metadata, sliding_window), metadata.kv_cache.block_size)
    return [make_group(stacked, metadata, sliding_window) for stacked in stacks]


def tiles(metadata: AttentionMetadata, sliding_window: int | None) -> Iterator[Tile]:
    """Splits the queries of each sequence into tiles."""
    block_size = metadata.kv_cache.block_size
    for sequence, (start, end) in enumerate(pairwise(metadata.query_start_loc.tolist())):
        first_position = int(metadata.seq_lens[sequence]) - (end - start)
        for first_row in range(start, end, MAX_TILE_QUERIES):
            num_queries = min(MAX_TILE_QUERIES, end - first_row)
            position = first_position + first_row - start
            context_len = position + num_queries
            first_block = 0 if sliding_window is None else max(0, position - sliding_window + 1) // block_size
            num_blocks = -(-context_len // block_size) - first_block
            yield Tile(num_queries, num_blocks, sequence, first_row, context_len, first_block)


def stack(all_tiles: Iterable[Tile], block_size: int) -> Iterator[list[Tile]]:
    """Groups tiles with the same number of queries and similar numbers of blocks, the most first, within the limits."""
    current: list[Tile] = []
    for tile in sorted(all_tiles, reverse=True):
        if current:
            longest = current[0].num_blocks
            keys = (len(current) + 1) * longest * block_size
            alike = tile.num_queries == current[0].num_queries and 2 * tile.num_blocks >= longest
            if not alike or keys > MAX_GROUP_KEYS or keys * tile.num_queries > MAX_GROUP_SCORES:
                yield current
                current = []
        current.append(tile)
    if current:
        yield current


def make_group(stacked: list[Tile], metadata: AttentionMetadata, sliding_window: int | None) -> Group:
    """Builds the tensors of tiles with the same number of queries, the one with the most blocks first."""
    device, block_size = metadata.kv_cache.device, metadata.kv_cache.block_size
    num_queries, num_blocks = stacked[0].num_queries, stacked[0].num_blocks
    columns = torch.tensor(stacked, dtype=torch.int64, device=device).T.unsqueeze(2)
    _, _, sequences, first_rows, context_lens, first_blocks = columns
    # With a window, tiles begin at different blocks, and shorter ones are padded beyond the table: stay inside it.
    last_column = metadata.block_tables.shape[1] - 1
    logical = (first_blocks + torch.arange(num_blocks, device=device)).clamp(max=last_column)
    keys = first_blocks * block_size + torch.arange(num_blocks * block_size, device=device)
    positions = (context_lens + torch.arange(-num_queries, 0, device=device)).unsqueeze(2)
    allowed = keys.unsqueeze(1) <= positions
    if sliding_window is not None:
        allowed &= keys.unsqueeze(1) > positions - sliding_window
    rows = first_rows + torch.arange(num_queries, device=device)
    return Group(rows, metadata.block_tables[sequences, logical].long(), keys >= context_lens, allowed)
