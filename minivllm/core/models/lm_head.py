"""LMHead: computes logits from last hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class LMHead:
    """The `lm_head` of a causal language model: logits = softcap(projection(hidden_states) * scale).

    Attributes:
        projection: the model's output embeddings.
        scale: `logit_scale` (Cohere) or 1 / `logits_scaling` (Granite).
        softcap: `final_logit_softcapping` (Gemma 2): softcap * tanh(logits / softcap).
    """

    projection: torch.nn.Module
    vocab_size: int
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> LMHead | None:
        """Returns the head of `model`, or None for a model without output embeddings."""
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
        """Returns (R, vocab_size) of (R, hidden_size), in the model's dtype."""
        logits: torch.Tensor = self.projection(hidden_states)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits
