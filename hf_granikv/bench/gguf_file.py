"""Writes the weights of a Llama as a GGUF file, for llama.cpp to compute with the same numbers."""

import importlib.util
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

# names of transformers and of llama.cpp's architecture "llama"
_OF_MODEL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def unwritable(model: PreTrainedModel) -> str:
    """Why a model cannot be written; empty if it can."""
    if importlib.util.find_spec("gguf") is None:
        return "writing its weights needs the package gguf, which is not installed"
    config: Any = model.config
    if config.model_type != "llama":
        return f"weights are converted for models of type llama, and this is {config.model_type}"
    if (kind := config.rope_parameters.get("rope_type", "default")) != "default":
        return f"weights are converted for RoPE of type default, and this is {kind}"
    if model.dtype not in (torch.float32, torch.bfloat16):
        return f"weights are converted in float32 and bfloat16, and these are {model.dtype}"
    unknown = [name for name in _weights(model) if _name_in_file(name) is None]
    return f"there is no place for the weight {unknown[0]}" if unknown else ""


@lru_cache(maxsize=1)
def gguf_file(model: PreTrainedModel) -> Path:
    """The weights of a model in a file that lasts as long as the process.

    It is written once for each model object, in the dtype of the model, vectors in float32. There is
    no vocabulary in it: llama.cpp is given ids.
    """
    folder = tempfile.TemporaryDirectory(prefix="granikv-bench-")
    _FOLDERS.append(folder)
    path = Path(folder.name) / "model.gguf"
    _write(model, path)
    return path


# they are removed with the last reference to them
_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def _write(model: PreTrainedModel, path: Path) -> None:
    import gguf

    config: Any = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for name, weight in _weights(model).items():
        stored = weight.detach().contiguous()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            stored = _interleaved(stored, head_dim)
        if stored.dim() == 1:
            stored = stored.float()
        in_file = _name_in_file(name)
        assert in_file is not None
        is_half = stored.dtype == torch.bfloat16
        # numpy has no bfloat16: the bytes are given as such
        writer.add_tensor(
            in_file,
            stored.view(torch.uint8).numpy() if is_half else stored.numpy(),
            raw_dtype=gguf.GGMLQuantizationType.BF16 if is_half else None,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights by name; an output layer that is the embedding appears once."""
    # llama.cpp takes the embedding where a file has no output layer
    return dict(model.named_parameters())


def _name_in_file(name: str) -> str | None:
    if name in _OF_MODEL:
        return _OF_MODEL[name]
    if not name.startswith("model.layers."):
        return None
    layer_idx, _, part = name.removeprefix("model.layers.").partition(".")
    module = part.removesuffix(".weight")
    return f"blk.{layer_idx}.{_OF_LAYER[module]}.weight" if module in _OF_LAYER else None


def _interleaved(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of a query or key projection `[num_heads * head_dim, hidden]` in llama.cpp's order.

    transformers rotates channel i of a head with channel i + head_dim / 2, llama.cpp's Llama turns
    neighbours: the halves are interleaved, which changes no product of a query and a key.
    """
    halves = weight.unflatten(0, (-1, 2, head_dim // 2))  # [num_heads, 2, head_dim / 2, hidden]
    return halves.transpose(1, 2).reshape(weight.shape)
