"""The texts that agents share, stored in one cache, and stored anew when the model has changed."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from hf_granikv.cache import AsymmetricPagedCache
from hf_granikv.config import CacheOptions
from hf_granikv.errors import StalePrefixError
from hf_granikv.lookup import PrefixLookup
from hf_granikv.pools import Prefix
from hf_granikv.prompts import SharedText
from hf_granikv.timing import forward_progress

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Share:
    """A stored prefix with the text behind it.

    Attributes:
        shared: The text.
        ids: Its token ids.
        prefix: What is stored of it.
        prefill_s: Seconds that this took.
        cache: Where it is stored.
        salt: Keeps it apart from another share with the same ids.
    """

    shared: SharedText
    ids: list[int]
    prefix: Prefix
    prefill_s: float
    cache: AsymmetricPagedCache = field(repr=False)
    salt: str | None = None


class Shares:
    """What the agents of one runner read.

    Args:
        model: The model that reads it.
        options: Of the cache.
        starts_over: Called when the model has changed, so that everything computed is void.

    Attributes:
        cache: Holds all prefixes of the model as it is now.
    """

    def __init__(
        self, model: Any, options: CacheOptions, starts_over: Callable[[StalePrefixError], None]
    ) -> None:
        self._model = model
        self._options = options
        self._starts_over = starts_over
        self._all: list[Share] = []
        self.cache = self._empty()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Share]:
        return iter(self._all)

    def of(self, prefix: Prefix) -> Share | None:
        """The share that is stored as this prefix."""
        return next((share for share in self._all if share.prefix is prefix), None)

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

        Of a text that starts as another one does, only the rest is computed and stored.

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
            # what starts as another text does goes on from it
            stored = PrefixLookup(self.cache.rows.prefixes.all)
            parent = stored.longest(np.array(ids[:-1], dtype=np.int64), salt)
            rest = torch.tensor([ids[0 if parent is None else parent.stop :]])
            prefix = self.cache.prefill(self._model, rest, parent=parent, salt=salt)
        return prefix, time.perf_counter() - start

    def _empty(self) -> AsymmetricPagedCache:
        return AsymmetricPagedCache(self._model.config, **asdict(self._options))
