"""Computing the keys and values of a prefix."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_granikv.announce import forward_parameters
from hf_granikv.compat import CACHE_ARGUMENT
from hf_granikv.views import Window


def record(
    model: PreTrainedModel, ids: Tensor, windows: Sequence[Window | None]
) -> list[tuple[Tensor, Tensor]]:
    """Runs a model over a prefix.

    Args:
        model: The model, without its head on top where it has one.
        ids: `[1, prefix_len]` on the device of the embeddings.
        windows: Per layer, what it sees.

    Returns:
        Per layer keys and values, `[num_kv_heads, num_kept, head_dim]`: all tokens, or the last ones
        that a window can still see when the last token of the prefix is computed again. Layers that
        store nothing have no heads.

    Raises:
        ValueError: If the model does not keep its keys and values in the cache it is given.
    """
    prefix_len = ids.shape[1]
    recorder = DynamicCache(config=model.config.get_text_config(decoder=True))
    if any(windows):
        # a local layer would keep one token less than a row needs that is exactly the prefix
        recorder.activate_past_recording()
    options: dict[str, Any] = {"use_cache": True, CACHE_ARGUMENT: recorder}
    if "position_ids" in forward_parameters(model.base_model):
        # as generate counts; RoBERTa's own count starts elsewhere
        options["position_ids"] = torch.arange(prefix_len, device=ids.device)[None]
    with torch.no_grad():
        model.base_model(input_ids=ids, **options)
    pairs = []
    for layer, window in zip(recorder.layers, windows, strict=True):
        if not isinstance(layer, DynamicLayer):
            nothing = ids.new_empty(0, prefix_len, 0)
            pairs.append((nothing, nothing))
            continue
        keys, values = layer.keys, layer.values
        if keys is None or values is None or keys.shape[2] != prefix_len:
            raise ValueError(
                f"{type(model).__name__} does not keep its keys and values in the cache it is "
                "given; it cannot be served."
            )
        start = 0 if window is None else window.first_reached(prefix_len - 1)
        pairs.append((keys[0, :, start:], values[0, :, start:]))
    return pairs
