"""Tiny configs of mlx-lm's families: those that work, and those that are refused, with the reason."""

from __future__ import annotations

BASE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
WINDOWED = {"sliding_window": 5, "sliding_window_pattern": 2, "num_hidden_layers": 4, "head_dim": 16}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

WORKS: dict[str, dict] = {
    "qwen2": BASE,
    "gemma": BASE | {"head_dim": 16},
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
    "mixtral": BASE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": BASE | MOE | {
        "head_dim": 16, "num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    },
    "ernie4_5": BASE | {"head_dim": 16, "use_bias": False},
    "exaone": BASE | {"num_layers": 2, "layer_norm_epsilon": 1e-5, "head_dim": 16},
    "nemotron": BASE | {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "seed_oss": BASE | {"head_dim": 16, "attention_bias": False, "attention_out_bias": False, "mlp_bias": False},
    "hunyuan_v1_dense": BASE | {"head_dim": 16, "attention_bias": False},
    "apertus": BASE | {
        "mlp_bias": False, "attention_bias": False, "rope_traditional": False, "rope_scaling": None, "qk_norm": True,
        "post_norm": False,
    },
}  # fmt: skip

REFUSED: dict[str, tuple[dict, str]] = {
    "gemma2": (BASE | {"head_dim": 16, "query_pre_attn_scalar": 16}, "layer 0 .* attends in a way of its own"),
    "gpt2": (
        {"n_ctx": 256, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256, "layer_norm_epsilon": 1e-5,
         "vocab_size": 97},
        "a row that branches .*positions",
    ),
    "mamba": (
        {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "state_size": 16, "num_hidden_layers": 2,
         "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 4},
        "layer 0 keeps a ArraysCache: state-space, recurrent and mixed layers are not supported",
    ),
    "phi": (BASE | {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5}, "lm_head has a bias, which no head knows"),
    "gpt_oss": (
        BASE | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5,
                "rope_scaling": None, "layer_types": ["sliding_attention", "full_attention"]},
        "sinks",
    ),
}  # fmt: skip
"""Config and what the message says."""
