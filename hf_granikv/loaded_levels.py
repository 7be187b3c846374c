"""Prefixes that were read from a file: whether they go with a cache, and how it comes to hold them."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_granikv.errors import PrefixFileError
from hf_granikv.held_prefixes import HeldPrefixes
from hf_granikv.lookup import PrefixLookup
from hf_granikv.pools import Prefix
from hf_granikv.pools.hot import Saver
from hf_granikv.prefix_file import PrefixLevel
from hf_granikv.views import LayerKind


def check_levels(
    path: str | os.PathLike[str],
    levels: Sequence[PrefixLevel],
    kinds: Sequence[LayerKind],
    beside: Prefix | None,
) -> None:
    """Checks that a chain holds what layers need of a prefix.

    Args:
        path: Where it was read.
        levels: From the first ancestor to the prefix.
        kinds: What each layer stores and sees.
        beside: A prefix of the same model, if there is one.

    Raises:
        PrefixFileError: Naming the first thing that does not fit.
    """
    fault = next(_faults(levels, kinds, beside), None)
    if fault is not None:
        raise PrefixFileError(
            f"{path} is whole, but does not go with the layers of this model: {fault}. Prefill and "
            "save the prefix anew."
        )


def without_held(
    levels: Sequence[PrefixLevel], held: HeldPrefixes
) -> tuple[Prefix | None, Sequence[PrefixLevel]]:
    """Gives the last prefix of a chain that is held already, and what comes after it."""
    lookup, parent = PrefixLookup(held.all), None
    for done, level in enumerate(levels):
        found = lookup.get(parent, level.salt, level.token_ids.numpy())
        if found is None:
            return parent, levels[done:]
        parent = found
    return parent, ()


def moved(
    level: PrefixLevel, kinds: Sequence[LayerKind], devices: Sequence[torch.device]
) -> PrefixLevel:
    """The same level with each layer's tensors on a device; what lies there already is not copied."""
    stateful = [device for device, kind in zip(devices, kinds, strict=True) if kind.num_states]
    # never inference tensors, which the pool would copy once more
    with torch.inference_mode(False):
        return replace(
            level,
            keys=[t.to(device) for t, device in zip(level.keys, devices, strict=True)],
            values=[t.to(device) for t, device in zip(level.values, devices, strict=True)],
            states={
                at: [
                    {key: t.to(device) for key, t in layer.items()}
                    for layer, device in zip(layers, stateful, strict=False)
                ]
                for at, layers in level.states.items()
            },
        )


def hold(
    parent: Prefix | None, levels: Sequence[PrefixLevel], held: HeldPrefixes, saver: Saver
) -> Prefix:
    """Seals a chain, and holds the last prefix of it; nothing is held if that fails.

    Args:
        parent: The prefix that the first level extends, if any.
        levels: What to seal, if anything.
        held: What the cache holds; it takes one hold more.
        saver: See `Prefix`.
    """
    hot, leaf = held.hot, parent
    with ExitStack() as holds:
        for level in levels:
            pairs = zip(level.keys, level.values, strict=True)
            leaf = hot.seal(
                level.token_ids,
                pairs,
                level.states,
                parent=leaf,
                salt=level.salt,
                num_fused=level.num_fused,
                saver=saver,
            )
            # a child holds its parent
            holds.callback(hot.release, leaf)
        assert leaf is not None
        hot.acquire(leaf)
        held.take(leaf)
    return leaf


def _faults(
    levels: Sequence[PrefixLevel], kinds: Sequence[LayerKind], beside: Prefix | None
) -> Iterator[str]:
    if not levels:
        yield "it has no tokens"
    stops, num_stateful = [0], sum(bool(kind.num_states) for kind in kinds)
    shapes = None if beside is None else list(map(_shape, beside.keys, beside.values))
    for level in levels:
        stop = stops[-1] + len(level.token_ids)
        if not len(level.token_ids):
            yield "one of its levels has no tokens"
        if level.salt != levels[0].salt:
            yield f"its salt is {levels[0].salt!r} and {level.salt!r}"
        if stops[-1] - level.num_fused not in stops:
            yield f"it keeps {level.num_fused} tokens of its parents, which end at {stops}"
        if len(level.keys) != len(kinds):
            yield f"it has {len(level.keys)} layers, the model {len(kinds)}"
            return
        for layer_idx, kind in enumerate(kinds):
            fault = _fault_of_layer(level, layer_idx, kind, stops[-1] - level.num_fused, stop)
            if fault is not None:
                yield f"layer {layer_idx} {fault}"
        found = list(map(_shape, level.keys, level.values))
        if shapes is not None and found != shapes:
            other = next(
                i for i, pair in enumerate(zip(found, shapes, strict=True)) if len({*pair}) > 1
            )
            yield f"layer {other} has heads of {found[other]}, others of {shapes[other]}"
        shapes = found
        if num_stateful and stop not in level.states:
            yield f"it has no states after {stop} tokens"
        for at, of_layers in level.states.items():
            # after no tokens there are none
            if at and len(of_layers) != num_stateful:
                yield f"it has states of {len(of_layers)} layers, not of {num_stateful}"
        stops.append(stop)


def _fault_of_layer(
    level: PrefixLevel, layer_idx: int, kind: LayerKind, reads_from: int, stop: int
) -> str | None:
    keys, values, start = level.keys[layer_idx], level.values[layer_idx], level.starts[layer_idx]
    if keys.ndim != 3 or values.ndim != 3 or keys.shape[:2] != values.shape[:2]:
        return f"has keys of {tuple(keys.shape)} and values of {tuple(values.shape)}"
    if not kind.stores:
        return f"has {keys.shape[0]} heads, it should have none" if keys.numel() else None
    if not keys.numel() or start + keys.shape[1] != stop:
        return f"holds {keys.shape[1]} tokens from {start} on, not up to {stop}"
    needed = reads_from
    if kind.window is not None:
        needed = max(needed, kind.window.first_reached(stop - 1))
    if not reads_from <= start <= needed:
        return f"holds tokens from {start} on, and is read from {needed} on"
    return None


def _shape(keys: Tensor, values: Tensor) -> tuple[Any, ...]:
    """What is alike in all prefixes of a model."""
    return len(keys), keys.shape[2], values.shape[2], keys.dtype, values.dtype
