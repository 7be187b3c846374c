"""What a cache holds, in bytes of real storages."""

from hf_granikv.state import CacheState
from hf_granikv.views import CacheStats


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
        return f"{state.num_rows} rows over no prefix"
    if not state.num_rows:
        return f"0 rows over {_counted(len(state.prefixes.levels), 'prefix', 'prefixes')} held"
    readings = [group for group, _ in state.reads.readings()]
    if len(readings) == 1 and readings[0].rows is None:
        return f"{state.num_rows} rows over a prefix of {readings[0].stop} tokens"
    described = [
        f"{_counted(state.num_rows if g.rows is None else len(g.rows), 'row', 'rows')} over tokens "
        f"{g.start} to {g.stop}"
        for g in readings
    ]
    return f"{state.num_rows} rows over {len(readings)} prefixes ({'; '.join(described)})"


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _dense_bytes_per_row(state: CacheState) -> int:
    num_bytes = 0
    for layer_idx, layer in enumerate(state.layers):
        prefix = state.prefixes.any
        held = (
            state.cold.storage(layer_idx)
            if prefix is None
            else (prefix.keys[layer_idx], prefix.values[layer_idx])
        )
        num_tokens = state.num_held
        if layer.window is not None:
            num_tokens = min(num_tokens, layer.window.size - 1)
        num_bytes += num_tokens * sum(
            t.shape[0] * t.shape[2] * t.element_size() for t in held or ()
        )
    return num_bytes
