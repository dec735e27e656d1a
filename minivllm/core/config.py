"""EngineConfig: all settings of the engine, validated. SchedulerConfig: its scheduling limits, resolved."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_TOKEN_BUDGET = 512


class EngineConfig(BaseModel):
    """Immutable settings of one engine. A wrong name or value raises pydantic's ValidationError naming it."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    # What to load
    model: str = Field(DEFAULT_MODEL, min_length=1, description="hub id, folder, .gguf file, or the packaged model")
    tokenizer: str | None = Field(None, description="where the tokenizer is, when not with the model")
    revision: str | None = Field(None, description="branch, tag or commit of a hub id")
    trust_remote_code: bool = False
    load_format: Literal["auto", "dummy"] = Field("auto", description="dummy: random weights, to try sizes out")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    quantization: Literal["int8"] | None = None
    compile: Literal["auto", "on", "off"] = "auto"
    attention_backend: str = "auto"
    num_threads: int | None = Field(None, ge=1, description="CPU threads of the model; default: the usable cores")
    hf_overrides: dict[str, Any] = Field({}, description="fields that replace those of the model's config.json")
    seed: int | None = Field(None, description="makes requests without a seed repeatable")

    # The KV pool
    block_size: int = Field(16, ge=1, description="tokens per block")
    num_blocks: int | None = Field(None, ge=1, description="usable blocks; default: what memory allows")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of a GPU's memory that is used")
    cpu_kv_cache_bytes: int = Field(2 * 1024**3, ge=1, description="size of the pool on a CPU")
    enable_prefix_caching: bool = True
    watermark: float = Field(0.01, ge=0, lt=1, description="share of the blocks that admission leaves free")
    validate_blocks: bool = Field(False, description="check all block invariants in every step")

    # Scheduling
    max_model_len: int | None = Field(None, ge=2, description="prompt + output; default: the model's, or what fits")
    max_num_seqs: int = Field(128, ge=1, description="sequences that run at the same time")
    max_num_batched_tokens: int | None = Field(
        None, ge=1, description="tokens computed in one step; default: 512 on a CPU, 8192 on CUDA"
    )
    long_prefill_token_threshold: int | None = Field(None, ge=1, description="most tokens of one prompt per step")
    max_waiting_requests: int | None = Field(2048, ge=1, description="longer queues are refused; None: no limit")
    max_waiting_tokens: int | None = Field(None, ge=1, description="most prompt tokens that may wait; None: no limit")
    max_head_bypasses: int = Field(32, ge=0, description="requests that may overtake one that waits for blocks")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of the scheduler as plain numbers; sys.maxsize where there is no limit."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    max_waiting_requests: int
    max_waiting_tokens: int
    max_head_bypasses: int

    @classmethod
    def resolve(cls, config: EngineConfig, pool_tokens: int) -> SchedulerConfig:
        """Fills in the defaults: a context as long as the pool, the default token budget, no limit elsewhere."""
        budget = config.max_num_batched_tokens or DEFAULT_TOKEN_BUDGET
        return cls(
            max_model_len=min(config.max_model_len or pool_tokens, pool_tokens),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=config.long_prefill_token_threshold or budget,
            max_waiting_requests=config.max_waiting_requests or sys.maxsize,
            max_waiting_tokens=config.max_waiting_tokens or sys.maxsize,
            max_head_bypasses=config.max_head_bypasses,
        )
