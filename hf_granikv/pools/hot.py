"""Prefixes that many rows read: stored once, exactly, and never written again."""

import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_granikv.errors import IntegrityError
from hf_granikv.pools.row_states import LayerStates


class Saver(Protocol):
    """Writes a prefix to a file, with what identifies the model that computed it."""

    def __call__(self, prefix: "Prefix", path: str | os.PathLike[str], *, overwrite: bool) -> None:
        """See `Prefix.save`."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """A stored prefix, or one that extends another. Immutable: it is sealed when it is made.

    ```
    position   0 ............ 1000 ..... 1200
    chain      [ parent           ][ this   ]     rows that read this read its parent as well
    ```

    Attributes:
        token_ids: `[num_tokens]` int64 on the CPU, the ids it was computed from, after its parent's.
        keys: One `[num_kv_heads, stop - starts[layer], head_dim]` contiguous tensor per layer.
        values: Likewise.
        starts: Per layer, the position of the first token that is stored: later than the prefix
            starts where a window cannot see further, earlier where it keeps tokens of its parents.
        states: For layers that keep states: the number of first tokens -> what the states are after
            them, `[1, ...]` each; rows can start from nowhere else. Empty without such layers.
        parent: The prefix that it extends; None if it starts a sequence.
        salt: Rows find it under this word only.
        num_fused: Tokens of its parents that it keeps itself, since reading them apart would cost more.
        is_part: Whether its tensors show a part of larger ones, which are held as long as any part is.
        saver: What `save` calls; None if nobody knows the model that computed it.
    """

    token_ids: Tensor
    keys: tuple[Tensor, ...] = field(repr=False)
    values: tuple[Tensor, ...] = field(repr=False)
    starts: tuple[int, ...] = field(repr=False)
    states: Mapping[int, tuple[LayerStates, ...]] = field(default_factory=dict, repr=False)
    parent: "Prefix | None" = field(default=None, repr=False)
    salt: str | None = None
    num_fused: int = 0
    is_part: bool = False
    saver: Saver | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        behind = f" after {self.start} others" if self.start else ""
        return f"<Prefix of {self.num_tokens} tokens{behind}>"

    @property
    def num_tokens(self) -> int:
        """Tokens of this prefix, without its parent's."""
        return len(self.token_ids)

    @cached_property
    def start(self) -> int:
        """Position of its first token."""
        return 0 if self.parent is None else self.parent.stop

    @cached_property
    def stop(self) -> int:
        """Tokens of the whole chain."""
        return self.start + self.num_tokens

    @property
    def reads_from(self) -> int:
        """Position from which on it serves its readers."""
        return self.start - self.num_fused

    @cached_property
    def chain(self) -> tuple["Prefix", ...]:
        """This prefix and all it extends, the first one first."""
        return (self,) if self.parent is None else (*self.parent.chain, self)

    @cached_property
    def levels(self) -> tuple["Prefix", ...]:
        """The prefixes of the chain that its readers read: without those it keeps itself."""
        ahead = [level for level in self.chain if level.stop <= self.reads_from]
        return (self,) if not ahead else (*ahead[-1].levels, self)

    @cached_property
    def chain_ids(self) -> NDArray[np.int64]:
        """`[stop]` the ids of the whole chain."""
        return np.concatenate([level.token_ids.numpy() for level in self.chain])

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the salt, the parent's digest and the ids: under which prefixes are found."""
        ahead = b"" if self.parent is None else self.parent.digest
        return prefix_digest(ahead, self.salt, self.token_ids.numpy())

    @property
    def row_starts(self) -> tuple[int, ...]:
        """The numbers of tokens after which rows with states can start; empty without such layers."""
        return tuple(sorted({at for level in self.chain for at in level.states}))

    def states_at(self, num_tokens: int) -> tuple[LayerStates, ...]:
        """States after so many tokens of the chain; empty if none are stored."""
        return next((p.states[num_tokens] for p in self.chain if num_tokens in p.states), ())

    @property
    def num_bytes(self) -> int:
        """Bytes of the storages held, or of its part of them, whatever the number of readers."""
        if self.is_part:
            return sum(t.nbytes for t in self.tensors())
        return sum(t.untyped_storage().nbytes() for t in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Everything that is stored, except the ids."""
        states = [t for at in self.states.values() for layer in at for t in layer.values()]
        return [*self.keys, *self.values, *states]

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Writes this prefix and all it extends to a safetensors file, for `cache.load`.

        The file appears when it is complete. The model is hashed, once for each model object.

        Args:
            path: Where to.
            overwrite: Replaces a file that is there.

        Raises:
            PrefixFileError: If something is at `path`, or there is no folder to put it in.
            StalePrefixError: If the model that computed it has changed since or is gone, or
                `cache.invalidate` was called.
            ValueError: If the prefix was made by no cache, or part of its model is offloaded or says
                other things in each process.
        """
        if self.saver is None:
            raise ValueError(
                f"{self} was made by no cache, so its model is not known; save a prefix that "
                "cache.prefill or cache.load returned."
            )
        self.saver(self, path, overwrite=overwrite)


def prefix_digest(ahead: bytes, salt: str | None, token_ids: NDArray[np.int64]) -> bytes:
    """What identifies the ids of a prefix, given what they extend.

    Args:
        ahead: Digest of the parent; empty for none.
        salt: See `Prefix`.
        token_ids: `[num_tokens]`.
    """
    salted = b"" if salt is None else b"salt" + salt.encode()
    header = b"".join(len(part).to_bytes(8, "little") + part for part in (ahead, salted))
    return sha256(header + np.ascontiguousarray(token_ids, dtype="<i8").tobytes()).digest()


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
        # caches on several threads share a pool, and drop their holds where they end
        self._lock = threading.RLock()
        self._holders: dict[Prefix, int] = {}
        self._seals: dict[Prefix, tuple[tuple[int, int], ...]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all prefixes held."""
        return sum(prefix.num_bytes for prefix in list(self._holders))

    @property
    def num_tokens(self) -> int:
        """Tokens of all prefixes held."""
        return sum(prefix.num_tokens for prefix in list(self._holders))

    def seal(
        self,
        token_ids: Tensor,
        keys_and_values: Iterable[tuple[Tensor, Tensor]],
        states: Mapping[int, Iterable[LayerStates]] | None = None,
        *,
        parent: Prefix | None = None,
        salt: str | None = None,
        num_fused: int = 0,
        saver: Saver | None = None,
        is_part: bool = False,
    ) -> Prefix:
        """Takes ownership of freshly computed keys and values, and holds them once.

        Args:
            token_ids: `[num_tokens]` the ids they were computed from.
            keys_and_values: Per layer, two `[num_kv_heads, num_fused + num_tokens, head_dim]`
                tensors, or the last tokens of them.
            states: See `Prefix`.
            parent: Likewise; it is held as long as the new prefix is.
            salt: See `Prefix`.
            num_fused: Likewise.
            saver: Likewise.
            is_part: Likewise; the tensors are then those of another prefix, or views of them.
        """
        pairs = [(k, v) if is_part else (_exact(k), _exact(v)) for k, v in keys_and_values]
        stop = len(token_ids) + (0 if parent is None else parent.stop)
        if parent is not None:
            self.acquire(parent)
        prefix = Prefix(
            token_ids.detach().to("cpu", torch.int64, copy=True),
            keys=tuple(k for k, _ in pairs),
            values=tuple(v for _, v in pairs),
            starts=tuple(stop - k.shape[1] for k, _ in pairs),
            parent=parent,
            salt=salt,
            num_fused=num_fused,
            is_part=is_part,
            saver=saver,
            states={
                num_tokens: tuple({key: _exact(t) for key, t in layer.items()} for layer in layers)
                for num_tokens, layers in (states or {}).items()
            },
        )
        with self._lock:
            self._holders[prefix] = 1
            self._seals[prefix] = _seal_marks(prefix)
        return prefix

    def acquire(self, prefix: Prefix) -> None:
        """Adds a holder."""
        with self._lock:
            self._holders[prefix] += 1

    def release(self, prefix: Prefix) -> None:
        """Drops a holder; the last one lets the pool forget the prefix."""
        with self._lock:
            self._holders[prefix] -= 1
            if self._holders[prefix] == 0:
                del self._holders[prefix], self._seals[prefix]
                if prefix.parent is not None:
                    self.release(prefix.parent)

    def check_integrity(self) -> None:
        """Checks that every prefix is held, exact, and unchanged since it was sealed.

        Raises:
            IntegrityError: Naming the first prefix for which that is not so.
        """
        with self._lock:
            held, seals = list(self._holders.items()), dict(self._seals)
        for prefix, holders in held:
            if holders < 1:
                raise IntegrityError(f"{prefix} is kept with {holders} holders.")
            if _seal_marks(prefix) != seals[prefix]:
                raise IntegrityError(f"{prefix} was written to or moved after it was sealed.")
            for tensor in prefix.tensors():
                exact = tensor.numel() * tensor.element_size()
                if prefix.is_part and all(head.is_contiguous() for head in tensor):
                    continue
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
