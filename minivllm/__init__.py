"""minivllm: an LLM server whose KV cache is a managed resource.

Names are imported when they are first used, so that importing `minivllm.core.scheduler.scheduler` or
`minivllm.core.kv_cache.block_manager` loads neither torch nor Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.core.config import EngineConfig
    from minivllm.core.engine import LLMEngine
    from minivllm.core.llm import LLM
    from minivllm.core.outputs import RequestOutput
    from minivllm.core.sampling_params import SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "EngineConfig": "minivllm.core.config",
    "LLM": "minivllm.core.llm",
    "LLMEngine": "minivllm.core.engine",
    "RequestOutput": "minivllm.core.outputs",
    "SamplingParams": "minivllm.core.sampling_params",
}

__all__ = ["LLM", "EngineConfig", "LLMEngine", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
