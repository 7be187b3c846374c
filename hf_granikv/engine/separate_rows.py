"""Rows that are computed one after the other, each over a cache of its own.

For models whose forwards cannot take rows of different lengths at once. Every row reads the stored
prefix, so memory is shared; the weights are read once per row, so time is not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hf_granikv.announce import forward_parameters
from hf_granikv.cache import AsymmetricPagedCache
from hf_granikv.compat import CACHE_ARGUMENT
from hf_granikv.errors import ColdPoolFullError
from hf_granikv.pools import Prefix
from hf_granikv.row_prefixes import RowPrefixes


@dataclass(frozen=True, slots=True, eq=False)
class ParkedFork:
    """What one row holds of its own while it is out of the batch; as many rows as like start from it.

    Attributes:
        prefix: The end of the chain that the row reads.
        num_tokens: Its private tokens.
        num_bytes: Bytes of those, and of states where layers keep such.
        cache: The fork that holds them.
    """

    prefix: Prefix | None
    num_tokens: int
    num_bytes: int
    cache: AsymmetricPagedCache = field(repr=False)


@dataclass(eq=False, slots=True)
class SeparateRow:
    """One row, and the cache that is its own."""

    prefix: Prefix | None
    cache: AsymmetricPagedCache = field(repr=False)


class SeparateRows:
    """A batch in which every row is a fork of the cache.

    Args:
        model: The model that prefilled the cache.
        cache: Holds the prefixes; its `cold_slots` limit the private tokens of all rows together.
    """

    def __init__(self, model: nn.Module, cache: AsymmetricPagedCache) -> None:
        self._model = cache.attach(model)
        self._cache = cache
        self._rows: dict[SeparateRow, int] = {}
        self._bytes_per_token: int | None = None

    @property
    def num_slots_used(self) -> int:
        """Private tokens of all rows."""
        return sum(self._rows.values())

    @property
    def num_slots_limit(self) -> int | None:
        """The most there may be."""
        return self._cache._state.options.cold_slots

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one private token in all layers, measured with one that is thrown away."""
        if self._bytes_per_token is None:
            row = self.start(None)
            self._compute(row, [0])
            self._bytes_per_token = row.cache._state.cold.bytes_per_token
            self.drop(row)
        return self._bytes_per_token

    def start(self, prefix: Prefix | None, parked: ParkedFork | None = None) -> SeparateRow:
        """Gives a new row; see `Rows.start`."""
        self._check_room(0 if parked is None else parked.num_tokens)
        cache = self._reading(prefix) if parked is None else parked.cache.fork()
        row = SeparateRow(prefix, cache)
        self._rows[row] = 0 if parked is None else parked.num_tokens
        return row

    def forward(self, feeds: Mapping[SeparateRow, Sequence[int]]) -> dict[SeparateRow, Tensor]:
        """Computes one row after the other; see `Rows.forward`."""
        self._check_room(sum(map(len, feeds.values())))
        logits: dict[SeparateRow, Tensor] = {}
        before: dict[SeparateRow, AsymmetricPagedCache] = {}
        try:
            for row, token_ids in feeds.items():
                if not self._can_crop:
                    before[row] = row.cache.fork()
                logits[row] = self._compute(row, token_ids)
        except BaseException:
            for row in logits:
                self._take_back(row, len(feeds[row]), before.get(row))
            # states that the failing row has changed cannot be cropped either
            for row in before.keys() - logits.keys():
                row.cache = before[row]
            raise
        for row, token_ids in feeds.items():
            self._rows[row] += len(token_ids)
        return logits

    def crop(self, row: SeparateRow, num_tokens: int) -> None:
        """Takes the last private tokens of a row away; see `Rows.crop`."""
        row.cache.crop(-num_tokens)
        self._rows[row] -= num_tokens

    def park(self, row: SeparateRow) -> ParkedFork:
        """Takes a row out of the batch and gives what it holds."""
        num_tokens = self._rows.pop(row)
        return ParkedFork(row.prefix, num_tokens, row.cache._state.private_bytes, row.cache)

    def drop(self, row: SeparateRow) -> None:
        """Takes a row out of the batch and frees what it holds."""
        del self._rows[row]
        row.cache.invalidate()

    def num_tokens(self, row: SeparateRow) -> int:
        """Private tokens of a row."""
        return self._rows[row]

    def check_integrity(self) -> None:
        """Checks the pools of all rows; see `Rows.check_integrity`."""
        self._cache.check_integrity()
        for row, num_tokens in self._rows.items():
            row.cache.check_integrity()
            assert row.cache._state.cold.num_tokens == num_tokens

    @property
    def _can_crop(self) -> bool:
        return not self._cache._served.has_states

    def _reading(self, prefix: Prefix | None) -> AsymmetricPagedCache:
        """A cache that holds one chain alone, so that the other prefixes can be released meanwhile."""
        held = self._cache._state.prefixes
        if prefix is not None and prefix not in held.levels:
            raise ValueError(f"the cache does not hold {prefix}; pass one that it prefilled.")
        cache = self._cache.fork()
        cache.reset()
        cache._state.prefixes.bound = RowPrefixes.whole([prefix])
        others = [prefix for prefix, _ in cache._state.prefixes._holds]
        if prefix is not None:
            cache._state.hot.acquire(prefix)
            cache._state.prefixes.take(prefix)
        for other in others:
            cache.release(other)
        return cache

    def _compute(self, row: SeparateRow, token_ids: Sequence[int]) -> Tensor:
        ids = torch.tensor([list(token_ids)], device=self._model.device)
        kwargs = {CACHE_ARGUMENT: row.cache, "use_cache": True}
        if "logits_to_keep" in forward_parameters(self._model):
            kwargs["logits_to_keep"] = 1
        logits: Tensor = self._model(input_ids=ids, **kwargs).logits[0, -1]
        return logits

    def _take_back(
        self, row: SeparateRow, num_tokens: int, before: AsymmetricPagedCache | None
    ) -> None:
        if before is not None:
            row.cache = before
        else:
            row.cache.crop(-num_tokens)

    def _check_room(self, num_new: int) -> None:
        limit, used = self.num_slots_limit, self.num_slots_used
        if limit is not None and used + num_new > limit:
            raise ColdPoolFullError(
                f"the rows hold {used} of cold_slots={limit} private tokens, {num_new} more are "
                "needed; raise cold_slots, or run fewer rows."
            )
