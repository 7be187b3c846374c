"""Running a model over a prefix, and what its layers keep of it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_granikv.announce import device_of_ids, forward_parameters
from hf_granikv.compat import CACHE_ARGUMENT
from hf_granikv.pools.row_states import LayerStates
from hf_granikv.recurrent import states_of
from hf_granikv.views import LayerKind

# a row that is exactly the prefix computes so many of its tokens again where layers keep states.
# Two, since models run a single token through other code, and in zamba2 with another result
NUM_REPEATED = 2


class Recording(NamedTuple):
    """What the layers of a model keep of a prefix.

    Attributes:
        keys_and_values: Per layer, `[num_kv_heads, num_kept, head_dim]` each: all tokens, or the
            last ones that a window can still see when the last token of the prefix is computed
            again. Layers that store nothing have no heads.
        states: The number of first tokens -> per layer with states, what they are after them.
    """

    keys_and_values: list[tuple[Tensor, Tensor]]
    states: dict[int, list[LayerStates]]


def record(
    model: PreTrainedModel, ids: Tensor, kinds: Sequence[LayerKind], chunk_size: int | None
) -> Recording:
    """Runs a model over a prefix, stopping for a record of the states if layers keep any.

    Args:
        model: The model, without its head on top where it has one.
        ids: `[1, prefix_len]` token ids.
        kinds: What each layer asks of a cache.
        chunk_size: The most tokens of one forward, which bounds its activations; None for all.

    Raises:
        ValueError: If the model does not keep its keys and values in the cache it is given.
    """
    prefix_len, ids = ids.shape[1], ids.to(device_of_ids(model))
    recorder = DynamicCache(config=model.config.get_text_config(decoder=True))
    has_windows = any(kind.window is not None for kind in kinds)
    if has_windows:
        # a local layer would keep one token less than a row needs that is exactly the prefix
        recorder.activate_past_recording()
    stateful = [recorder.layers[i] for i, kind in enumerate(kinds) if kind.num_states]
    # rows may always compute the whole prefix again
    states: dict[int, list[LayerStates]] = {0: []} if stateful else {}
    recorded = {prefix_len - NUM_REPEATED, prefix_len} if stateful else {prefix_len}
    start = 0
    for stop in _stops(prefix_len, chunk_size or prefix_len, recorded, has_states=bool(stateful)):
        if has_windows and start:
            # back to what windows still see: older versions make masks for no more than that
            recorder.crop(0)
        _run(model, ids[:, start:stop], start, recorder)
        start = stop
        if stateful and stop in recorded:
            # the next part writes over them
            states[stop] = [
                {key: t.clone() for key, t in states_of(layer).items()} for layer in stateful
            ]
    pairs = [
        _kept(model, layer, kind, ids) for layer, kind in zip(recorder.layers, kinds, strict=True)
    ]
    return Recording(pairs, states)


def _stops(prefix_len: int, size: int, recorded: set[int], *, has_states: bool) -> list[int]:
    """Where forwards end: at `recorded` and after at most about `size` tokens each.

    Where layers keep states no forward is of a single token; it may be of one more than `size`.
    """
    stops, last = {stop for stop in recorded if stop > 0}, 0
    for stop in range(size, prefix_len, size):
        is_lone = stop - last < 2 or any(abs(stop - other) == 1 for other in recorded)
        if not (has_states and is_lone):
            stops.add(stop)
            last = stop
    return sorted(stops)


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
    if keys is None or values is None or layer.get_seq_length() != prefix_len:
        raise ValueError(
            f"{type(model).__name__} does not keep its keys and values in the cache it is given; "
            "it cannot be served."
        )
    start = 0 if kind.window is None else kind.window.first_reached(prefix_len - 1)
    num_kept = prefix_len - start
    return keys[0, :, -num_kept:], values[0, :, -num_kept:]
