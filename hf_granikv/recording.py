"""Computing a prefix, with whatever the layers of the model keep of it."""

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_granikv.announce import forward_parameters
from hf_granikv.compat import CACHE_ARGUMENT
from hf_granikv.pools.row_states import LayerStates
from hf_granikv.recurrent import states_of

# a row that is exactly the prefix computes so many of its tokens again. Two, since models run a
# single token through other code than several, and in zamba2 with another result
NUM_REPEATED = 2


class Recording(NamedTuple):
    """What a model keeps of a prefix.

    Attributes:
        keys_and_values: Per layer, two `[num_kv_heads, num_tokens, head_dim]` tensors, empty for a
            layer without attention.
        states: The number of first tokens -> per stateful layer, its states after them.
    """

    keys_and_values: list[tuple[Tensor, Tensor]]
    states: dict[int, list[LayerStates]]


def record_prefix(model: PreTrainedModel, ids: Tensor, stateful: Collection[int] = ()) -> Recording:
    """Runs a model over a prefix.

    Args:
        model: The model.
        ids: `[1, num_tokens]`.
        stateful: The layers that keep states. With any, the prefix is computed in two parts, so
            that the states before its last tokens are known too.

    Raises:
        ValueError: If the model does not keep its keys and values in the cache it is given.
    """
    num_tokens = ids.shape[1]
    recorder = DynamicCache(config=model.config.get_text_config(decoder=True))
    layers: list[Any] = recorder.layers
    stops = {num_tokens - NUM_REPEATED, num_tokens} if stateful else {num_tokens}
    states: dict[int, list[LayerStates]] = {0: []} if stateful else {}
    start = 0
    for stop in sorted(stop for stop in stops if stop > 0):
        _run(model, ids[:, start:stop], start, recorder)
        if stateful:
            now = [states_of(layers[layer_idx]) for layer_idx in stateful]
            # the next part writes over them
            states[stop] = [{key: t.clone() for key, t in layer.items()} for layer in now]
        start = stop
    if recorder.get_seq_length() != num_tokens:
        raise ValueError(
            f"{type(model).__name__} does not keep its keys and values in the cache it is given; "
            "it cannot be served."
        )
    nothing = torch.empty(0, 0, 0, device=ids.device)
    pairs = [
        (nothing, nothing)
        if getattr(layer, "keys", None) is None
        else (layer.keys[0], layer.values[0])
        for layer in layers
    ]
    return Recording(pairs, states)


def _run(model: PreTrainedModel, ids: Tensor, start: int, recorder: DynamicCache) -> None:
    options: dict[str, Any] = {"use_cache": True, CACHE_ARGUMENT: recorder}
    if "position_ids" in forward_parameters(model.base_model):
        # as generate counts; RoBERTa's own count starts elsewhere
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)
        options["position_ids"] = positions[None]
    with torch.no_grad():
        model.base_model(input_ids=ids, **options)
