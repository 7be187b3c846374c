"""Tiny random models of many families, built in process: no hub, no files."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 97

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": None,
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": None,
}
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Family:
    """A config class by name, and what makes it tiny."""

    config_name: str
    options: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=lambda: COMMON)

    def config(self, **options: Any) -> transformers.PreTrainedConfig:
        merged = {**self.base, **self.options, **options}
        return getattr(transformers, self.config_name)(**merged)

    def model(self, *, seed: int = 0, **options: Any) -> PreTrainedModel:
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(self.config(**options)).float().eval()


SHARED_PATH: dict[str, Family] = {
    "llama": Family("LlamaConfig"),
    "qwen2": Family("Qwen2Config"),
    "qwen3": Family("Qwen3Config", {"head_dim": 8}),
    "gemma": Family("GemmaConfig", {"head_dim": 8}),
    "phi3": Family("Phi3Config", {"sliding_window": None}),
    "olmo2": Family("Olmo2Config"),
    "gpt_neox": Family("GPTNeoXConfig"),
    "gpt2": Family("GPT2Config", base=_GPT2),
    "opt": Family("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "mixtral": Family(
        "MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    ),
    "qwen3_moe": Family("Qwen3MoeConfig", {**_MOE, "head_dim": 8}),
    "starcoder2": Family("Starcoder2Config", {"sliding_window": None}),
    "granite": Family("GraniteConfig", {"attention_multiplier": 0.2}),
    "stablelm": Family("StableLmConfig"),
    "smollm3": Family("SmolLM3Config"),
    "glm4": Family("Glm4Config", {"head_dim": 8, "partial_rotary_factor": 0.5}),
    "cohere": Family("CohereConfig"),
    "helium": Family("HeliumConfig", {"head_dim": 8}),
    "nemotron": Family("NemotronConfig"),
    "phi": Family("PhiConfig"),
    "persimmon": Family("PersimmonConfig"),
    "ernie4_5": Family("Ernie4_5Config", {"head_dim": 8}),
    # these expand what is cached before they attend
    "deepseek_v3": Family(
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "diffllama": Family("DiffLlamaConfig"),
    "jetmoe": Family(
        "JetMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8}
    ),
}

DENSE_ROUTE: dict[str, Family] = {
    "bloom": Family("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "falcon": Family("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt_neo": Family(
        "GPTNeoConfig",
        {
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 128,
        },
    ),
}

_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
# a window of 8 tokens, which leaves a prefix of 20 while 10 tokens are generated
LOCAL: dict[str, Family] = {
    "mistral": Family("MistralConfig", {"sliding_window": 8}),
    "gemma2": Family(
        "Gemma2Config",
        {"head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.0, **_SLIDING},
    ),
    "gemma3": Family("Gemma3TextConfig", {"head_dim": 8, "query_pre_attn_scalar": 8, **_SLIDING}),
    "gpt_oss": Family(
        "GptOssConfig",
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **_SLIDING},
    ),
    "llama4": Family(
        "Llama4TextConfig",
        {
            "head_dim": 8,
            "num_local_experts": 2,
            "attention_chunk_size": 8,
            "intermediate_size_mlp": 64,
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
    "cohere2": Family("Cohere2Config", {"head_dim": 8, **_SLIDING}),
    "qwen2-sliding": Family("Qwen2Config", {"use_sliding_window": True, **_SLIDING}),
    # heads of another width in full layers, and keys that are values too
    "gemma4": Family(
        "Gemma4TextConfig",
        {
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 8,
            **_SLIDING,
        },
    ),
    "gemma3n": Family(
        "Gemma3nTextConfig",
        {
            "head_dim": 8,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
}

REFUSED: dict[str, Family] = {
    "mamba2": Family("Mamba2Config", {"num_heads": 8, "head_dim": 8}),
    "jamba": Family(
        "JambaConfig", {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
    ),
    "bamba": Family("BambaConfig", {"attn_layer_indices": [1], "mamba_n_heads": 8}),
    "lfm2_without_attention": Family("Lfm2Config", {"layer_types": ["conv", "conv"]}),
}

_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_SHARED_EXPERT: dict[str, Any] = {**_MOE, "shared_expert_intermediate_size": 32}

# layers with recurrent or convolution state in front of, between, behind or inside attention layers
HYBRIDS: dict[str, Family] = {
    "qwen3_next": Family("Qwen3NextConfig", {**_DELTA, **_SHARED_EXPERT}),
    "qwen3_5_text": Family("Qwen3_5TextConfig", _DELTA),
    "qwen3_5_moe_text": Family("Qwen3_5MoeTextConfig", {**_DELTA, **_SHARED_EXPERT}),
    "olmo_hybrid": Family("OlmoHybridConfig", {**_DELTA, "linear_num_key_heads": 4}),
    "lfm2": Family(
        "Lfm2Config", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
    ),
    "lfm2_moe": Family(
        "Lfm2MoeConfig",
        {
            **_MOE,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
        },
    ),
    "falcon_h1": Family(
        "FalconH1Config",
        {
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
        },
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridConfig",
        {
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "attention_multiplier": 0.2,
        },
    ),
    # a single token of these two ignores the lower limit of time steps that several tokens keep to,
    # with any cache: without that limit they are one model
    "zamba2": Family(
        "Zamba2Config",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "num_mem_blocks": 1,
            "mamba_d_state": 8,
            "mamba_headdim": 8,
            "n_mamba_heads": 8,
            "mamba_ngroups": 1,
            "chunk_size": 8,
            "adapter_rank": 4,
            "time_step_min": 1e-9,
        },
    ),
    "nemotron_h": Family(
        "NemotronHConfig",
        {
            "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 8,
            "head_dim": 8,
            "time_step_min": 1e-9,
        },
    ),
}

FamilyModel = Callable[[], PreTrainedModel]
