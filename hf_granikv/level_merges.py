"""Storing a prefix and the only one that goes on from it as one: nothing is computed."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_granikv.held_prefixes import HeldPrefixes
from hf_granikv.level_cuts import follow, let_go
from hf_granikv.pools import Prefix
from hf_granikv.views import LayerKind


def merge(
    held: HeldPrefixes, level: Prefix, child: Prefix, layers: Sequence[LayerKind]
) -> dict[Prefix, Prefix]:
    """Puts one prefix in the place of two.

    Args:
        held: Holds what takes the place, and lets go of the others.
        level: A prefix that keeps no states.
        child: The only one that extends it.
        layers: What each layer sees.

    Returns:
        For the child, and for all held that extend it, what readers have to read instead.
    """
    seen = [
        layer.window.first_reached(child.stop - 1) if layer.window is not None else 0
        for layer in layers
    ]
    merged = held.hot.seal(
        torch.cat([level.token_ids, child.token_ids]),
        zip(
            _joined(level, child, seen, level.keys, child.keys),
            _joined(level, child, seen, level.values, child.values),
            strict=True,
        ),
        parent=level.parent,
        salt=child.salt,
        num_fused=level.start - min(level.reads_from, child.reads_from),
        saver=child.saver,
    )
    held.take(merged)
    let_go(held, [level, child])
    return {child: merged} | follow(held, {child: merged})


def _joined(
    level: Prefix,
    child: Prefix,
    seen: Sequence[int],
    before: Sequence[Tensor],
    after: Sequence[Tensor],
) -> Iterator[Tensor]:
    """What layers keep of both, of their keys or of their values.

    Args:
        level: See `merge`.
        child: Likewise.
        seen: Per layer, the first position that is seen from the last one.
        before: `[num_kv_heads, num_kept, head_dim]` each, of the level.
        after: Likewise, of the child.
    """
    for layer_idx, own in enumerate(after):
        stored, first = level.starts[layer_idx], child.starts[layer_idx]
        start = max(stored, seen[layer_idx])
        # the child has all of it: it is longer than the window, or keeps tokens of its parents
        if first > child.start or first <= start:
            yield own
        else:
            yield torch.cat([before[layer_idx][:, start - stored : first - stored], own], dim=1)
