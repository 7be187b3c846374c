"""Functions that treat every token alike, and so may run on prefix and suffix apart.

Models that expand what is cached before they attend (latent attention, repeated heads) call a few
of these. Run on the two parts, they expand the prefix once for all rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear


class TokenSplit:
    """Where the tokens of a tensor `[num_rows, ..., num_tokens, ...]` are, of which parts exist.

    Args:
        shape: Of the whole tensor.
        token_dim: The dimension of the tokens; never the first.
    """

    def __init__(self, shape: Sequence[int], token_dim: int) -> None:
        self.shape = tuple(shape)
        self.token_dim = token_dim

    def spares(self, dim: int) -> bool:
        """Whether a dimension is neither that of the rows nor that of the tokens."""
        return dim % len(self.shape) not in (0, self.token_dim)


# a rule tells, from where the tokens are and the arguments besides the tensor, where they are
# afterwards, and gives the arguments for a part of a given shape; None = not token by token
Arguments = tuple[Any, ...]
Plan = tuple[int, Callable[[Tensor], Arguments]]
Rule = Callable[[TokenSplit, Arguments], Plan | None]


def plan(func: Any, split: TokenSplit, args: Arguments) -> Plan | None:
    """How to run a function on parts.

    Args:
        func: The torch function.
        split: Of its first argument.
        args: Its other positional arguments.

    Returns:
        The dimension of the tokens in what it returns, and a function from a part to the arguments
        that go with it; None if the function does not go token by token.
    """
    rule = _RULES.get(func)
    return None if rule is None else rule(split, args)


def _linear(split: TokenSplit, args: Arguments) -> Plan | None:
    if not split.spares(-1):
        return None
    return split.token_dim, lambda part: args


def _transpose(split: TokenSplit, args: Arguments) -> Plan | None:
    first, second = (dim % len(split.shape) for dim in args)
    if 0 in (first, second):
        return None
    swapped = {first: second, second: first}
    return swapped.get(split.token_dim, split.token_dim), lambda part: args


def _view(split: TokenSplit, args: Arguments) -> Plan | None:
    sizes, num_tokens = _sizes(args), split.shape[split.token_dim]
    if not all(isinstance(size, int) for size in sizes) or sizes[0] != split.shape[0]:
        return None
    # a part may be empty, from which -1 cannot be told
    known = _product([size for size in sizes if size != -1])
    sizes = tuple(_product(split.shape) // known if size == -1 else size for size in sizes)
    candidates = [dim for dim, size in enumerate(sizes) if dim and size == num_tokens]
    # what is between rows and tokens stays there, so that tokens stay apart
    before = split.shape[1 : split.token_dim]
    kept = [dim for dim in candidates if _product(sizes[1:dim]) == _product(before)]
    if len(kept) != 1 or kept[0] == len(sizes) - 1:
        return None
    return kept[0], _resized(sizes, kept[0], split.token_dim)


def _new_empty(split: TokenSplit, args: Arguments) -> Plan | None:
    sizes, token_dim = _sizes(args), split.token_dim
    if len(sizes) != len(split.shape) or (sizes[0], sizes[token_dim]) != (
        split.shape[0],
        split.shape[token_dim],
    ):
        return None
    return token_dim, _resized(sizes, token_dim, token_dim)


def _expand(split: TokenSplit, args: Arguments) -> Plan | None:
    sizes = list(_sizes(args))
    if len(sizes) != len(split.shape):
        return None
    for dim in (0, split.token_dim):
        if sizes[dim] not in (-1, split.shape[dim]):
            return None
        sizes[dim] = -1
    return split.token_dim, lambda part: tuple(sizes)


def _repeat(split: TokenSplit, args: Arguments) -> Plan | None:
    times = _sizes(args)
    if len(times) != len(split.shape) or (times[0], times[split.token_dim]) != (1, 1):
        return None
    return split.token_dim, lambda part: args


def _along(split: TokenSplit, args: Arguments) -> Plan | None:
    if len(args) != 2 or not split.spares(args[1]):
        return None
    return split.token_dim, lambda part: args


def _getitem(split: TokenSplit, args: Arguments) -> Plan | None:
    (key,) = args
    of_last = isinstance(key, tuple) and len(key) == 2 and key[0] is Ellipsis
    if not of_last or not isinstance(key[1], slice) or not split.spares(-1):
        return None
    return split.token_dim, lambda part: args


def _nothing(split: TokenSplit, args: Arguments) -> Plan | None:
    return None if args else (split.token_dim, lambda part: args)


def _sizes(args: Arguments) -> tuple[Any, ...]:
    return tuple(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else args


def _product(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def _resized(
    sizes: tuple[Any, ...], token_dim: int, token_dim_before: int
) -> Callable[[Tensor], Arguments]:
    def of_part(part: Tensor) -> Arguments:
        changed = list(sizes)
        changed[0], changed[token_dim] = part.shape[0], part.shape[token_dim_before]
        return tuple(changed)

    return of_part


_RULES: dict[Any, Rule] = {
    linear: _linear,
    torch.transpose: _transpose,
    Tensor.transpose: _transpose,
    Tensor.view: _view,
    Tensor.reshape: _view,
    Tensor.new_empty: _new_empty,
    Tensor.expand: _expand,
    Tensor.repeat: _repeat,
    torch.split: _along,
    Tensor.split: _along,
    torch.chunk: _along,
    Tensor.chunk: _along,
    Tensor.__getitem__: _getitem,
    Tensor.contiguous: _nothing,
}
