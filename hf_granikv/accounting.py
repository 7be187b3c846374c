"""What a cache holds, in bytes of real storages."""

from hf_granikv.state import CacheState
from hf_granikv.views import CacheStats


def stats_of(state: CacheState) -> CacheStats:
    """What is held now."""
    prefix, cold = state.prefix, state.cold
    hot_bytes = 0 if prefix is None else prefix.num_bytes
    dense_bytes = state.num_rows * _dense_bytes_per_row(state) + state.row_states.num_bytes
    return CacheStats(
        hot_bytes=hot_bytes,
        cold_bytes=state.private_bytes,
        peak_bytes=max(state.peak_bytes, cold.peak_bytes, state.private_bytes) + hot_bytes,
        hot_tokens=0 if prefix is None else prefix.num_tokens,
        cold_tokens=cold.num_tokens,
        dense_equivalent_bytes=dense_bytes,
        prefix_groups=int(prefix is not None and state.num_rows > 0),
        backend_steps=dict(state.journal.backend_steps),
    )


def _dense_bytes_per_row(state: CacheState) -> int:
    num_bytes = 0
    for layer_idx, layer in enumerate(state.layers):
        prefix = state.prefix
        held = (
            state.cold.storage(layer_idx)
            if prefix is None
            else (prefix.keys[layer_idx], prefix.values[layer_idx])
        )
        num_tokens = state.num_held
        if layer.window is not None:
            num_tokens = min(num_tokens, layer.window.size - 1)
        num_bytes += num_tokens * sum(
            t.shape[0] * t.shape[2] * t.element_size() for t in held if t is not None
        )
    return num_bytes
