"""Running a model over a prefix, and what its layers keep of it."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_granikv.announce import device_of_ids, forward_parameters
from hf_granikv.compat import CACHE_ARGUMENT
from hf_granikv.layer import AsymmetricPagedLayer
from hf_granikv.pools.row_states import LayerStates
from hf_granikv.recurrent import states_of
from hf_granikv.views import LayerKind

# a row that is exactly the prefix computes so many of its tokens again where layers keep states.
# Two, since models run a single token through other code, and in zamba2 with another result
NUM_REPEATED = 2


class Extended(Protocol):
    """A cache of this package that goes on from a prefix."""

    layers: list[Any]

    def announce(self, module: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Reads the arguments of a coming forward pass."""

    def settle(self, *, is_complete: bool = False) -> None:
        """Ends a forward pass."""


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
    model: PreTrainedModel,
    ids: Tensor,
    kinds: Sequence[LayerKind],
    chunk_size: int | None,
    extended: Extended | None = None,
    start: int = 0,
) -> Recording:
    """Runs a model over a prefix, stopping for a record of the states if layers keep any.

    Args:
        model: The model, without its head on top where it has one.
        ids: `[1, prefix_len]` token ids.
        kinds: What each layer asks of a cache.
        chunk_size: The most tokens of one forward, which bounds its activations; None for all.
        extended: The cache to go on with, whose rows are one that reads the parent; None = start
            from nothing, with transformers' own cache.
        start: Tokens of the parent and all that it extends.

    Raises:
        ValueError: If the model does not keep its keys and values in the cache it is given.
    """
    num_tokens, ids = ids.shape[1], ids.to(device_of_ids(model))
    has_windows = any(kind.window is not None for kind in kinds)
    recorder = extended or _fresh(model, kinds)
    stateful = [recorder.layers[i] for i, kind in enumerate(kinds) if kind.num_states]
    # rows may always compute the whole prefix again
    states: dict[int, list[LayerStates]] = {0: []} if stateful and not start else {}
    recorded = {num_tokens - NUM_REPEATED, num_tokens} if stateful else {num_tokens}
    done = 0
    for stop in _stops(num_tokens, chunk_size or num_tokens, recorded, has_states=bool(stateful)):
        if isinstance(recorder, DynamicCache) and has_windows and done:
            # back to what windows still see: older versions make masks for no more than that
            recorder.crop(0)
        _run(model, ids[:, done:stop], start + done, recorder)
        done = stop
        if stateful and stop in recorded:
            # the next part writes over them
            states[start + stop] = [
                {key: t.clone() for key, t in states_of(layer).items()} for layer in stateful
            ]
    pairs = [
        _kept(model, recorder, layer_idx, kind, start, ids) for layer_idx, kind in enumerate(kinds)
    ]
    return Recording(pairs, states)


def _fresh(model: PreTrainedModel, kinds: Sequence[LayerKind]) -> DynamicCache:
    recorder = DynamicCache(config=model.config.get_text_config(decoder=True))
    if any(kind.window is not None for kind in kinds):
        # a local layer would keep one token less than a row needs that is exactly the prefix
        recorder.activate_past_recording()
    return recorder


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


def _run(model: PreTrainedModel, ids: Tensor, start: int, recorder: Any) -> None:
    options: dict[str, Any] = {"use_cache": True, CACHE_ARGUMENT: recorder}
    if "position_ids" in forward_parameters(model.base_model):
        # as generate counts; RoBERTa's own count starts elsewhere
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)
        options["position_ids"] = positions[None]
    options["input_ids"] = ids
    is_ours = not isinstance(recorder, DynamicCache)
    if is_ours:
        options = recorder.announce(model, options)
    with torch.no_grad():
        model.base_model(**options)
    if is_ours:
        recorder.settle(is_complete=True)


def _kept(
    model: PreTrainedModel,
    recorder: Any,
    layer_idx: int,
    kind: LayerKind,
    start: int,
    ids: Tensor,
) -> tuple[Tensor, Tensor]:
    num_tokens, layer = ids.shape[1], recorder.layers[layer_idx]
    if not kind.stores or not isinstance(layer, (DynamicLayer, AsymmetricPagedLayer)):
        nothing = ids.new_empty(0, num_tokens, 0)
        return nothing, nothing
    keys, values = (
        layer.private() if isinstance(layer, AsymmetricPagedLayer) else (layer.keys, layer.values)
    )
    # where the windows are cropped to, the layer still knows how many there were
    is_ours = isinstance(layer, AsymmetricPagedLayer)
    if keys is None or values is None or (not is_ours and layer.get_seq_length() != num_tokens):
        raise ValueError(
            f"{type(model).__name__} does not keep its keys and values in the cache it is given; "
            "it cannot be served."
        )
    first = 0
    if kind.window is not None:
        first = max(0, kind.window.first_reached(start + num_tokens - 1) - start)
    num_kept = num_tokens - first
    return keys[0, :, keys.shape[2] - num_kept :], values[0, :, values.shape[2] - num_kept :]
