"""States of layers that do not keep tokens: recurrent and convolution states."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_granikv.errors import IntegrityError, TornStateError
from hf_granikv.wording import counted


class StateKey(NamedTuple):
    """Which state of a layer: `"conv_states"` or `"recurrent_states"`, and which of them."""

    kind: str
    state_idx: int


# the states of one layer, `[num_rows, ...]` each; empty before the first token
LayerStates = Mapping[StateKey, Tensor]


class StatefulLayer(Protocol):
    """A layer that models read and write the states of."""

    def states(self) -> dict[StateKey, Tensor]:
        """The states now, none before the first token."""
        ...

    def load(self, states: LayerStates) -> None:
        """Takes these tensors for its states; none is as before the first token."""
        ...


class RowStates:
    """The states of the rows of a batch, one layer after the other.

    ```
    stored with the prefix   layer 0  [1, ...]                        layer 2  [1, ...]
    the rows' own            layer 0  [num_rows, ...] room            layer 2  [num_rows, ...] room
    ```

    A forward writes over the states of its rows, so each row starts from a copy, and what a
    forward that failed has written cannot be taken back: such rows are torn. Rows join and leave in
    place: what leaves is room for what joins, until `trim`. Storages change layer by layer, so that
    one layer at a time is there twice.

    Args:
        layers: The layers that keep states.
    """

    def __init__(self, layers: Sequence[StatefulLayer] = ()) -> None:
        self._layers = layers
        self._is_torn = False
        # whether some storage may have room for more rows than there are
        self._has_room = False
        # what the states were when the forward under way began; None between forwards
        self._marks: list[tuple[int, int]] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the storages held."""
        return sum(t.untyped_storage().nbytes() for t in self._tensors())

    @property
    def is_open(self) -> bool:
        """Whether a forward has been announced and not been settled."""
        return self._marks is not None

    @property
    def is_torn(self) -> bool:
        """Whether the states are those of other tokens than are held."""
        return self._is_torn

    def begin(self, stored: Sequence[LayerStates], num_rows: int) -> None:
        """Starts rows from copies of the states of a prefix.

        Args:
            stored: Per layer, `[1, ...]` states; nothing at all for rows that start empty.
            num_rows: Rows of the batch.
        """
        self.release()
        if stored:
            self._load(stored, lambda t: _copied(t.expand(num_rows, *t.shape[1:])))

    def open_step(self) -> None:
        """Notes the states as they are before a forward.

        Raises:
            TornStateError: If the rows are torn.
        """
        self.check_whole()
        if self._layers:
            self._marks = self._marks_now()

    def close_step(self, *, has_failed: bool) -> None:
        """Ends a forward; one that failed tears the rows if it has written to any state."""
        marks, self._marks = self._marks, None
        self._is_torn |= has_failed and marks is not None and marks != self._marks_now()
        if any(state.requires_grad for state in self._tensors()):
            # nothing flows back through the cache; the graph of this forward needs its own tensors
            self._load([layer.states() for layer in self._layers], _copied)

    def tear(self) -> None:
        """Notes that the states may be ahead of what else is held of the rows."""
        self._marks, self._is_torn = None, bool(self._layers)

    def check_whole(self) -> None:
        """Checks that the states are those of the tokens held.

        Raises:
            TornStateError: If a forward that failed has changed them.
        """
        if self._is_torn:
            raise TornStateError(
                "a forward pass failed after it had changed recurrent states of the rows, which "
                "cannot be taken back; start the rows again: call cache.reset(), or generate."
            )

    def select(self, indices: NDArray[np.int64]) -> None:
        """Makes row i the former row `indices[i]`; each row has states of its own."""
        index = torch.from_numpy(indices)
        held = [layer.states() for layer in self._layers]
        self._load(held, lambda t: t.index_select(0, index.to(t.device)))

    def take_row(self, row: int) -> list[LayerStates]:
        """Copies of the states of one row, `[1, ...]` each."""
        return [{key: _copied(t) for key, t in of_layer.items()} for of_layer in self.lend_row(row)]

    def lend_row(self, row: int) -> "LentStates":
        """The states of one row, read when they are asked for; valid until rows change."""
        return LentStates(self._layers, row)

    def reserve(self, num_rows: int) -> None:
        """Makes room for so many rows; those held stay as they are, if it fails too."""
        for layer in self._layers:
            if any(_num_places(state) < num_rows for state in layer.states().values()):
                self._has_room = True
                self._change(layer, lambda t: _moved(t, num_rows))

    def trim(self) -> None:
        """Gives back the room that rows have left."""
        for layer in self._layers if self._has_room else ():
            self._change(layer, lambda t: t if _num_places(t) == len(t) else _moved(t, len(t)))
        self._has_room = False

    def add_row(self, states: Sequence[LayerStates]) -> None:
        """Adds a row with these states behind the others.

        Args:
            states: What `take_row` or `lend_row` gave.
        """
        num_rows = max((t.shape[0] for t in self._tensors()), default=0)
        if not num_rows:
            self._load(states, _copied)
            return
        self.reserve(num_rows + 1)
        try:
            for layer, its in zip(self._layers, states, strict=True):
                self._change(layer, _widened)
                for key, state in layer.states().items():
                    _copy_row(state, num_rows, its[key])
        except BaseException:
            self._keep(num_rows)
            raise

    def remove_row(self, row: int) -> None:
        """Forgets a row; the last one takes its place. Nothing is allocated."""
        last = max((t.shape[0] for t in self._tensors()), default=1) - 1
        for state in self._tensors() if row < last else ():
            _copy_row(state, row, state[last:])
        self._has_room = True
        self._keep(last)

    def release(self) -> None:
        """Forgets all rows."""
        self._marks, self._is_torn = None, False
        for layer in self._layers:
            layer.load({})

    def copy_from(self, other: "RowStates") -> None:
        """Takes over the rows of another cache, as copies."""
        self._is_torn = other._is_torn
        self._load([layer.states() for layer in other._layers], _copied)

    def check_integrity(self, num_rows: int) -> None:
        """Checks that every state has the rows of the batch.

        Raises:
            IntegrityError: With the numbers.
        """
        for layer_idx, layer in enumerate(self._layers):
            for key, state in layer.states().items():
                if state.shape[0] != num_rows and not self._is_torn:
                    raise IntegrityError(
                        f"{key.kind}[{key.state_idx}] of stateful layer {layer_idx} has "
                        f"{counted(state.shape[0], 'row')}, the batch {num_rows}."
                    )

    def _load(self, states: Iterable[LayerStates], change: Callable[[Tensor], Tensor]) -> None:
        """Gives all layers their new states, or none where memory is short."""
        # never inference tensors, or a later forward outside inference mode could not write to them
        with torch.inference_mode(False):
            changed = [
                {key: change(state.detach()) for key, state in of_layer.items()}
                for of_layer in states
            ]
        for layer, of_layer in zip(self._layers, changed, strict=True):
            layer.load(of_layer)

    def _change(self, layer: StatefulLayer, change: Callable[[Tensor], Tensor]) -> None:
        with torch.inference_mode(False):
            layer.load({key: change(state.detach()) for key, state in layer.states().items()})

    def _keep(self, num_rows: int) -> None:
        for layer in self._layers:
            if num_rows:
                self._change(layer, lambda t: t[:num_rows])
            else:
                layer.load({})

    def _tensors(self) -> list[Tensor]:
        return [state for layer in self._layers for state in layer.states().values()]

    def _marks_now(self) -> list[tuple[int, int]]:
        return [(state.data_ptr(), state._version) for state in self._tensors()]


