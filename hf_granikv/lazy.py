"""Keys and values that are put together only if somebody needs them in one piece."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hf_granikv.compat import outside_graphs
from hf_granikv.errors import NotPackableError
from hf_granikv.tokenwise import TokenSplit, plan
from hf_granikv.views import LayerStep, PrivateTokens

# what may be asked of a tensor without looking at its content
_METADATA: frozenset[Any] = frozenset(
    getattr(getattr(torch.Tensor, name), "__get__", getattr(torch.Tensor, name))
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "is_meta")
) | {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.is_floating_point, torch.Tensor.numel}


class LazyKeyValue(torch.Tensor):
    """All keys, or all values, of one layer in one forward pass; in parts.

    It has the shape that `DynamicCache.update` would return,
    `[num_rows, num_kv_heads, kv_len, head_dim]`. The attention function of this package reads the
    parts, prefixes and suffix, and never builds that tensor. A function that treats every token alike gives another lazy
    tensor (`tokenwise`); any other torch function gets the dense one, built on first use and noted
    in the journal of the cache.

    Attributes:
        METADATA: The torch functions that ask about shape or dtype only.
        layer_step: Whose keys and values these are.
        token_dim: The dimension of the tokens.
        is_value: Whether these are values.
        kept_dtype: `dtype`, which costs a call into torch.
        is_buffer: Whether the parts are new memory that a model fills.
        is_written: Whether the dense tensor was written to, which the parts do not show.
    """

    METADATA = _METADATA

    layer_step: LayerStep
    token_dim: int = 2
    is_value: bool
    kept_dtype: torch.dtype
    is_buffer: bool = False
    is_written: bool = False
    # what the model has made of the parts, prefixes and suffix; None as long as they are the step's
    _parts: tuple[tuple[Tensor, ...], Tensor] | None = None
    _dense: Tensor | None = None

    @staticmethod
    def __new__(cls, layer_step: LayerStep, *, is_value: bool) -> "LazyKeyValue":
        """Wraps one side of `layer_step`."""
        shape, like = layer_step.private.like(is_value)
        return cls.of_shape(
            layer_step, (*shape[:2], layer_step.plan.kv_len, shape[3]), like, is_value
        )

    @classmethod
    def of_shape(
        cls, layer_step: LayerStep, shape: Sequence[int], like: Tensor, is_value: bool
    ) -> "LazyKeyValue":
        """Wraps one side of `layer_step` whose shape is known, in the dtype of `like`, on its device."""
        dtype = like.dtype
        lazy: LazyKeyValue = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=like.device
        )
        lazy.layer_step, lazy.is_value, lazy.kept_dtype = layer_step, is_value, dtype
        return lazy

    def _of_parts(
        self, prefixes: tuple[Tensor, ...], suffix: Tensor, token_dim: int, *, is_buffer: bool
    ) -> "LazyKeyValue":
        plan = self.layer_step.plan
        plan.touched.add(self.layer_step.layer_idx)
        shape = list(suffix.shape)
        shape[token_dim] = plan.kv_len
        lazy = self.of_shape(self.layer_step, shape, suffix, self.is_value)
        lazy.token_dim, lazy.is_buffer, lazy._parts = token_dim, is_buffer, (prefixes, suffix)
        return lazy

    @property
    def is_as_stored(self) -> bool:
        """Whether the parts are those of the layer step, and not what a model made of them."""
        return self._parts is None

    @property
    def suffix(self) -> Tensor:
        """`[num_rows, num_kv_heads, max_suffix_len, head_dim]` what is private.

        Tokens may have moved to another dimension.
        """
        if self._parts is None:
            return self.layer_step.private.tensors[self.is_value]
        return self._parts[1]

    @property
    def prefixes(self) -> tuple[Tensor, ...]:
        """Per part of the layer step, `[1, num_kv_heads, num_stored, head_dim]` what its group shares.

        Tokens lie where they do in `suffix`.
        """
        if self._parts is not None:
            return self._parts[0]
        parts = self.layer_step.parts
        return tuple((part.values if self.is_value else part.keys)[None] for part in parts)

    def materialize(self, asked_by: str) -> Tensor:
        """The dense tensor, in the columns of the mask that the model was given.

        Args:
            asked_by: Who needs it, for the journal.

        Raises:
            ValueError: If the plan says that this would go wrong.
            NotPackableError: If the model was given no mask for it.
        """
        if self._dense is not None:
            return self._dense
        step, plan, dim = self.layer_step, self.layer_step.plan, self.token_dim
        plan.touched.add(step.layer_idx)
        if plan.why_unmasked is not None:
            raise NotPackableError(
                f"{asked_by} needs keys and values in one piece, with a mask, and {plan.why_unmasked}"
            )
        if plan.dense_refusal is not None:
            raise ValueError(f"{asked_by} needs keys and values densely: {plan.dense_refusal}")
        together = (part.group.num_rows_of(plan.num_rows) for part in step.parts)
        plan.journal.note_dense(step.layer_idx, asked_by, max(together, default=0))
        suffix, index = self.suffix, plan.column_index
        prefix = self._laid_out(plan.longest_prefix)
        if index is not None and index.shape[1] == plan.kv_len:
            dense = _columns(torch.cat([prefix, suffix], dim=dim), index, dim)
        else:
            suffix = suffix if index is None else _columns(suffix, index, dim)
            dense = torch.cat([prefix, suffix], dim=dim)
        # a buffer may be filled further
        self._dense = None if self.is_buffer else dense
        return dense

    def _laid_out(self, num_columns: int) -> Tensor:
        """The prefixes of each row, right-aligned in so many columns."""
        shape, dim, step = list(self.suffix.shape), self.token_dim, self.layer_step
        groups = [part.group for part in step.parts]
        is_whole = len(groups) == 1 and groups[0].rows is None and not step.parts[0].start
        if is_whole and self.prefixes[0].shape[dim] == num_columns:
            return self.prefixes[0].expand(shape[0], *self.prefixes[0].shape[1:])
        shape[dim] = num_columns
        laid_out = self.suffix.new_zeros(shape)
        ahead = (num_columns - step.plan.prefix_lens).tolist()
        for part, tokens in zip(step.parts, self.prefixes, strict=True):
            rows = range(shape[0]) if part.group.rows is None else part.group.rows.tolist()
            for row in rows:
                # what no query of a local layer sees is not stored; its columns are there all the same
                columns = laid_out[row].narrow(dim - 1, ahead[row] + part.start, tokens.shape[dim])
                columns.copy_(tokens[0])
        return laid_out

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answers questions about shape and dtype; goes by parts, or hands over the dense tensor."""
        return _answer(func, args, kwargs or {})

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


