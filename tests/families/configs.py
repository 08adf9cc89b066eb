"""A tiny random configuration of every family that mlx-lm has a file for.

Values are small and chosen so that every kind of layer of a family appears: windows shorter than
the prompts, several experts, shared keys, dense and sparse layers. `COMMON` holds what most
families name alike; a family's entry holds the rest, and what it wants otherwise.
"""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 211

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "sliding_window": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "partial_rotary_factor": 0.5,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    # Gated delta networks: qwen3_next, qwen3_5, olmo_hybrid.
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    # Lightning index: deepseek_v32, glm_moe_dsa.
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 24,
}

SLIDING_FULL = ["sliding_attention", "full_attention"]

_LONGCAT: dict[str, Any] = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 64,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 32,
    "zero_expert_num": 2,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}

_KIMI_LINEAR: dict[str, Any] = {
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 16,
        "kda_layers": [1],
        "full_attn_layers": [2],
        "short_conv_kernel_size": 4,
    },
    "model_max_length": 512,
    "num_experts_per_token": 2,
}

_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 6,
    "global_head_dim": 32,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "sliding_window_pattern": 2,
    "layer_types": SLIDING_FULL * 3,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_theta": 10000.0},
    },
    "tie_word_embeddings": True,
}

_GEMMA3N: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "rope_local_base_freq": 1000.0,
    "final_logit_softcapping": 10.0,
    "layer_types": SLIDING_FULL * 2,
    "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0],
    "hidden_size_per_layer_input": 16,
    "altup_num_inputs": 4,
    "altup_coef_clip": 1.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
}

_LFM2: dict[str, Any] = {
    "num_hidden_layers": 3,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_ff_dim": 96,
    "block_multiple_of": 4,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "layer_types": ["conv", "full_attention", "conv"],
    "use_expert_bias": True,
    "num_dense_layers": 1,
}

_QWEN3_5: dict[str, Any] = {"num_hidden_layers": 4, "full_attention_interval": 2}

_LLAMA_4_SCALING: dict[str, Any] = {
    "rope_theta": 10000.0,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 16,
}

_MINISTRAL3: dict[str, Any] = {"layer_types": SLIDING_FULL, "rope_parameters": _LLAMA_4_SCALING}

_STEP: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_groups": 2,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "share_expert_dim": 32,
    "moe_layers_enum": "1,3",
}

