"""Keys and values that are put together only if somebody needs them in one piece."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hf_granikv.views import LayerStep

# what may be asked of a tensor without looking at its content
_METADATA: frozenset[Any] = frozenset(
    getattr(getattr(torch.Tensor, name), "__get__", getattr(torch.Tensor, name))
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "is_meta")
) | {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.is_floating_point, torch.Tensor.numel}


class LazyKeyValue(torch.Tensor):
    """All keys, or all values, of one layer in one forward pass; without storage.

    It has the shape that `DynamicCache.update` would return,
    `[num_rows, num_kv_heads, kv_len, head_dim]`. The attention function of this package reads
    `layer_step` and never builds that tensor. Any other torch function gets the dense tensor,
    built on first use and noted in the journal of the cache.
    """

    layer_step: LayerStep
    _is_value: bool
    _dense: Tensor | None

    @staticmethod
    def __new__(cls, layer_step: LayerStep, *, is_value: bool) -> "LazyKeyValue":
        """Wraps one side of `layer_step`."""
        like = layer_step.suffix_values if is_value else layer_step.suffix_keys
        num_rows, num_heads, _, head_dim = like.shape
        shape = (num_rows, num_heads, layer_step.plan.kv_len, head_dim)
        lazy: LazyKeyValue = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=like.dtype, device=like.device
        )
        lazy.layer_step = layer_step
        lazy._is_value = is_value
        lazy._dense = None
        return lazy

    def materialize(self, asked_by: str) -> Tensor:
        """The dense tensor, in the columns of the mask that the model was given.

        Args:
            asked_by: Who needs it, for the journal.

        Raises:
            ValueError: If the plan says that this would go wrong.
        """
        if self._dense is None:
            step, plan = self.layer_step, self.layer_step.plan
            if plan.dense_refusal is not None:
                raise ValueError(f"{asked_by} needs keys and values densely: {plan.dense_refusal}")
            plan.journal.note_dense(step.layer_idx, asked_by)
            prefix = step.prefix_values if self._is_value else step.prefix_keys
            suffix = step.suffix_values if self._is_value else step.suffix_keys
            if step.prefix_start:
                # no query of a local layer sees these; their columns are there all the same
                unseen = prefix.new_zeros(prefix.shape[0], step.prefix_start, prefix.shape[2])
                prefix = torch.cat([unseen, prefix], dim=1)
            everywhere = prefix.unsqueeze(0).expand(suffix.shape[0], -1, -1, -1)
            index = plan.column_index
            if index is not None and index.shape[1] == plan.kv_len:
                self._dense = _columns(torch.cat([everywhere, suffix], dim=2), index)
            else:
                suffix = suffix if index is None else _columns(suffix, index)
                self._dense = torch.cat([everywhere, suffix], dim=2)
        return self._dense

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answers questions about shape and dtype; hands everything else the dense tensor."""
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is torch.Tensor.to and _stays(*args, **(kwargs or {})):
            return args[0]
        name = getattr(func, "__qualname__", None) or getattr(func, "__name__", repr(func))
        dense_args, dense_kwargs = tree_map_only(
            LazyKeyValue, lambda lazy: lazy.materialize(name), (args, kwargs or {})
        )
        return func(*dense_args, **dense_kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Serves callers below the Python function level."""
        dense_args, dense_kwargs = tree_map_only(
            LazyKeyValue, lambda lazy: lazy.materialize(str(func)), (args, kwargs or {})
        )
        return func(*dense_args, **dense_kwargs)


def _stays(lazy: Any, *targets: Any, **named: Any) -> bool:
    """Whether `Tensor.to` with these arguments leaves a lazy tensor as it is."""
    return not named and all(target in (lazy.device, lazy.dtype) for target in targets)


def _columns(tokens: Tensor, index: Tensor) -> Tensor:
    """Tokens `[num_rows, num_heads, num_tokens, head_dim]` at `[num_rows, num_columns]` indices."""
    if not tokens.shape[2]:  # columns of pads only
        tokens = tokens.new_zeros(*tokens.shape[:2], 1, tokens.shape[3])
    return tokens.gather(
        2, index[:, None, :, None].expand(-1, tokens.shape[1], -1, tokens.shape[3])
    )
