"""LMHead: hidden states to logits, for the rows that are asked for only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class LMHead:
    """The output projection and what some families do to its result: logits = cap(projection(hidden) * scale).

    `softcap` as in Gemma 2: softcap * tanh(logits / softcap). `scale` as in Cohere (logit_scale) or Granite
    (1 / logits_scaling).
    """

    projection: torch.nn.Module
    vocab_size: int
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> LMHead | None:
        """Reads it from a model; None when the model has no output projection."""
        projection = model.get_output_embeddings()
        if projection is None:
            return None
        config = model.config.get_text_config(decoder=True)
        scale = getattr(config, "logit_scale", None) or 1.0
        if getattr(config, "logits_scaling", None):
            scale /= config.logits_scaling
        softcap = getattr(config, "final_logit_softcapping", None)
        return cls(projection, int(projection.weight.shape[0]), float(scale), softcap)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(R, hidden_size) to (R, vocab_size), in the model's type."""
        logits: torch.Tensor = self.projection(hidden_states)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits
