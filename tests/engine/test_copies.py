"""What is there twice while tokens come to be shared: what a level is made of, and nothing a third time."""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from agents import llama
from engine_rig import LONG, Rig
from prompts import tokens
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_granikv import prefix_making

# long beside what is looked at of the weights, to see that they are what they were
HISTORY = tokens(1500, seed=1)
NUM_LAYERS = 8
# keys and values of two heads of eight numbers
TOKEN_BYTES = NUM_LAYERS * 2 * 2 * 8 * 4


class Made(TorchDispatchMode):
    """The bytes of all storages that operations have made under it and that are still there.

    Attributes:
        peak: The most at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        self.peak = 0

    def storages(self) -> dict[int, int]:
        """Bytes of each, by its address."""
        self._tensors = [ref for ref in self._tensors if ref() is not None]
        held = [t.untyped_storage() for ref in self._tensors if (t := ref()) is not None]
        return {storage.data_ptr(): storage.nbytes() for storage in held}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        # a view of what was there before is nothing new
        before = {t.untyped_storage().data_ptr() for t in given} - self.storages().keys()
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            is_new = isinstance(tensor, torch.Tensor) and (
                tensor.untyped_storage().data_ptr() not in before
            )
            if is_new:
                self._tensors.append(weakref.ref(tensor))
        self.peak = max(self.peak, sum(self.storages().values()))
        return out


def most_made(rig: Rig) -> list[int]:
    """The most bytes that come on top in every comparison that changes what is shared."""
    sharing, most = rig.batch._sharing, []
    compare = sharing.compare

    def watched(num_next: int) -> None:
        levels = set(rig.rows.levels)
        with Made() as made:
            compare(num_next)
        if levels != set(rig.rows.levels):
            most.append(made.peak)

    sharing.compare = watched  # type: ignore[method-assign]
    return most


def told_history(rig: Rig) -> list[Any]:
    """Two agents that hold a long history each for itself."""
    worth, rig.batch._sharing._worth = rig.batch._sharing._worth, None
    memories = [rig.memory() for _ in range(2)]
    for memory in memories:
        rig.add(HISTORY, memory=memory, **LONG)
    rig.run()
    rig.batch._sharing._worth = worth
    return memories


def of_a_leader(rig: Rig) -> None:
    for i in range(2):
        rig.add([*HISTORY, 40 + i], **LONG)


def of_an_idle_agent(rig: Rig) -> None:
    for i, memory in enumerate(told_history(rig)):
        rig.add([*HISTORY, 40 + i], memory=memory, **LONG)


def of_a_running_turn(rig: Rig) -> None:
    rig.add([*HISTORY, 40], **LONG)
    for _ in range(8):
        rig.step()
    rig.add([*HISTORY, 41], **LONG)


def of_a_scattered_row(rig: Rig) -> None:
    of_a_running_turn(rig)
    (row,) = (job.row for job in rig.batch._running.values())
    state, index = rig.rows._place(row)
    pool = state.cold
    held = pool.table.row(index).copy()
    # every other slot, so that nothing of it can be shown as it lies
    pool._storage.resize(2 * len(held))
    pool._allocator.grow(2 * len(held))
    free = pool._allocator.allocate(len(held))
    slots = np.sort(np.concatenate([held, free]))
    pool._storage.move(held, slots[::2])
    pool._allocator.free(np.setdiff1d(slots, slots[::2]))
    pool.table.scatter()
    pool.table.rename(held, slots[::2])
    pool._forget_views()
    rig.batch.check_integrity()


def of_a_level_that_is_cut(rig: Rig) -> None:
    of_a_leader(rig)
    rig.run()
    of_a_leader(rig)
    for _ in range(8):
        rig.step()
    rig.add([*HISTORY[:750], 50], **LONG)


def of_levels_that_become_one(rig: Rig) -> None:
    memories = [rig.memory() for _ in range(2)]
    for stop in (750, 1490):
        for memory in memories:
            rig.add(HISTORY[:stop], memory=memory, **{**LONG, "max_new_tokens": 1})
        rig.run()
    for i, memory in enumerate(memories):
        rig.add([*HISTORY, 40 + i], memory=memory, **LONG)


LIVES: list[Callable[[Rig], None]] = [
    *(of_a_leader, of_an_idle_agent, of_a_running_turn, of_a_scattered_row),
    *(of_a_level_that_is_cut, of_levels_that_become_one),
]


@pytest.mark.parametrize("is_fused", [True, False], ids=["keeps_its_parent", "alone"])
@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.__name__)
def test_a_level_is_there_besides_what_it_is_made_of_and_no_more(
    life: Callable[..., None], is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_fused:
        monkeypatch.setattr(prefix_making, "is_short", lambda *_: False)
    model = llama(num_hidden_layers=NUM_LAYERS)
    rig = Rig(min_shared_tokens=16, max_step_tokens=512, model=model)
    life(rig)
    most = most_made(rig)
    rig.run()
    # the level itself, two layers of a row that cannot be shown as it lies, what is left over of rows,
    # and small change: ids, samples of the weights
    num_bytes = len(HISTORY) * TOKEN_BYTES
    assert 0.9 * num_bytes < max(most) < 1.45 * num_bytes
