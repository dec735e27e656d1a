"""Manages the physical KV blocks: block tables, prefix cache, admission checks. No torch."""

from minivllm.core.kv_cache.block_manager import BlockManager, BlockOwner, Slot, flat_slots

__all__ = ["BlockManager", "BlockOwner", "Slot", "flat_slots"]
