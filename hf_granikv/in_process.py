"""What lives in one process: a cache that is read through its own methods, and what has a thread."""

from collections.abc import Iterator
from typing import Any, NoReturn, SupportsIndex

from transformers.cache_utils import Cache


class InProcessCache(Cache):
    """Refuses by name what a cache with a shared prefix cannot do right.

    A pickle would hold the prefix once per cache, lose the models that may read it, and come back
    beside weights that nobody has compared. Pairs of keys and values per layer would be dense.
    """

    def fork(self) -> Any:
        """An independent cache in the same state."""
        raise NotImplementedError

    def __copy__(self) -> Any:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.fork()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled, nor sent to another process: its prefix "
            "belongs to weights of this one. Use prefix.save(path) and cache.load(path, model), or "
            "cache.prefill(model, ids) there; within a process cache.fork() or copy.deepcopy."
        )

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            f"{type(self).__name__} is not iterable: it holds no keys and values of each row in "
            "one piece. Its layers are cache.layers; for tensors per row fill a DynamicCache."
        )


class OneOfAKind:
    """Refuses by name to be copied or sent elsewhere: a thread of its own serves this one."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: one thread serves it, and callers wait "
            "for that one. Make another over the same model; for a second conversation that starts "
            "as one does, agent.fork(name) or memory.fork(); for the prefixes alone, cache.fork()."
        )
