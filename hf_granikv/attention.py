"""The attention function: prefix once per group, suffix per row, merged by log-sum-exp."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_granikv.backends import BACKENDS, PrefixBackend
from hf_granikv.dispatch import Decision, Dispatcher
from hf_granikv.kernels.merge_states import merged_out
from hf_granikv.kernels.suffix_attention import SuffixMask, prepare_mask, suffix_attention
from hf_granikv.lazy import LazyKeyValue
from hf_granikv.masks import granikv_mask, is_plain_causal
from hf_granikv.views import GroupShape, LayerStep

ATTENTION_NAME = "granikv"
# SDPA, to which all but the shared path goes, refuses softcap only since transformers 5.24
_UNSERVED = {"s_aux": "attention sinks", "softcap": "soft-capped scores"}


def register() -> None:
    """Makes `attn_implementation="granikv"` known to transformers, with its masks."""
    AttentionInterface.register(ATTENTION_NAME, granikv_attention)
    # without a mask function of the same name every mask would silently be None
    AttentionMaskInterface.register(ATTENTION_NAME, granikv_mask)


def granikv_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attends to a shared prefix and to private suffixes; anything else goes to torch's SDPA.

    Args:
        module: The attention layer.
        query: `[rows, num_q_heads, q_len, head_dim]`.
        key: `[rows, num_kv_heads, kv_len, head_dim]`, lazy if it comes from a cache with a prefix.
        value: Likewise.
        attention_mask: `[rows, 1, q_len, kv_len]`; a lazy key carries its own.
        scaling: Factor on the scores, `head_dim ** -0.5` by default.
        dropout: Dropout on the weights; the shared path has none.
        kwargs: The other arguments of transformers' attention interface.

    Returns:
        `[rows, q_len, num_q_heads, head_dim]` in the dtype of the query, and None.

    Raises:
        NotImplementedError: For attention sinks and soft-capped scores, which no path serves.
    """
    for name, what in _UNSERVED.items():
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"attn_implementation='granikv' does not serve {what} ({name}); load this "
                "model with attn_implementation='eager'."
            )
    if isinstance(key, LazyKeyValue) and isinstance(value, LazyKeyValue):
        reasons = _dense_reasons(query, key.layer_step, attention_mask, dropout, kwargs)
        if not reasons:
            return _shared(query, key.layer_step, scaling or query.shape[-1] ** -0.5), None
        key = key.materialize(f"granikv ({', '.join(reasons)})")
        value = value.materialize(f"granikv ({', '.join(reasons)})")
    out: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return out


def _dense_reasons(
    query: Tensor, step: LayerStep, mask: Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> list[str]:
    reasons = ["position_bias is set"] if kwargs.get("position_bias") is not None else []
    if dropout:
        reasons.append(f"dropout is {dropout}")
    if not is_plain_causal(mask):
        reasons.append("the layer brings a mask of its own")
    if not query.dtype == step.suffix_keys.dtype == step.suffix_values.dtype:
        reasons.append(f"the query is {query.dtype}, as under autocast")
    if step.plan.dense_reason is not None:
        reasons.append(step.plan.dense_reason)
    return reasons


@dataclass(frozen=True, slots=True)
class _StepWork:
    """What attention works out at the first layer of a step and keeps for the others."""

    backend: PrefixBackend | None
    mask: SuffixMask | None


def _shared(query: Tensor, step: LayerStep, scale: float) -> Tensor:
    scratch, key = step.plan.scratch, (query.shape, step.prefix_keys.shape[0], query.dtype)
    work = scratch.get(key)
    if work is None:
        work = scratch[key] = _prepare(query, step, is_first=not scratch)
    states = [
        suffix_attention(query, step.suffix_keys, step.suffix_values, scale=scale, mask=work.mask)
    ]
    if work.backend is not None:
        shared = work.backend.run(query, step.prefix_keys, step.prefix_values, scale=scale)
        states.insert(0, shared)
    return merged_out(states).transpose(1, 2).to(query.dtype).contiguous()


def _prepare(query: Tensor, step: LayerStep, *, is_first: bool) -> _StepWork:
    plan, keys = step.plan, step.prefix_keys
    mask = None
    if plan.suffix_mask is not None:
        mask = prepare_mask(plan.suffix_mask, query.dtype)
    if not plan.shared_len:
        return _StepWork(None, mask)
    num_rows, num_q_heads, q_len, head_dim = query.shape
    num_kv_heads, prefix_len, _ = keys.shape
    shape = GroupShape(
        num_rows=num_rows,
        q_len=q_len,
        prefix_len=prefix_len,
        num_kv_heads=num_kv_heads,
        gqa_ratio=num_q_heads // num_kv_heads,
        head_dim=head_dim,
        dtype_bytes=keys.element_size(),
    )
    decision = _dispatcher(plan.dispatch).choose(shape, keys.device.type)
    if is_first:
        plan.journal.note_backend(decision.backend_name, _described(shape, decision))
    return _StepWork(BACKENDS[decision.backend_name], mask)


@cache
def _dispatcher(choice: str) -> Dispatcher:
    return Dispatcher(choice, backends=BACKENDS)


def _described(shape: GroupShape, decision: Decision) -> str:
    predicted = ", ".join(f"{name} {1e6 * s:.0f} us" for name, s in decision.predicted_s.items())
    refused = "".join(
        f"; {name} refused: {', '.join(why)}" for name, why in decision.refused.items()
    )
    return (
        f"{shape.num_rows} rows x {shape.q_len} tokens over {shape.prefix_len}, "
        f"{decision.regime}-bound, predicted per layer: {predicted}{refused}"
    )
