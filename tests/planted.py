"""A model whose keys say which token, at which position, in which layer, they belong to."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

NUM_LAYERS, NUM_HEADS, HEAD_DIM, VOCAB_SIZE = 3, 2, 4, 97
CONFIG = LlamaConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=NUM_HEADS * HEAD_DIM,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=NUM_HEADS,
    num_key_value_heads=NUM_HEADS,
)


class PlantedError(Exception):
    """Raised by a layer that was told to fail."""


def plant(ids: Tensor, positions: Tensor, layer_idx: int) -> Tensor:
    """Gives `[..., num_heads, head_dim]` numbers, exact in float32, for ids `[...]`."""
    number = (layer_idx * 128 + ids) * 256 + positions
    place = torch.arange(NUM_HEADS * HEAD_DIM).view(NUM_HEADS, HEAD_DIM) / 16
    return number.float()[..., None, None] + place


class PlantedModel(PreTrainedModel):
    """Stores planted keys, and their negatives as values; attends to nothing.

    `fails_at` makes that layer raise before it stores; NUM_LAYERS, the model after all of them.
    """

    config_class = LlamaConfig
    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, 1)
        self.fails_at: int | None = None
        self.returned: list[tuple[Tensor, Tensor]] = []
        self.mask: Tensor | None = None

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
    ) -> list[Any]:
        cache = past_key_values if cache is None else cache
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None] + cache.get_seq_length()
        positions = position_ids.expand_as(input_ids)
        self.returned, self.mask = [], attention_mask
        for layer_idx in range(NUM_LAYERS):
            if self.fails_at == layer_idx:
                raise PlantedError(layer_idx)
            # every layer is asked for its sizes before it stores: earlier ones hold the step already
            kv_len, _ = cache.get_mask_sizes(input_ids.shape[1], layer_idx)
            keys = plant(input_ids, positions, layer_idx).transpose(1, 2)
            returned = cache.update(keys, -keys, layer_idx)
            assert returned[0].shape[2] == kv_len
            self.returned.append(returned)
        if self.fails_at == NUM_LAYERS:
            raise PlantedError(NUM_LAYERS)
        return self.returned
