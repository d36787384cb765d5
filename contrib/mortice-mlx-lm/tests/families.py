"""Tiny configs of mlx-lm's families: those that work and how their layers run, those that are refused and why.

Run as a script it prints the table of the README.
"""

from __future__ import annotations

BASE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
WINDOWED = {"sliding_window": 5, "sliding_window_pattern": 2, "num_hidden_layers": 4, "head_dim": 16}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True, "attention_bias": False,
} | MOE  # fmt: skip
YARN = {
    "type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.7, "original_max_position_embeddings": 64,
    "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip

WORKS: dict[str, dict] = {
    "qwen2": BASE,
    "gemma": BASE | {"head_dim": 16},
    "gemma2": BASE | {"head_dim": 16, "query_pre_attn_scalar": 16},
    "gemma3_text": BASE | WINDOWED | {"rope_local_base_freq": 10000.0, "query_pre_attn_scalar": 16},
    "phi3": BASE | {"rope_scaling": None},
    "olmo2": BASE,
    "olmo3": BASE | {
        "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "attention_bias": False,
    },
    "starcoder2": BASE | {"norm_epsilon": 1e-5, "tie_word_embeddings": True},
    "cohere": BASE | {"layer_norm_eps": 1e-5, "logit_scale": 0.0625},
    "cohere2": BASE | WINDOWED | {"layer_norm_eps": 1e-5, "logit_scale": 0.0625},
    "stablelm": BASE | {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5, "use_qkv_bias": True},
    "granite": BASE | {
        "logits_scaling": 4.0, "attention_multiplier": 0.25, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
        "attention_bias": False, "mlp_bias": False,
    },
    "smollm3": BASE | {"no_rope_layer_interval": 2},
    "internlm2": BASE | {"bias": False},
    "minicpm": BASE | {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 12},
    "glm4": BASE | {"head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True, "rope_traditional": True},
    "helium": BASE | {"head_dim": 16, "attention_bias": False, "mlp_bias": False},
    "ernie4_5": BASE | {"head_dim": 16, "use_bias": False},
    "exaone": BASE | {"num_layers": 2, "layer_norm_epsilon": 1e-5, "head_dim": 16},
    "exaone4": BASE | {
        "head_dim": 16, "num_hidden_layers": 4, "sliding_window": 5, "sliding_window_pattern": "LG",
        "rope_scaling": None,
    },
    "nemotron": BASE | {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "seed_oss": BASE | {"head_dim": 16, "attention_bias": False, "attention_out_bias": False, "mlp_bias": False},
    "hunyuan_v1_dense": BASE | {"head_dim": 16, "attention_bias": False},
    "apertus": BASE | {
        "mlp_bias": False, "attention_bias": False, "rope_traditional": False, "rope_scaling": None, "qk_norm": True,
        "post_norm": False,
    },
    "nanochat": BASE | {"n_positions": 256},
    "mistral3": {"text_config": BASE | {"model_type": "mistral"}},
    "gpt2": {
        "n_ctx": 256, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256, "layer_norm_epsilon": 1e-5,
        "vocab_size": 97,
    },
    "mixtral": BASE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": BASE | MOE | {
        "head_dim": 16, "num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    },
    "gpt_oss": BASE | {
        "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "rope_scaling": None,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek_v2": BASE | LATENT | {"rope_scaling": YARN},
    "deepseek_v3": BASE | LATENT | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_scaling": YARN},
    "mamba": {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "state_size": 16, "num_hidden_layers": 2,
        "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 4,
    },
    "mamba2": {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "state_size": 16, "num_hidden_layers": 2,
        "num_heads": 8, "head_dim": 16, "expand": 2, "conv_kernel": 4, "n_groups": 1, "use_bias": False,
        "use_conv_bias": True, "chunk_size": 16, "time_step_limit": [0.0, 1e9], "time_step_rank": 4,
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "residual_in_fp32": True, "rms_norm": True,
    },
    "falcon_h1": BASE | MAMBA | {
        "head_dim": 16, "mamba_d_ssm": 128, "mamba_chunk_size": 16, "mamba_rms_norm": True,
        "mamba_norm_before_gate": False, "projectors_bias": False,
    },
    "granitemoehybrid": BASE | MAMBA | {
        "layer_types": ["mamba", "attention"], "attention_multiplier": 0.25, "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22, "logits_scaling": 6.0, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 32, "position_embedding_type": "nope",
    },
    "jamba": BASE | {
        "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2,
        "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2,
        "mamba_dt_rank": 4, "mamba_conv_bias": True, "mamba_proj_bias": False,
    },
    "nemotron_h": BASE | {
        "num_hidden_layers": 3, "hybrid_override_pattern": "M*-", "head_dim": 16, "mamba_num_heads": 8,
        "mamba_head_dim": 16, "ssm_state_size": 16, "conv_kernel": 4, "n_groups": 1, "mamba_proj_bias": False,
        "mlp_bias": False, "use_bias": False, "use_conv_bias": True, "attention_bias": False,
        "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5, "time_step_limit": [0.0, 1e9],
    },
    "lfm2": BASE | {
        "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "block_dim": 64, "block_ff_dim": 96,
        "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1],
    },
    "qwen3_next": BASE | MOE | {
        "head_dim": 16, "partial_rotary_factor": 0.5, "full_attention_interval": 2, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
        "num_experts": 4, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 32, "mlp_only_layers": [],
        "norm_topk_prob": True, "rope_scaling": None,
    },
    "recurrent_gemma": BASE | {
        "num_hidden_layers": 3, "head_dim": 16, "num_key_value_heads": 1, "attention_bias": False, "conv1d_width": 4,
        "attention_window_size": 5, "logits_soft_cap": 30.0, "partial_rotary_factor": 0.5, "lru_width": 64,
        "block_types": ["recurrent", "attention"],
    },
}  # fmt: skip

CARRIED: dict[str, str] = {
    "gemma2": "all: its attention is soft-capped",
    "nanochat": "all: positions without a module",
    "gpt_oss": "all: its attention has sinks",
    "deepseek_v3": "all: positions are a bias of its attention",
    "mamba": "all: state space",
    "mamba2": "all: state space",
    "falcon_h1": "all: state space beside attention",
    "granitemoehybrid": "state-space layers",
    "jamba": "state-space layers",
    "nemotron_h": "state-space layers, and those of an MLP alone",
    "lfm2": "convolutions",
    "qwen3_next": "gated delta layers",
    "recurrent_gemma": "recurrent layers",
}
"""Which layers run as mlx-lm wrote them, and why. All layers of the other families are addressed."""

DEEP = [
    "qwen2", "gemma3_text", "phi3", "olmo2", "starcoder2", "cohere2", "granite", "minicpm", "glm4", "gpt2", "mixtral",
    "gemma2", "gpt_oss", "deepseek_v3", "mamba", "qwen3_next", "recurrent_gemma", "nemotron_h",
]  # fmt: skip
"""Families whose gradients are compared: windows, fused projections, tied, scaled and capped outputs, experts,
post-norms, learned positions, and every kind of layer that is carried."""

REFUSED: dict[str, tuple[dict, str, str]] = {
    "phi": (
        BASE | {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
        "its output layer has a bias",
        "its output layer lm_head has a bias, which no head knows",
    ),
    "gpt_neox": (
        BASE | {"layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.5, "use_parallel_residual": True},
        "its output matrix is inside its inner model",
        "GPTNeoXModel gives back logits, not hidden states",
    ),
    "rwkv7": (
        {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "norm_eps": 1e-5, "head_dim": 16,
         "num_hidden_layers": 2, "a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8,
         "decay_low_rank_dim": 8},
        "the first layer's values go to all others",
        r"Rwkv7Model hands more than a hidden state from layer to layer \(Rwkv7Layer",
    ),
    "iquestloopcoder": (
        BASE | {"head_dim": 16},
        "goes through its layers twice",
        "IQuestLoopCoderModel does not call its 2 layers once each, in order",
    ),
    "plamo": (
        BASE | {"n_shared_head": 2},
        "its layers are in a module of their own",
        "keeps its layers in none of the places that are known",
    ),
}  # fmt: skip
"""Config, why in the table, and what the message says."""


def row(family: str) -> str:
    """Of the README's table."""
    if family in REFUSED:
        return f"| `{family}` | refused: {REFUSED[family][1]} | |"
    gradients = "forward, decoding, gradients" if family in DEEP else "forward, decoding"
    return f"| `{family}` | {gradients} | {CARRIED.get(family, '')} |".replace("|  |", "| |")


if __name__ == "__main__":
    print("\n".join(row(family) for family in (*WORKS, *REFUSED)))
