"""Keys and values of several batches in one forward pass, their tokens side by side."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_granikv.errors import NotPackableError
from hf_granikv.lazy import LazyKeyValue


class PackedKeyValue(torch.Tensor):
    """All keys, or all values, of one layer for `[1, num_tokens]` of several batches.

    ```
    tokens   | batch 0: 16 rows x 1 | batch 1: 1 row x 200 | batch 2: 1 row x 64 |
    ```

    It answers questions about its shape, and goes to the attention function of this package;
    anything else raises, since no dense tensor could stand for it.

    Attributes:
        segments: Per batch, what its own layer gave for its rows.
        sizes: Per batch, rows and tokens per row of this forward.
    """

    segments: tuple[LazyKeyValue, ...]
    sizes: tuple[tuple[int, int], ...]

    @staticmethod
    def __new__(
        cls, segments: Sequence[LazyKeyValue], sizes: Sequence[tuple[int, int]]
    ) -> "PackedKeyValue":
        """Puts the lazy tensors of several batches side by side."""
        first = segments[0]
        num_tokens = sum(num_rows * q_len for num_rows, q_len in sizes)
        packed: PackedKeyValue = torch.Tensor._make_wrapper_subclass(
            cls,
            (1, first.shape[1], num_tokens, first.shape[3]),
            dtype=first.dtype,
            device=first.device,
        )
        packed.segments, packed.sizes = tuple(segments), tuple(sizes)
        return packed

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answers questions about shape and dtype; refuses the rest."""
        if func in LazyKeyValue.METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise NotPackableError(
            f"the model calls {getattr(func, '__name__', func)} on keys or values"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuses callers below the Python function level."""
        raise NotPackableError(f"the model calls {func} on keys or values")


def segments_of(packed: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Cuts `[1, num_heads, num_tokens, head_dim]` into `[num_rows, num_heads, q_len, head_dim]`."""
    parts = packed[0].split([num_rows * q_len for num_rows, q_len in sizes], dim=1)
    return [
        part.unflatten(1, size).transpose(0, 1) for part, size in zip(parts, sizes, strict=True)
    ]
