"""Forward passes over the segments of a living batch."""

import logging
from typing import Any

import torch
from torch import Tensor

from hf_granikv.announce import forward_parameters
from hf_granikv.compat import CACHE_ARGUMENT
from hf_granikv.layer_kinds import ServedModel
from hf_granikv.packable import why_masked, why_not_packable
from hf_granikv.packed import PackedCache, Segment

logger = logging.getLogger(__name__)


class SegmentRuns:
    """Computes segments: side by side in one forward pass, or where a model cannot, one by one.

    Args:
        model: The model.
        served: What is known of its layers.

    Attributes:
        why_not_packed: Why steps take several forwards; None if they take one.
        needs_mask: Whether the model is to be given masks over rows of different length.
    """

    def __init__(self, model: Any, served: ServedModel) -> None:
        self._model = model
        self._has_states = served.has_states
        self.why_not_packed = why_not_packable(model, served)
        self.needs_mask = why_masked(model, served) is not None

    def stop_packing(self, reason: str) -> None:
        """Takes a forward with a mask for each segment from now on."""
        logger.info("steps take one forward with a mask for each batch: %s.", reason)
        self.why_not_packed, self.needs_mask = reason, True

    def run(self, segments: list[Segment]) -> list[Tensor]:
        """Gives the logits after the last token of each row, segment by segment.

        Raises:
            NotPackableError: If it turns out that the model cannot run them side by side.
        """
        if len(segments) > 1 and self.why_not_packed is None:
            return self._run_packed(segments)
        # a prompt fails sooner than a decode step, whose rows might lose their states to it
        order = sorted(range(len(segments)), key=lambda i: -segments[i].input_ids.shape[1])
        logits: dict[int, Tensor] = {}
        try:
            for i in order:
                logits[i] = self._run_alone(segments[i])
        except BaseException:
            self._take_back([segments[i] for i in logits])
            raise
        return [logits[i] for i in range(len(segments))]

    def _take_back(self, segments: list[Segment]) -> None:
        for cache, ids in segments:
            if self._has_states:
                cache.rows.row_states.tear()
            else:
                cache.crop(-ids.shape[1])

    def _run_packed(self, segments: list[Segment]) -> list[Tensor]:
        packed = PackedCache(segments)
        counts = [ids.shape[1] for _, ids in segments for _ in ids]
        ends = torch.tensor(counts).cumsum(0) - 1
        logits = self._forward(packed.packed_ids, packed, ends)[0]
        return list(logits.split([len(ids) for _, ids in segments]))

    def _run_alone(self, segment: Segment) -> Tensor:
        cache, ids = segment
        last = torch.tensor([ids.shape[1] - 1])
        return self._forward(ids, cache, last)[:, 0]

    def _forward(self, ids: Tensor, cache: Any, kept: Tensor) -> Tensor:
        """Gives `[num_rows, len(kept), vocab_size]` logits of the columns `kept`."""
        kept = kept.to(ids.device)
        takes = "logits_to_keep" in forward_parameters(self._model)
        options: dict[str, Any] = {"logits_to_keep": kept} if takes else {}
        with torch.no_grad():
            out = self._model(input_ids=ids, use_cache=True, **{CACHE_ARGUMENT: cache}, **options)
        logits: Tensor = out.logits
        return logits if takes else logits.index_select(1, kept)
