"""Computing the keys and values of a prefix."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_granikv.announce import forward_parameters
from hf_granikv.compat import CACHE_ARGUMENT
from hf_granikv.views import LayerKind


def record(
    model: PreTrainedModel, ids: Tensor, kinds: Sequence[LayerKind], chunk_size: int | None
) -> list[tuple[Tensor, Tensor]]:
    """Runs a model over a prefix.

    Args:
        model: The model, without its head on top where it has one.
        ids: `[1, prefix_len]` token ids.
        kinds: What each layer asks of a cache.
        chunk_size: The most tokens of one forward, which bounds its activations; None for all.

    Returns:
        Per layer keys and values, `[num_kv_heads, num_kept, head_dim]`: all tokens, or the last ones
        that a window can still see when the last token of the prefix is computed again. Layers that
        store nothing have no heads.

    Raises:
        ValueError: If the model does not keep its keys and values in the cache it is given.
    """
    prefix_len, embedding = ids.shape[1], model.get_input_embeddings()
    ids = ids.to(next(embedding.parameters()).device)
    recorder = DynamicCache(config=model.config.get_text_config(decoder=True))
    if any(kind.window is not None for kind in kinds):
        # a local layer would keep one token less than a row needs that is exactly the prefix
        recorder.activate_past_recording()
    size = chunk_size or prefix_len
    for start in range(0, prefix_len, size):
        _run(model, ids[:, start : start + size], start, recorder)
    return [
        _kept(model, layer, kind, ids) for layer, kind in zip(recorder.layers, kinds, strict=True)
    ]


def _run(model: PreTrainedModel, ids: Tensor, start: int, recorder: DynamicCache) -> None:
    options: dict[str, Any] = {"use_cache": True, CACHE_ARGUMENT: recorder}
    if "position_ids" in forward_parameters(model.base_model):
        # as generate counts; RoBERTa's own count starts elsewhere
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)
        options["position_ids"] = positions[None]
    with torch.no_grad():
        model.base_model(input_ids=ids, **options)


def _kept(
    model: PreTrainedModel, layer: object, kind: LayerKind, ids: Tensor
) -> tuple[Tensor, Tensor]:
    prefix_len = ids.shape[1]
    if not isinstance(layer, DynamicLayer):
        nothing = ids.new_empty(0, prefix_len, 0)
        return nothing, nothing
    keys, values = layer.keys, layer.values
    if keys is None or values is None or keys.shape[2] != prefix_len:
        raise ValueError(
            f"{type(model).__name__} does not keep its keys and values in the cache it is given; "
            "it cannot be served."
        )
    start = 0 if kind.window is None else kind.window.first_reached(prefix_len - 1)
    return keys[0, :, start:], values[0, :, start:]
