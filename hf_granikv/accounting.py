"""What a cache holds, in bytes of real storages."""

from collections.abc import Sequence
from dataclasses import dataclass

from hf_granikv.pools import Prefix
from hf_granikv.pools.storage import KeysAndValues
from hf_granikv.state import CacheState
from hf_granikv.views import LayerKind
from hf_granikv.wording import counted


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a cache holds.

    Attributes:
        hot_bytes: Storages of the prefixes.
        cold_bytes: Storages of private tokens, free slots and tables included.
        peak_bytes: The largest sum of the two since the last `reset`.
        hot_tokens: Tokens of the prefixes, each counted once.
        cold_tokens: Private tokens, one that several rows share counted once.
        dense_equivalent_bytes: What `DynamicCache` would hold for the same rows.
        prefix_groups: Groups of rows that read one prefix.
        backend_steps: Forward passes whose prefix part ran in each backend.
    """

    hot_bytes: int
    cold_bytes: int
    peak_bytes: int
    hot_tokens: int
    cold_tokens: int
    dense_equivalent_bytes: int
    prefix_groups: int
    backend_steps: dict[str, int]


def stats_of(state: CacheState) -> CacheStats:
    """What is held now."""
    cold, levels = state.cold, state.prefixes.levels
    hot_bytes = sum(level.num_bytes for level in levels)
    dense_bytes = state.num_rows * _dense_bytes_per_row(state) + state.row_states.num_bytes
    return CacheStats(
        hot_bytes=hot_bytes,
        cold_bytes=state.private_bytes,
        peak_bytes=max(state.peak_bytes, cold.peak_bytes, state.private_bytes) + hot_bytes,
        hot_tokens=sum(level.num_tokens for level in levels),
        cold_tokens=cold.num_tokens,
        dense_equivalent_bytes=dense_bytes,
        prefix_groups=len(state.reads.readings()),
        backend_steps=dict(state.journal.backend_steps),
    )


def described(state: CacheState) -> str:
    """Who reads which prefix, in one line."""
    if not state.prefixes:
        return f"{counted(state.num_rows, 'row')} over no prefix"
    if not state.num_rows:
        return f"0 rows over {counted(len(state.prefixes.levels), 'prefix', 'prefixes')} held"
    readings = [group for group, _ in state.reads.readings()]
    if len(readings) == 1 and readings[0].rows is None:
        return f"{counted(state.num_rows, 'row')} over a prefix of {counted(readings[0].stop, 'token')}"
    described = [
        f"{counted(g.num_rows_of(state.num_rows), 'row')} over tokens {g.start} to {g.stop}"
        for g in readings
    ]
    prefixes = counted(len(readings), "prefix", "prefixes")
    return f"{counted(state.num_rows, 'row')} over {prefixes} ({'; '.join(described)})"


def dense_row_bytes(layers: Sequence[LayerKind], prefix: Prefix, num_tokens: int) -> int:
    """What a `DynamicCache` would hold for one row.

    Args:
        layers: Of the model.
        prefix: Any prefix of the model, for the shapes.
        num_tokens: Of the whole row.
    """
    states = next(iter(prefix.states.values()), ())
    of_states = sum(t.nbytes for layer in states for t in layer.values())
    return _dense_bytes(layers, list(zip(prefix.keys, prefix.values, strict=True)), num_tokens) + (
        of_states
    )


def _dense_bytes_per_row(state: CacheState) -> int:
    prefix = state.prefixes.any
    if prefix is None:
        held = [state.cold.storage(layer_idx) for layer_idx in range(len(state.layers))]
    else:
        held = list(zip(prefix.keys, prefix.values, strict=True))
    return _dense_bytes(state.layers, held, state.num_held)


def _dense_bytes(
    layers: Sequence[LayerKind], held: Sequence[KeysAndValues | None], num_tokens: int
) -> int:
    num_bytes = 0
    for layer, pair in zip(layers, held, strict=True):
        seen = num_tokens if layer.window is None else min(num_tokens, layer.window.size - 1)
        num_bytes += seen * sum(t.shape[0] * t.shape[2] * t.element_size() for t in pair or ())
    return num_bytes
