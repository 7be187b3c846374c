"""The last act of a decode step: each row's own keys, and what its prefixes gave, in one pass."""

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_granikv.kernels import compiled
from hf_granikv.kernels.decode_attention import _arguments as field
from hf_granikv.kernels.decode_attention.states import GroupStates, Prefix, Segment
from hf_granikv.views import PrivateTokens

MODULE = "hf_granikv.kernels.decode_attention._numba"
DTYPES = {torch.bfloat16: "attend_bfloat16", torch.float32: "attend_float32"}

_OF_RUN = slice(field.QUERY, field.NEW_SLOTS)
_NOTHING_NEW = (0,) * (field.NEW_SLOTS - field.NEW_KEYS)
_OF_LAYER = slice(field.KEYS, field.NUM_STATES)
_NUM_TOKENS = field.NUM_SEGMENTS - field.KEYS
# for how many more own tokens there is room from the start
_SPARE = 64


class Place(NamedTuple):
    """Where the tokens of one layer are, in numbers for the compiled pass.

    Attributes:
        numbers: Of the rows' own tokens, and where those of the segments are.
        of_segments: Of the segments.
        of_prefixes: Of each prefix.
    """

    numbers: "array[int]"
    of_segments: "array[int]"
    of_prefixes: list["array[int]"]

    def move(self, keys: Tensor, values: Tensor) -> None:
        """Notes that the rows' own tokens are elsewhere; see `DecodeAttention.place`."""
        self.numbers[:_NUM_TOKENS] = array("q", _tokens(keys, values))


