"""What the layers of a step give, made for all of them in one go.

Between two layers the weights of the model pass through the caches of the cores and drive out what
our Python needs, so that the same lines take longer there than in one loop over the layers
(`benchmarks/python_cost.py`).
"""

from functools import partial

from hf_granikv.lazy import LazyKeyValue
from hf_granikv.state import CacheState
from hf_granikv.step import ReadyLayer, Step
from hf_granikv.views import LayerStep, LayerTokens, PrivateTokens


def make_ready(state: CacheState, step: Step, first: int) -> None:
    """Notes in a step what its layers give, unless some layer has never stored any token.

    Args:
        state: Of the cache; rows go by parts.
        step: Its step, without a graph.
        first: The layer that began the step, and gives what it has made itself.
    """
    others = [i for i, kind in enumerate(state.layers) if kind.stores and i != first]
    if any(state.cold.storage(layer_idx) is None for layer_idx in others):
        return
    for layer_idx in others:
        own = own_tokens(state, step, layer_idx)
        of_layer = layer_step(state, step, layer_idx, own)
        step.ready[layer_idx] = _ready(state, step, of_layer)
        step.plan.to_come[layer_idx] = LayerTokens(of_layer.parts, own, of_layer.window)


def layer_step(state: CacheState, step: Step, layer_idx: int, own: PrivateTokens) -> LayerStep:
    """What the attention of one layer reads.

    Args:
        state: Of the cache; rows go by parts.
        step: The step under way.
        layer_idx: The layer.
        own: What it holds of the rows' own, with the tokens of this step.
    """
    parts, window = state.reads.parts(layer_idx), state.layers[layer_idx].window
    return LayerStep(layer_idx, step.plan, parts, own, window)


def own_tokens(state: CacheState, step: Step, layer_idx: int) -> PrivateTokens:
    """The rows' own tokens in one layer, where they lie in the pool."""
    cold, storages = state.cold, state.cold.storage(layer_idx)
    assert storages is not None, "the layer has stored tokens"
    brings_one = step.plan.q_len == 1 and step.write.source is None
    return PrivateTokens(
        storages,
        cold.table.slots,
        step.max_length,
        partial(cold.read, layer_idx),
        step.write.slots if brings_one else None,
    )


def _ready(state: CacheState, step: Step, of_layer: LayerStep) -> ReadyLayer:
    assert of_layer.private.storages is not None, "they are in the pool"
    keys, values = of_layer.private.storages
    num_rows, q_len, kv_len = step.plan.num_rows, step.plan.q_len, step.plan.kv_len
    (num_heads, _, key_dim), (num_value_heads, _, value_dim) = keys.shape, values.shape
    shapes = (num_rows, num_heads, q_len, key_dim), (num_rows, num_value_heads, q_len, value_dim)
    if state.forwards.is_in_graph:
        return ReadyLayer(*shapes, keys.dtype, of_layer, None, None)
    given = (
        LazyKeyValue.of_shape(of_layer, (num_rows, num_heads, kv_len, key_dim), keys, False),
        LazyKeyValue.of_shape(
            of_layer, (num_rows, num_value_heads, kv_len, value_dim), values, True
        ),
    )
    places = state.cold.places(of_layer.layer_idx, step.write, q_len)
    return ReadyLayer(*shapes, keys.dtype, of_layer, places, given)
