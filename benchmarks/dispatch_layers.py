"""What some layers of a model hold, for attention to be timed without the model."""

from collections.abc import Callable
from functools import partial
from itertools import count

import numpy as np
import torch
from torch import Tensor

from hf_granikv.backends import PrefixBackend
from hf_granikv.dispatch.calibration import places
from hf_granikv.journal import Journal
from hf_granikv.part_work import ScoreRule
from hf_granikv.pools.cold import ColdPool
from hf_granikv.step_attention import decoded_as_before, step_attention
from hf_granikv.views import (
    GroupShape,
    LayerStep,
    LayerTokens,
    PrefixGroup,
    PrefixPart,
    PrivateTokens,
    StepPlan,
)

# private tokens of several layers may take so much
POOL_BYTES = 64 << 20


class Layers:
    """What some layers hold: enough of them that each run finds another one, in no cache."""

    def __init__(self, shape: GroupShape, suffix_len: int, store: Tensor) -> None:
        rows, heads, width = shape.num_rows, shape.num_kv_heads, shape.head_dim
        query = torch.randn(rows, 1, heads * shape.gqa_ratio, width)
        self.query = query.to(store.dtype).transpose(1, 2)
        group = PrefixGroup(rows=None, depth=0, start=0, stop=shape.prefix_len)
        self.parts = [
            PrefixPart(group, *pair, 0)
            for pair in places(store, (2, heads, shape.prefix_len, width))
        ]
        size = (2, rows, heads, suffix_len, width)
        suffixes = places(store, size)[
            : max(2, POOL_BYTES // (torch.Size(size).numel() * store.itemsize))
        ]
        self.num_layers = len(suffixes)
        self.num_steps = max(self.num_layers, len(self.parts))
        self.pool = ColdPool(self.num_layers)
        self.pool.begin(rows)
        write = self.pool.extend(np.full(rows, suffix_len), None)
        for layer_idx, pair in enumerate(suffixes):
            self.pool.write(layer_idx, write, *pair)
        self.rule = ScoreRule(width**-0.5, None, None)
        self.turns = count()

    def attention(self, plan: StepPlan) -> Callable[..., Tensor]:
        """What attends in a layer that is given by its number, or in the next one.

        It goes as in a model: what `update` has made ready for a layer is there.
        """
        steps = [self._step(layer_idx, plan) for layer_idx in range(self.num_steps)]
        plan.to_come.update(
            (step.layer_idx, LayerTokens(step.parts, step.private, None)) for step in steps
        )

        def attend(turn: int | None = None) -> Tensor:
            step = steps[(next(self.turns) if turn is None else turn) % len(steps)]
            out = decoded_as_before(self.query, step, self.rule.scale, self.rule.softcap)
            return step_attention(self.query, step, self.rule) if out is None else out

        return attend

    def _step(self, layer_idx: int, plan: StepPlan) -> LayerStep:
        """A layer; there may be more of them than places of own tokens, or of prefixes."""
        stored_in, table = layer_idx % self.num_layers, self.pool.table
        storages = self.pool.storage(stored_in)
        assert storages is not None
        read = partial(self.pool.read, stored_in)
        private = PrivateTokens(storages, table.slots, table.max_length, read)
        return LayerStep(layer_idx, plan, (self.parts[layer_idx % len(self.parts)],), private)

    def prefix_part(self, backend: PrefixBackend) -> Callable[[], object]:
        """What runs the prefix part alone, each time that of the next layer."""
        part = self.parts[0]
        planned = partial(backend.planned, scale=self.rule.scale, softcap=None)
        attend = planned(self.query, part.keys, part.values)

        def run() -> None:
            part = self.parts[next(self.turns) % len(self.parts)]
            attend(self.query, part.keys, part.values)

        return run

    def dense(self) -> list[Tensor]:
        """Keys and values of layer 0, `[rows, num_kv_heads, prefix_len + suffix_len, head_dim]`."""
        shared = self.parts[0].keys, self.parts[0].values
        return [
            torch.cat([prefix.expand(len(own), -1, -1, -1), own], 2)
            for prefix, own in zip(shared, self.pool.read(0), strict=True)
        ]


def plan_of(shape: GroupShape, suffix_len: int, dispatch: str) -> StepPlan:
    return StepPlan(
        num_rows=shape.num_rows,
        q_len=1,
        prefix_lens=np.full(shape.num_rows, shape.prefix_len),
        kv_len=shape.prefix_len + suffix_len,
        suffix_mask=None,
        positions=np.full((shape.num_rows, 1), shape.prefix_len + suffix_len - 1),
        is_token=np.ones((shape.num_rows, 1), dtype=bool),
        column_index=None,
        dense_reason=None,
        dense_refusal=None,
        why_unmasked=None,
        dispatch=dispatch,
        journal=Journal(),
    )
