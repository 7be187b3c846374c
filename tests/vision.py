"""Tiny vision-language models, their images, and prompts around them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from families import COMMON, HYBRIDS, LOCAL, SHARED_PATH
from prompts import left_padded, tokens
from torch import Tensor
from transformers import PreTrainedModel

IMAGE_ID = 90
MARKS = {"image_token_id": 90, "video_token_id": 91}
MARKS |= {"vision_start_token_id": 92, "vision_end_token_id": 93}
NO_MARKS = {"suppress_tokens": list(MARKS.values())}
# no token of it stands for an image
TEXT = [token for token in tokens(24, seed=1) if token < IMAGE_ID][:20]
_PATCHES = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32}
_PATCHES |= {"intermediate_size": 32}
_DEEP = {**_PATCHES, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_MIXED_ROPE = {**_ROPE, "mrope_interleaved": True}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class VisionFamily:
    """A model of both kinds of input, by the names of its classes."""

    name: str
    text: dict[str, Any]
    vision: dict[str, Any]

    def model(self, attention: str) -> PreTrainedModel:
        config = getattr(transformers, f"{self.name}Config")
        built = config(text_config={**COMMON, **self.text}, vision_config=self.vision, **MARKS)
        torch.manual_seed(0)
        model = getattr(transformers, f"{self.name}ForConditionalGeneration")(built).float().eval()
        model.set_attn_implementation(attention)
        return model


# these count positions themselves, in three dimensions, and keep what they have counted
COUNTING: dict[str, VisionFamily] = {
    "qwen2_vl": VisionFamily(
        "Qwen2VL",
        {"rope_parameters": _ROPE},
        {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2},
    ),
    "qwen2_5_vl": VisionFamily("Qwen2_5_VL", {"rope_parameters": _ROPE}, _PATCHES),
    "qwen3_vl": VisionFamily("Qwen3VL", {"head_dim": 8, "rope_parameters": _MIXED_ROPE}, _DEEP),
    "qwen3_vl_moe": VisionFamily(
        "Qwen3VLMoe", {"head_dim": 8, "rope_parameters": _MIXED_ROPE, **_EXPERTS}, _DEEP
    ),
}
COUNTING_HYBRID = VisionFamily(
    "Qwen3_5",
    {
        **HYBRIDS["qwen3_5_text"].options,
        "rope_parameters": {**_MIXED_ROPE, "partial_rotary_factor": 1.0},
    },
    {**_DEEP, "deepstack_visual_indexes": []},
)


def patches(model: PreTrainedModel) -> dict[str, Tensor]:
    """An image of 4 x 4 patches, which the models of `COUNTING` merge to 4 tokens."""
    vision = model.config.vision_config
    length = 3 * vision.temporal_patch_size * vision.patch_size**2
    generator = torch.Generator().manual_seed(3)
    return {
        "pixel_values": torch.randn(16, length, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


def with_types(rows: Sequence[Sequence[int]], name: str = "mm_token_type_ids") -> dict[str, Tensor]:
    inputs = left_padded(rows)
    return {**inputs, name: (inputs["input_ids"] == IMAGE_ID).long()}


def llava(attention: str) -> PreTrainedModel:
    vision = transformers.CLIPVisionConfig(
        **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "image_size": 8, "patch_size": 4, "projection_dim": 16},
    )
    config = transformers.LlavaConfig(
        text_config=SHARED_PATH["llama"].config(), vision_config=vision, image_token_id=IMAGE_ID
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    model.generation_config.pad_token_id = 0
    model.set_attn_implementation(attention)
    return model


def gemma3(attention: str) -> PreTrainedModel:
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    config = transformers.Gemma3Config(
        text_config=LOCAL["gemma3"].config(sliding_window=64).to_dict(),
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_id=IMAGE_ID,
        image_token_index=IMAGE_ID,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).float().eval()
    # zero when it is new, which would hide every image
    model.model.multi_modal_projector.mm_input_projection_weight.data.normal_(0, 0.3)
    model.generation_config.pad_token_id = 0
    model.set_attn_implementation(attention)
    return model


def pixels(size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {"pixel_values": torch.randn(1, 3, size, size, generator=generator)}
