"""Parameters of transformers models and the tensors of GGUF files that fill them.

`*` is the number of a layer. A name without `.weight` or `.bias` names both. Several tensors follow one another
along the last dimension but one.
"""

from __future__ import annotations

from collections.abc import Mapping

Tensors = Mapping[str, str | tuple[str, ...]]

LAYER = "model.layers.*"
ATTENTION: Tensors = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    f"{LAYER}.self_attn.q_proj": "blk.*.attn_q",
    f"{LAYER}.self_attn.k_proj": "blk.*.attn_k",
    f"{LAYER}.self_attn.v_proj": "blk.*.attn_v",
    f"{LAYER}.self_attn.o_proj": "blk.*.attn_output",
}
NORMS_BEFORE: Tensors = {
    f"{LAYER}.input_layernorm": "blk.*.attn_norm",
    f"{LAYER}.post_attention_layernorm": "blk.*.ffn_norm",
}
QK_NORMS: Tensors = {
    f"{LAYER}.self_attn.q_norm": "blk.*.attn_q_norm",
    f"{LAYER}.self_attn.k_norm": "blk.*.attn_k_norm",
}
GATED_MLP: Tensors = {
    f"{LAYER}.mlp.gate_proj": "blk.*.ffn_gate",
    f"{LAYER}.mlp.up_proj": "blk.*.ffn_up",
    f"{LAYER}.mlp.down_proj": "blk.*.ffn_down",
}
EXPERT_TENSORS = ("blk.*.ffn_gate_exps.weight", "blk.*.ffn_up_exps.weight")
MOE: Tensors = {
    f"{LAYER}.mlp.gate": "blk.*.ffn_gate_inp",
    f"{LAYER}.mlp.experts.gate_up_proj": EXPERT_TENSORS,
    f"{LAYER}.mlp.experts.down_proj": "blk.*.ffn_down_exps.weight",
}
SHARED_EXPERT: Tensors = {
    f"{LAYER}.mlp.shared_expert_gate": "blk.*.ffn_gate_inp_shexp",
    f"{LAYER}.mlp.shared_expert.gate_proj": "blk.*.ffn_gate_shexp",
    f"{LAYER}.mlp.shared_expert.up_proj": "blk.*.ffn_up_shexp",
    f"{LAYER}.mlp.shared_expert.down_proj": "blk.*.ffn_down_shexp",
}
GRANITE_MOE: Tensors = {
    f"{LAYER}.block_sparse_moe.router": "blk.*.ffn_gate_inp",
    f"{LAYER}.block_sparse_moe.experts.gate_up_proj": EXPERT_TENSORS,
    f"{LAYER}.block_sparse_moe.experts.down_proj": "blk.*.ffn_down_exps.weight",
    f"{LAYER}.shared_mlp.input_linear": ("blk.*.ffn_gate_shexp", "blk.*.ffn_up_shexp"),
    f"{LAYER}.shared_mlp.output_linear": "blk.*.ffn_down_shexp",
}
NORMS_AROUND: Tensors = {
    f"{LAYER}.input_layernorm": "blk.*.attn_norm",
    f"{LAYER}.post_attention_layernorm": "blk.*.post_attention_norm",
    f"{LAYER}.pre_feedforward_layernorm": "blk.*.ffn_norm",
    f"{LAYER}.post_feedforward_layernorm": "blk.*.post_ffw_norm",
}
LLAMA = {**ATTENTION, **NORMS_BEFORE, **GATED_MLP}
LLAMA_MOE = {**ATTENTION, **NORMS_BEFORE, **MOE}
PERMUTED = frozenset({f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.k_proj"})
COHERE: Tensors = {f"{LAYER}.input_layernorm": "blk.*.attn_norm", **ATTENTION, **GATED_MLP}
GPT2: Tensors = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
    "transformer.h.*.ln_1": "blk.*.attn_norm",
    "transformer.h.*.attn.c_attn": "blk.*.attn_qkv",
    "transformer.h.*.attn.c_proj": "blk.*.attn_output",
    "transformer.h.*.ln_2": "blk.*.ffn_norm",
    "transformer.h.*.mlp.c_fc": "blk.*.ffn_up",
    "transformer.h.*.mlp.c_proj": "blk.*.ffn_down",
}