#: Family (an mlx-lm model file) -> what COMMON does not say, or says otherwise.
FAMILIES: dict[str, dict[str, Any]] = {
    "Klear": {},
    "afm7": {
        "hidden_dim": 64,
        "num_layers": 3,
        "num_kv_reuse_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    "afmoe": {"num_hidden_layers": 4, "layer_types": SLIDING_FULL * 2, "num_dense_layers": 1},
    "apertus": {"post_norm": True, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0], "conv_window": 2},
    "bailing_hybrid": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "layer_group_size": 2,
        "group_norm_size": 2,
    },
    "bailing_moe": {},
    "bailing_moe_linear": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "layer_group_size": 2,
        "group_norm_size": 2,
    },
    "bailing_moe_v3": {"num_hidden_layers": 4, "layer_group_size": 2},
    "bitnet": {},
    "cohere": {"use_qk_norm": True},
    "cohere2": {"num_hidden_layers": 4, "sliding_window_pattern": 2},
    "dbrx": {
        "d_model": 64,
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "n_layers": 2,
        "n_heads": 4,
    },
    "deepseek": {},
    "deepseek_v2": {
        "topk_method": "greedy",
        "num_key_value_heads": 4,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "deepseek_v3": {},
    "deepseek_v32": {},
    "deepseek_v41": {
        "num_hidden_layers": 4,
        "o_groups": 2,
        "o_lora_rank": 8,
        "compress_ratios": [0, 4, 0, 4],
        "hc_mult": 2,
    },
    "dots1": {},
    "ernie4_5": {"use_bias": False},
    "ernie4_5_moe": {"use_bias": False, "moe_num_experts": 4, "moe_k": 2},
    "exaone": {"num_layers": 2},
    "exaone4": {"num_hidden_layers": 4, "rope_scaling": None, "sliding_window_pattern": "LLGL"},
    "exaone_moe": {
        "num_hidden_layers": 4,
        "layer_types": SLIDING_FULL * 2,
        "is_moe_layer": [False, True, True, True],
    },
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_d_head": 16,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
    },
    "gear": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "conv_mixer", "full_attention"],
        "attn_logit_softcapping": 20.0,
    },
    "gemma": {},
    "gemma2": {},
    "gemma3": {"text_config": "gemma3_text"},
    "gemma3_text": {"num_hidden_layers": 4, "sliding_window_pattern": 2},
    "gemma3n": {"text_config": _GEMMA3N},
    "gemma4": {"text_config": "gemma4_text"},
    "gemma4_text": _GEMMA4,
    "glm": {},
    "glm4": {},
    "glm4_moe": {"rope_scaling": None, "use_qk_norm": True},
    "glm4_moe_lite": {"num_key_value_heads": 4, "partial_rotary_factor": 1.0},
    "glm_moe_dsa": {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "gpt2": {"n_ctx": 512, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512},
    "gpt_bigcode": {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_inner": 96, "n_positions": 512},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5, "num_key_value_heads": None},
    "gpt_oss": {"num_hidden_layers": 4},
    "gptj": {"n_embd": 64, "n_head": 4, "n_layer": 2, "rotary_dim": 8},
    "granite": {},
    "granitemoe": {},
    "granitemoehybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_proj_bias": False,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
    },
    "helium": {},
    "hunyuan": {
        "num_hidden_layers": 4,
        "moe_topk": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    },
    "hunyuan_v1_dense": {},
    "internlm2": {},
    "internlm3": {},
    "iquestloopcoder": {"loop_window_size": 16},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
    },
    "kimi_k25": {"text_config": "deepseek_v3"},
    "kimi_k3": {"text_config": _KIMI_LINEAR},
    "kimi_linear": _KIMI_LINEAR,
    "kimi_vl": {"text_config": "deepseek_v3"},
    "laguna": {
        "num_hidden_layers": 4,
        "layer_types": SLIDING_FULL * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_attention_heads_per_layer": [4, 4, 4, 4],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "lfm2": _LFM2,
    "lfm2-vl": {"text_config": "lfm2"},
    "lfm2_moe": _LFM2,
    "lille-130m": {"block_size": 512, "n_embd": 64, "n_head": 4, "n_kv_heads": 2, "n_layer": 2},
    "llama": {"layer_types": SLIDING_FULL},
    "llama4": {
        "text_config": {
            "num_hidden_layers": 4,
            "attention_chunk_size": 16,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 96,
            "num_experts_per_tok": 1,
            "rope_scaling": None,
            "use_qk_norm": True,
        }
    },
    "llama4_text": {"intermediate_size_mlp": 96, "no_rope_layers": [1, 0], "use_qk_norm": True},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": _LONGCAT,
    "mamba": {
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 8,
    },
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.01, 10.0],
        "time_step_rank": "auto",
    },
    "mellum": {
        "layer_types": SLIDING_FULL,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "mimo": {},
    "mimo_v2_flash": {
        "num_hidden_layers": 4,
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": 16,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 1000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 1,
        "swa_head_dim": 16,
        "swa_v_head_dim": 12,
    },
    "minicpm": {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 2.0},
    "minicpm3": {
        "dim_model_base": 32,
        "scale_depth": 1.4,
        "scale_emb": 2.0,
        "rope_scaling": {
            "original_max_position_embeddings": 512,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0] * 4,
        },
    },
    "minimax": {"rotary_dim": 8},
    "minimax_m3_vl": {
        "text_config": {
            "moe_layer_freq": [0, 1],
            "layer_types": ["full_attention", "sparse_attention"],
            "dense_intermediate_size": 96,
            "index_block_size": 8,
            "index_topk_blocks": 3,
        }
    },
    "ministral3": _MINISTRAL3,
    "mistral3": {"text_config": {"model_type": "ministral3", "rope_parameters": _LLAMA_4_SCALING}},
    "mistral4": {
        "num_key_value_heads": 4,
        "rope_parameters": _LLAMA_4_SCALING | {"type": "yarn", "factor": 4.0},
    },
    "mixtral": {},
    "muse_glimmer": {"layer_types": SLIDING_FULL},
    "muse_spark": {
        "text_config": {
            "post_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 10000.0},
            "layer_rope_theta": [10000.0, 0.0],
            "layer_types": SLIDING_FULL,
            "final_logit_softcapping": 20.0,
            "output_multiplier": 0.5,
            "moe_hidden_size": 64,
            "num_shared_experts": 0,
        }
    },
    "nanbeige": {"num_loops": 2},
    "nanochat": {"num_key_value_heads": 4},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {
                "attention": {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False},
                "ffn": {"ffn_mult": 1.5, "no_op": False, "replace_with_linear": False},
            },
            {
                "attention": {"n_heads_in_group": None, "no_op": True},
                "ffn": {"ffn_mult": 1.5, "no_op": False, "replace_with_linear": False},
            },
            {
                "attention": {"n_heads_in_group": 4, "no_op": False, "replace_with_linear": False},
                "ffn": {"ffn_mult": None, "no_op": True},
            },
        ],
        "num_hidden_layers": 3,
    },
    "nemotron_h": {
        "num_hidden_layers": 4,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "*", "-", "E"],
        "moe_shared_expert_intermediate_size": 32,
        "time_step_limit": [0.01, 10.0],
    },
    "olmo": {
        "d_model": 64,
        "n_layers": 2,
        "mlp_hidden_size": 96,
        "n_heads": 4,
        "embedding_size": 211,
    },
    "olmo2": {},
    "olmo3": {"layer_types": SLIDING_FULL},
    "olmo_hybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_allow_neg_eigval": True,
    },
    "olmoe": {},
    "openelm": {
        "num_transformer_layers": 2,
        "model_dim": 64,
        "ffn_dim_divisor": 16,
        "num_query_heads": [4, 4],
        "num_kv_heads": [2, 2],
        "ffn_multipliers": [1.0, 1.5],
    },
    "phi": {},
    "phi3": {},
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 96,
        "gegelu_limit": 20.0,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 1,
        "blocksparse_vert_stride": 4,
    },
    "phimoe": {
        "rope_scaling": {
            "long_factor": [1.0] * 8,
            "short_factor": [1.0] * 8,
            "long_mscale": 1.1,
            "short_mscale": 1.1,
        }
    },
    "phixtral": {
        "num_vocab": VOCAB_SIZE,
        "model_dim": 64,
        "num_heads": 4,
        "num_layers": 2,
        "rotary_dim": 8,
    },
    "pixtral": {"text_config": {"model_type": "llama"}},
    "plamo": {"n_shared_head": 2},
    "plamo2": {
        "num_hidden_layers": 4,
        "hidden_size_per_head": 16,
        "mamba_d_state": 16,
        "mamba_num_heads": 8,
    },
    "plamo3": {"num_hidden_layers": 4, "window_size": 16, "sliding_window_pattern": 2},
    "prism_hadamard_qwen35": {
        "text_config": _QWEN3_5 | {"intermediate_size": 512, "num_experts": 0},
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {
                "path": "model.layers.0.mlp.down_proj",
                "embedding": False,
                "dtype": "float16",
                "block": 512,
            }
        ],
    },
    "qwen": {"kv_channels": 16},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen2_vl": {"text_config": {"model_type": "qwen2"}},
    "qwen3": {},
    "qwen3_5": {"text_config": _QWEN3_5 | {"num_experts": 0}},
    "qwen3_5_moe": {"text_config": _QWEN3_5},
    "qwen3_moe": {},
    "qwen3_next": _QWEN3_5,
    "qwen3_vl": {"text_config": {"model_type": "qwen3"}},
    "qwen3_vl_moe": {"text_config": {"model_type": "qwen3_moe"}},
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "num_key_value_heads": 1,
        "attention_window_size": 16,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv7": {
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "seed_oss": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "solar_open": {},
    "spark2_5": {
        "layer_types": SLIDING_FULL,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "stablelm": {"use_qkv_bias": True},
    "starcoder2": {},
    "step3p5": _STEP,
    "talkie": {},
    "telechat3": {},
    "youtu_llm": {"num_key_value_heads": 4},
}


def config(family: str) -> dict[str, Any]:
    """The configuration of a family as its `config.json` would hold it."""
    entry = COMMON | {"model_type": family} | FAMILIES[family]
    text = entry.get("text_config")
    if isinstance(text, str):
        entry["text_config"] = COMMON | {"model_type": text} | FAMILIES[text]
    elif text is not None:
        entry["text_config"] = COMMON | {"model_type": family} | text
    return entry