class DecodeAttention:
    """Attends from one query per row to the row's own tokens, and merges what its prefixes gave.

    Made for a step, run in each of its layers, and renewed for the next step. Own tokens are read
    where they lie in the pool, wherever that is, and nothing is computed for pads. Those that a step
    brings may be stored on the way.

    Args:
        query: `[num_rows, num_q_heads, 1, head_dim]` of the first layer.
        private: Own tokens in that layer.
        spans: `[num_rows, 2]` the own tokens that each row sees: from the first, up to the second.
        scale: Factor on the scores.
        num_segment_tokens: Tokens of each segment that `run` will be given.
        prefixes: What is attended to along with it.
    """

    def __init__(
        self,
        query: Tensor,
        private: PrivateTokens,
        spans: NDArray[np.int64],
        *,
        scale: float,
        num_segment_tokens: Sequence[int] = (),
        prefixes: Sequence[Prefix] = (),
    ) -> None:
        assert private.storages is not None, "unsupported_reasons says so"
        assert private.slots is not None
        values = private.storages[1]
        num_rows, num_q_heads, _, key_dim = query.shape
        num_kv_heads, value_dim = values.shape[0], values.shape[2]
        self._shape = (num_rows, 1, num_q_heads, value_dim)
        # what the addresses below point to
        self._slots, self._spans = private.slots, spans
        self._scale = np.array([scale], dtype=np.float32)
        kernel = compiled.load(MODULE)
        address: int = getattr(kernel, DTYPES[query.dtype]).address
        self._states: list[GroupStates] = []
        ratio, lanes = num_q_heads // num_kv_heads, kernel.LANES
        # whole vectors
        key_width, value_width, longest, totals, *of_segments = (
            -(-size // lanes) * lanes
            for size in (
                *(key_dim, value_dim, private.max_length + _SPARE, ratio),
                *num_segment_tokens,
            )
        )
        longest += sum(of_segments)
        self._most = private.max_length + _SPARE
        self._tokens = np.arange(max(num_segment_tokens, default=0))
        self._tokens_at = compiled.address_of(self._tokens)
        self._num_threads = threads = torch.get_num_threads()
        num_read = num_rows * longest
        num_threads = max(
            1, min(threads, num_kv_heads * max(num_rows, num_read // field.LEAST_PIECE))
        )
        # queries; keys and values of as many tokens, their products, where they are; two pieces with
        # their sums, highest scores and totals; scores; shares
        parts = [ratio * key_width, lanes * key_width, lanes * value_width, lanes * lanes]
        parts += [2 * lanes, 2 * (ratio * value_width + 2 * totals), ratio * longest]
        parts += [-(-4 * (threads + 1) // lanes) * lanes]
        *places, size = (4 * end for end in accumulate(parts))
        self._scratch = torch.empty(threads * size, dtype=torch.uint8, device="cpu")
        # the order is that of the names in _arguments.py
        sizes = [
            *(num_rows, num_kv_heads, ratio, key_dim, value_dim),
            *(compiled.address_of(self._slots), self._slots.shape[1], compiled.address_of(spans)),
            *(compiled.address_of(self._scale), key_width, value_width, 4 * longest),
            *(self._scratch.data_ptr(), size, *places),
        ]
        numbers = array("q", [*sizes, *[0] * (field.NUM_ARGUMENTS - len(sizes))])
        self._task = compiled.Task(address, numbers, num_threads)
        self._take_new_slots(private)
        self._prefixes = [prefix.kernel for prefix in prefixes]
        self._of_prefixes = [prefix.states for prefix in prefixes]
        self._tasks = [*(prefix.kernel.task for prefix in prefixes), self._task]
        self._chain: compiled.Chain | None = None
        self._take(self._of_prefixes)

    def renew(self, private: PrivateTokens, spans: NDArray[np.int64]) -> bool:
        """Takes the own tokens of a later step of the same rows.

        Args:
            private: As it was given, with other tokens.
            spans: Likewise.

        Returns:
            Whether there is room for them, in scratch memory for as many threads as there are.
        """
        if private.max_length > self._most or torch.get_num_threads() != self._num_threads:
            return False
        assert private.slots is not None
        self._slots = private.slots
        self._spans[:] = spans
        numbers = self._task.numbers
        numbers[field.SLOTS], numbers[field.SLOTS_ROW] = (
            compiled.address_of(self._slots),
            self._slots.shape[1],
        )
        self._take_new_slots(private)
        return True

    @property
    def stores(self) -> bool:
        """Whether it can store what rows bring: it knows where that goes."""
        return self._new_slots is not None

    def run(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        states: Sequence[GroupStates],
        segments: Sequence[Segment] = (),
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attends in one layer, in float32, where there are no prefixes.

        Args:
            query: `[num_rows, num_q_heads, 1, head_dim]`, any strides.
            keys: See `place`.
            values: Likewise.
            states: See `run_at`.
            segments: See `place`.
            sinks: See `run_at`.

        Returns:
            `[num_rows, 1, num_q_heads, value_dim]`, see `run_at`.
        """
        return self.run_at(query, self.place(keys, values, segments), states, sinks=sinks)

    def place(
        self,
        keys: Tensor,
        values: Tensor,
        segments: Sequence[Segment] = (),
        prefixes: Iterable[tuple[Tensor, Tensor]] = (),
    ) -> Place:
        """Writes down where the tokens of a layer are.

        Args:
            keys: `[num_kv_heads, num_slots, head_dim]`, any strides but over the last dimension;
                never copied.
            values: `[num_kv_heads, num_slots, value_dim]`, likewise.
            segments: Tokens that some or all rows see as if they were their own; never copied.
            prefixes: Keys and values of each prefix.
        """
        of_segments = array("q")
        for segment in segments:
            of_segments.extend(self._numbers_of(segment))
        numbers = array("q", _tokens(keys, values))
        numbers.extend((len(segments), of_segments.buffer_info()[0]))
        of_prefixes = [
            kernel.place(*its) for kernel, its in zip(self._prefixes, prefixes, strict=True)
        ]
        return Place(numbers, of_segments, of_prefixes)

    def run_at(
        self,
        query: Tensor,
        place: Place,
        states: Sequence[GroupStates] = (),
        *,
        sinks: Tensor | None = None,
        seconds: list[float] | None = None,
        new: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attends in the layer that a place is of, in float32.

        Args:
            query: `[num_rows, num_q_heads, 1, head_dim]`, any strides.
            place: Its tokens, which have not moved since.
            states: Parts with other keys, that some or all rows see, besides the prefixes.
            sinks: `[num_q_heads]` logits of attention sinks, which enter the denominator once.
            seconds: Gets what each prefix has taken, and then what the rest has: run one by one.
            new: Keys and values of one token a row, `[num_rows, num_kv_heads, 1, head_dim]` each, of the
                pool's dtype, which are among those that rows see and not stored yet.

        Returns:
            `[num_rows, 1, num_q_heads, value_dim]` in the dtype of the query, 0 for a row that sees
            nothing.
        """
        numbers, query, brought = self._task.numbers, compiled.readable(query), _NOTHING_NEW
        out, at, strides = query.new_empty(self._shape), query.data_ptr(), query.stride()
        if new is not None:
            assert self.stores, "it says so"
            keys, values = map(compiled.readable, new)
            brought = *_rows(keys), *_rows(values)
        numbers[_OF_RUN] = array("q", (at, *strides[:2], out.data_ptr(), *brought))
        numbers[_OF_LAYER] = place.numbers
        if sinks is not None:
            sinks = sinks.to("cpu", torch.float32).contiguous()
        numbers[field.SINKS] = 0 if sinks is None else sinks.data_ptr()
        for kernel, its_place in zip(self._prefixes, place.of_prefixes, strict=True):
            kernel.aim(at, strides, its_place)
        if states or len(self._states) != len(self._prefixes):
            self._take([*self._of_prefixes, *states])
        if seconds is not None:
            seconds += map(_seconds_of, self._tasks)
        elif self._chain is not None:
            self._chain.run()
        else:
            compiled.run(*self._task)
        return out

    def _take_new_slots(self, private: PrivateTokens) -> None:
        slots = private.new_slots
        self._new_slots = None if slots is None else np.ascontiguousarray(slots)
        address = 0 if self._new_slots is None else compiled.address_of(self._new_slots)
        self._task.numbers[field.NEW_SLOTS] = address

    def _numbers_of(self, segment: Segment) -> tuple[int, ...]:
        keys, values, rows = segment
        readers = 0 if rows is None else compiled.address_of(rows)
        return *_tokens(keys, values), self._tokens_at, keys.shape[1], readers

    def _take(self, states: Sequence[GroupStates]) -> None:
        """Writes down where the states are, if that is not where the last ones were."""
        known = self._states
        if len(states) == len(known) and all(map(_is_same, states, known)):
            return
        numbers, known_chain = self._task.numbers, self._chain
        # an interrupt leaves nothing that is only half of it
        self._states, self._chain = [], None
        before = numbers.buffer_info()
        del numbers[field.NUM_ARGUMENTS :]
        numbers[field.NUM_STATES] = len(states)
        for state in states:
            numbers.extend([state.out.shape[0], state.out.data_ptr()])
            numbers.extend([*state.out.stride()[:4], state.lse.data_ptr()])
            numbers.extend([*state.lse.stride(), state.out.dtype == torch.float32])
            numbers.append(0 if state.rows is None else compiled.address_of(state.rows))
        if self._prefixes:
            stays = known_chain is not None and numbers.buffer_info() == before
            self._chain = known_chain if stays else compiled.Chain(self._tasks)
        self._states = list(states)


def _seconds_of(task: compiled.Task) -> float:
    start = perf_counter()
    compiled.run(*task)
    return perf_counter() - start


def _rows(tokens: Tensor) -> tuple[int, ...]:
    """Where tokens of rows are, and their strides by row and by head."""
    of_row, of_head, _, _ = tokens.stride()
    return tokens.data_ptr(), of_row, of_head


def _tokens(keys: Tensor, values: Tensor) -> tuple[int, ...]:
    """Where keys and values of a layer are, and their strides by head and by token."""
    (key_head, key_token, _), (value_head, value_token, _) = keys.stride(), values.stride()
    return keys.data_ptr(), key_head, key_token, values.data_ptr(), value_head, value_token


def _is_same(state: GroupStates, other: GroupStates) -> bool:
    return all(a is b for a, b in zip(state, other, strict=True))
