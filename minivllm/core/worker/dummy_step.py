"""dummy_step: a step without requests, for memory profiling, the self-check and warm-up."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from minivllm.core.attention.kv_pool import KVCachePool
from minivllm.core.attention.metadata import ModelInput, to_device
from minivllm.core.models.backbone import Backbone


@torch.inference_mode()
def dummy_step(
    backbone: Backbone,
    kv_cache: KVCachePool,
    query_lens: SequenceOf[int],
    seq_lens: SequenceOf[int],
    *,
    token_ids: SequenceOf[int] | None = None,
    max_seq_len: int | None = None,
) -> torch.Tensor:
    """Computes the last `query_lens[i]` of the `seq_lens[i]` tokens of each sequence i.

    Sequence i uses the i-th run of blocks of the pool. The runs wrap around at the end of a small pool, where sequences
    overwrite each other's K and V.

    Args:
        token_ids: the query tokens of all sequences; zeros by default.
        max_seq_len: the run of a sequence has blocks for this many tokens, by default the largest of `seq_lens`. Steps
            of the same `max_seq_len` continue each other's sequences.

    Returns:
        (S, vocab_size) logits of the last token of each sequence.
    """
    ends = np.array(seq_lens, dtype=np.int64)
    starts = ends - np.array(query_lens, dtype=np.int64)
    blocks_per_sequence = -(-(max_seq_len or max(seq_lens)) // kv_cache.block_size)
    blocks = np.arange(len(ends) * blocks_per_sequence, dtype=np.int32) % kv_cache.num_blocks
    tables = blocks.reshape(len(ends), blocks_per_sequence)
    model_input = ModelInput.build(token_ids or [0] * sum(query_lens), starts, ends, tables, kv_cache)
    hidden_states = backbone.hidden_states(model_input)
    return backbone.logits(hidden_states[to_device(model_input.last_rows, kv_cache.device)])