class LentStates(Sequence[LayerStates]):
    """The states of one row, layer by layer, as they are among those of its batch.

    Args:
        layers: The layers that keep states.
        row: The row.
    """

    def __init__(self, layers: Sequence[StatefulLayer], row: int) -> None:
        self._layers = layers
        self._row = row

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, layer_idx: Any) -> Any:
        held = self._layers[layer_idx].states()
        return {key: state[self._row : self._row + 1] for key, state in held.items()}


def _copied(state: Tensor) -> Tensor:
    return torch.empty_like(state, memory_format=torch.contiguous_format).copy_(state)


def _num_places(state: Tensor) -> int:
    """How many rows the storage of a state has room for."""
    return state.untyped_storage().nbytes() // state[0].nbytes


def _moved(state: Tensor, num_rows: int) -> Tensor:
    """A copy of a state in a storage for so many rows."""
    size = (num_rows, *state.shape[1:])
    return torch.empty(size, dtype=state.dtype, device=state.device)[: len(state)].copy_(state)


def _widened(state: Tensor) -> Tensor:
    """The state with one row more, of which nothing is known yet."""
    return state.as_strided((len(state) + 1, *state.shape[1:]), state.stride())


def _copy_row(state: Tensor, row: int, its: Tensor) -> None:
    with torch.inference_mode(False), torch.no_grad():
        state[row : row + 1].copy_(its)
