"""What a cache holds, in bytes of real storages."""

from hf_granikv.state import CacheState
from hf_granikv.views import CacheStats


def stats_of(state: CacheState) -> CacheStats:
    """What is held now."""
    prefix, cold, row_states = state.prefix, state.cold, state.row_states
    hot_bytes = 0 if prefix is None else prefix.num_bytes
    per_column = cold.bytes_per_token if prefix is None else prefix.bytes_per_token
    dense_bytes = state.num_rows * state.num_held * per_column + row_states.num_bytes
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
