"""Prefixes that many rows read: stored once, exactly, and never written again."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_granikv.errors import IntegrityError
from hf_granikv.pools.row_states import LayerStates


@dataclass(frozen=True, eq=False)
class Prefix:
    """A stored prefix. Immutable: it is sealed when it is made.

    Attributes:
        token_ids: `[num_tokens]` int64 on the CPU, the ids it was computed from.
        keys: One `[num_kv_heads, num_tokens - start, head_dim]` contiguous tensor per layer.
        values: Likewise.
        starts: Per layer, the first token that is stored: not 0 where a window cannot see further.
        states: For layers that keep states: the number of first tokens -> what the states are after
            them, `[1, ...]` each; rows can start from nowhere else. Empty without such layers.
    """

    token_ids: Tensor
    keys: tuple[Tensor, ...] = field(repr=False)
    values: tuple[Tensor, ...] = field(repr=False)
    starts: tuple[int, ...] = field(repr=False)
    states: Mapping[int, tuple[LayerStates, ...]] = field(default_factory=dict, repr=False)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prefix."""
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        """Bytes of the storages held, whatever the number of readers."""
        return sum(t.untyped_storage().nbytes() for t in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Everything that is stored, except the ids."""
        states = [t for at in self.states.values() for layer in at for t in layer.values()]
        return [*self.keys, *self.values, *states]


class HotPool:
    """The prefixes that are held, each with the number of its holders.

    ```
    prefix A   layer 0  K [num_kv_heads, 4096, head_dim]  V [...]     holders 2
               layer 1  K ...                             V ...
    prefix B   layer 0  K [num_kv_heads,  512, head_dim]  V [...]     holders 1
    ```

    Bytes depend on the prefixes alone: not on rows, beams or returned sequences.
    """

    def __init__(self) -> None:
        self._holders: dict[Prefix, int] = {}
        self._seals: dict[Prefix, tuple[tuple[int, int], ...]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all prefixes held."""
        return sum(prefix.num_bytes for prefix in self._holders)

    @property
    def num_tokens(self) -> int:
        """Tokens of all prefixes held."""
        return sum(prefix.num_tokens for prefix in self._holders)

    def seal(
        self,
        token_ids: Tensor,
        keys_and_values: Iterable[tuple[Tensor, Tensor]],
        states: Mapping[int, Iterable[LayerStates]] | None = None,
    ) -> Prefix:
        """Takes ownership of freshly computed keys and values, and holds them once.

        Args:
            token_ids: `[num_tokens]` the ids they were computed from.
            keys_and_values: Per layer, two `[num_kv_heads, num_tokens, head_dim]` tensors, or the
                last tokens of them.
            states: See `Prefix`.
        """
        pairs = [(_exact(k), _exact(v)) for k, v in keys_and_values]
        prefix = Prefix(
            token_ids.detach().to("cpu", copy=True),
            keys=tuple(k for k, _ in pairs),
            values=tuple(v for _, v in pairs),
            starts=tuple(len(token_ids) - k.shape[1] for k, _ in pairs),
            states={
                num_tokens: tuple({key: _exact(t) for key, t in layer.items()} for layer in layers)
                for num_tokens, layers in (states or {}).items()
            },
        )
        self._holders[prefix] = 1
        self._seals[prefix] = _seal_marks(prefix)
        return prefix

    def acquire(self, prefix: Prefix) -> None:
        """Adds a holder."""
        self._holders[prefix] += 1

    def release(self, prefix: Prefix) -> None:
        """Drops a holder; the last one lets the pool forget the prefix."""
        self._holders[prefix] -= 1
        if self._holders[prefix] == 0:
            del self._holders[prefix], self._seals[prefix]

    def check_integrity(self) -> None:
        """Checks that every prefix is held, exact, and unchanged since it was sealed.

        Raises:
            IntegrityError: Naming the first prefix for which that is not so.
        """
        for prefix, holders in self._holders.items():
            if holders < 1:
                raise IntegrityError(f"{prefix} is kept with {holders} holders.")
            if _seal_marks(prefix) != self._seals[prefix]:
                raise IntegrityError(f"{prefix} was written to or moved after it was sealed.")
            for tensor in prefix.tensors():
                exact = tensor.numel() * tensor.element_size()
                if tensor.untyped_storage().nbytes() != exact or not tensor.is_contiguous():
                    raise IntegrityError(
                        f"{prefix}: {tensor.untyped_storage().nbytes()} bytes held for {exact}."
                    )


def _exact(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().contiguous()
    exact = tensor.numel() * tensor.element_size()
    # a tensor made in inference mode has no version counter: nothing could show a later write
    if tensor.is_inference() or tensor.untyped_storage().nbytes() != exact:
        with torch.inference_mode(False):
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(
                tensor
            )
    return tensor


def _seal_marks(prefix: Prefix) -> tuple[tuple[int, int], ...]:
    return tuple((t.data_ptr(), t._version) for t in prefix.tensors())