def lazy_pair(of_layer: LayerStep) -> tuple[Tensor, Tensor]:
    """All keys and all values of one layer."""
    return LazyKeyValue(of_layer, is_value=False), LazyKeyValue(of_layer, is_value=True)


def are_as_stored(key: LazyKeyValue, value: LazyKeyValue) -> bool:
    """Whether these are what is stored; a layer may give its keys for values as well."""
    return key.is_as_stored and value.is_as_stored and value.is_value and not key.is_value


def step_of(key: LazyKeyValue, value: LazyKeyValue) -> LayerStep:
    """What attention reads for these keys and values, whatever they were expanded to."""
    step = key.layer_step
    if are_as_stored(key, value):
        return step
    parts = tuple(
        replace(part, keys=its_keys[0], values=its_values[0])
        for part, its_keys, its_values in zip(step.parts, key.prefixes, value.prefixes, strict=True)
    )
    return replace(step, parts=parts, private=PrivateTokens.of_tensors(key.suffix, value.suffix))


# a compiler would go on looking into tensors that have no storage
@outside_graphs
def _answer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func in _METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func is torch.Tensor.to and stays(*args, **kwargs):
        return args[0]
    by_parts = _by_parts(func, args, kwargs)
    if by_parts is not None:
        return by_parts
    name = getattr(func, "__qualname__", None) or getattr(func, "__name__", repr(func))
    if _writes(func) and isinstance(args[0], LazyKeyValue):
        args[0].is_written = True
    dense_args, dense_kwargs = tree_map_only(
        LazyKeyValue, lambda lazy: lazy.materialize(name), (args, kwargs)
    )
    return func(*dense_args, **dense_kwargs)


def _by_parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a function on prefixes and suffix apart; None if it does not go token by token."""
    if not args or not isinstance(lazy := args[0], LazyKeyValue):
        return None
    if func is torch.Tensor.copy_:
        return _fill(*args) if len(args) == 2 and not kwargs else None
    if kwargs.keys() <= {"dim"}:
        args = (*args, *kwargs.values())
    elif kwargs:
        return None
    if func is torch.Tensor.__getitem__ and not lazy.is_buffer:
        return None  # what is written to a piece of it must show in the whole
    planned = plan(func, TokenSplit(lazy.shape, lazy.token_dim), args[1:])
    if planned is None:
        return None
    token_dim, arguments = planned
    *prefixes, suffix = (func(part, *arguments(part)) for part in (*lazy.prefixes, lazy.suffix))
    is_buffer = func is torch.Tensor.new_empty or lazy.is_buffer

    def whole(suffix: Tensor, *prefixes: Tensor) -> LazyKeyValue:
        return lazy._of_parts(prefixes, suffix, token_dim, is_buffer=is_buffer)

    if isinstance(suffix, Tensor):
        return whole(suffix, *prefixes)
    return tuple(map(whole, suffix, *prefixes))


def _fill(buffer: LazyKeyValue, source: Any) -> LazyKeyValue | None:
    is_alike = isinstance(source, LazyKeyValue) and source.token_dim == buffer.token_dim
    if not buffer.is_buffer or not is_alike or source.layer_step is not buffer.layer_step:
        return None
    for part, its_source in zip(buffer.prefixes, source.prefixes, strict=True):
        part.copy_(its_source)
    buffer.suffix.copy_(source.suffix)
    return buffer


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def stays(tensor: Any, *targets: Any, **named: Any) -> bool:
    """Whether `Tensor.to` with these arguments leaves a tensor as it is."""
    return not named and all(target in (tensor.device, tensor.dtype) for target in targets)


def _columns(tokens: Tensor, index: Tensor, dim: int) -> Tensor:
    """Takes tokens along `dim` at the `[num_rows, num_columns]` indices of each row."""
    shape = list(tokens.shape)
    if not shape[dim]:  # columns of pads only
        shape[dim] = 1
        tokens = tokens.new_zeros(shape)
    shape[dim] = index.shape[1]
    spread = [len(index), *[1] * (tokens.ndim - 1)]
    spread[dim] = index.shape[1]
    return tokens.gather(dim, index.to(tokens.device).view(spread).expand(shape))
