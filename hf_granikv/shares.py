"""The texts that agents share, stored in one cache, and stored anew when the model has changed."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hf_granikv.cache import AsymmetricPagedCache
from hf_granikv.config import CacheOptions
from hf_granikv.errors import StalePrefixError
from hf_granikv.level_cuts import can_be_cut, graft, head_of
from hf_granikv.lookup import PrefixLookup
from hf_granikv.pools import Prefix
from hf_granikv.prompts import SharedText
from hf_granikv.shared_prefix import common_head
from hf_granikv.timing import forward_progress

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Share:
    """A stored prefix with the text behind it.

    Attributes:
        shared: The text.
        ids: Its token ids.
        prefix: What is stored of it: another one when it was stored anew, or in other parts.
        prefill_s: Seconds that this took.
        cache: Where it is stored.
        salt: Keeps it apart from another share with the same ids.
        former: What it was stored as, in the same cache, before another text parted from it on the way.
    """

    shared: SharedText
    ids: list[int]
    prefix: Prefix
    prefill_s: float
    cache: AsymmetricPagedCache = field(repr=False)
    salt: str | None = None
    former: list[Prefix] = field(default_factory=list, repr=False)


class Shares:
    """What the agents of one runner read.

    Args:
        model: The model that reads it.
        options: Of the cache.
        starts_over: Called when the model has changed, so that everything computed is void.
        exchanges: Called when prefixes are replaced by others with the same ids.
        at_least: The fewest tokens at the head of two texts that are stored apart from what follows.

    Attributes:
        cache: Holds all prefixes of the model as it is now.
    """

    def __init__(
        self,
        model: Any,
        options: CacheOptions,
        starts_over: Callable[[StalePrefixError], None],
        exchanges: Callable[[dict[Prefix, Prefix]], None],
        at_least: int,
    ) -> None:
        self._model = model
        self._options = options
        self._starts_over = starts_over
        self._exchanges = exchanges
        self._at_least = at_least
        self._all: list[Share] = []
        self.cache = self._empty()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Share]:
        return iter(self._all)

    def of(self, prefix: Prefix) -> Share | None:
        """The share that is stored as this prefix, or was."""
        return next((s for s in self._all if prefix in (s.prefix, *s.former)), None)

    def read_by(self, text: str) -> Share | None:
        """The longest text that another one starts with, and goes on after."""
        heads = [share for share in self._all if text.startswith(share.shared.text)]
        heads = [share for share in heads if len(share.shared.text) < len(text)]
        return max(heads, key=lambda share: len(share.shared.text), default=None)

    def add(
        self,
        shared: SharedText,
        ids: list[int],
        alone: AbstractContextManager[object] | None = None,
    ) -> Share:
        """Computes and stores a text, or gives the share that has stored it.

        Of a text that starts as another one does, only the rest is computed and stored. The other one
        is stored in two parts from then on, where layers hold all of it.

        Args:
            shared: The text.
            ids: Its token ids.
            alone: Entered while the model computes.
        """
        found = next((share for share in self._all if share.shared == shared), None)
        if found is not None and found.ids == ids:
            return self.current(found, alone)
        self._check_model()
        salt = str(len(self._all)) if any(share.ids == ids for share in self._all) else None
        prefix, prefill_s = self._computed(ids, salt, alone)
        share = Share(shared, ids, prefix, prefill_s, self.cache, salt)
        self._all.append(share)
        return share

    def current(self, share: Share, alone: AbstractContextManager[object] | None = None) -> Share:
        """Sees to it that a share is stored by the model as it is now.

        Args:
            share: Gets another prefix if the model has changed.
            alone: Entered while the model computes.
        """
        self._check_model()
        if share.cache is not self.cache:
            share.former.clear()
            share.prefix, share.prefill_s = self._computed(share.ids, share.salt, alone)
            share.cache = self.cache
        return share

    def _check_model(self) -> None:
        try:
            self.cache.attach(self._model)
        except StalePrefixError as error:
            logger.info("prefixes are computed anew: %s", error)
            self.cache = self._empty()
            self._starts_over(error)

    def _computed(
        self, ids: list[int], salt: str | None, alone: AbstractContextManager[object] | None
    ) -> tuple[Prefix, float]:
        start = time.perf_counter()
        title = f"granikv prefix of {len(ids)} tokens"
        with alone or nullcontext(), forward_progress(self._model, title):
            self._cut(np.array(ids, dtype=np.int64), salt)
            # what starts as another text does goes on from it
            stored = PrefixLookup(self.cache.rows.prefixes.all)
            parent = stored.longest(np.array(ids[:-1], dtype=np.int64), salt)
            rest = torch.tensor([ids[0 if parent is None else parent.stop :]])
            prefix = self.cache.prefill(self._model, rest, parent=parent, salt=salt)
        return prefix, time.perf_counter() - start

    def _cut(self, ids: NDArray[np.int64], salt: str | None) -> None:
        """Lets what is stored end where other ids part from it, if what they have in common is long."""
        held = self.cache.rows.prefixes
        parent = PrefixLookup(held.all).longest(ids, salt)
        rest = ids[0 if parent is None else parent.stop :]
        children = {level for level in held.levels if (level.parent, level.salt) == (parent, salt)}
        num_common = {level: common_head(level.token_ids.numpy(), rest) for level in children}
        level = max(filter(can_be_cut, children), key=num_common.__getitem__, default=None)
        if level is None or num_common[level] < self._at_least:
            return
        head = head_of(held, level, num_common[level], copies=False)
        replaced = graft(held, level, head, copies=False)
        for share in self._all:
            if share.prefix in replaced:
                share.former.append(share.prefix)
                share.prefix = replaced[share.prefix]
        self._exchanges(replaced)

    def _empty(self) -> AsymmetricPagedCache:
        return AsymmetricPagedCache(self._model.config, **asdict(self._options))
