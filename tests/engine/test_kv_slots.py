"""The K of a token in the pool, found through the block manager, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minivllm.core.config import EngineConfig
from minivllm.core.engine import LLMEngine
from minivllm.core.errors import EngineDeadError
from tests.engine.running import greedy, shuffle_free_blocks
from tests.engine.tiny_models import TINY, VOCAB_SIZE, reference_model, save_tiny

BLOCK_SIZE = 4
PROMPT = [(7 * position + 3) % VOCAB_SIZE for position in range(30)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(TINY["llama"](), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def engine(folder: Path) -> LLMEngine:
    """An engine that has computed `PROMPT` and will decode it."""
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        device="cpu",
        attention_backend="reference",
        block_size=BLOCK_SIZE,
        num_blocks=20,
        validate_blocks=True,
    )
    engine = LLMEngine(config)
    shuffle_free_blocks(engine)
    engine.add_request("one", PROMPT, greedy(8))
    engine.step()
    return engine


def test_k_of_a_token_is_at_the_slot_of_its_block_table(engine: LLMEngine, folder: Path) -> None:
    (sequence,) = engine.scheduler.running
    assert sequence.block_table != sorted(sequence.block_table)
    (slot,) = engine.block_manager.slot_mapping(sequence, 17, 18)
    block_id, offset = divmod(slot, BLOCK_SIZE)
    assert (block_id, offset) == (sequence.block_table[17 // BLOCK_SIZE], 17 % BLOCK_SIZE)
    with torch.inference_mode():
        cache = reference_model(folder)(torch.tensor([PROMPT]), use_cache=True).past_key_values
    for layer, expected in enumerate(cache.layers):
        k = engine.model_runner.kv_cache.key_cache[layer][block_id, :, offset]  # (KV heads, head size)
        torch.testing.assert_close(k, expected.keys[0, :, 17])


def test_step_stops_before_it_writes_to_another_slot_than_the_block_manager_gave(engine: LLMEngine) -> None:
    (sequence,) = engine.scheduler.running
    before = engine.model_runner.kv_cache.tensor.clone()
    engine.model_runner._block_table._tables[sequence.block_table_row.index] = 0
    (output,) = engine.step()
    assert isinstance(output.error, EngineDeadError)
    assert engine.stats().integrity_violations_total == 1
    assert torch.equal(engine.model_runner.kv_cache.tensor.nan_to_num(), before.nan_to_num())
