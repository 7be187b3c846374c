"""Choosing the next token of one turn, as `generate` does for a batch of that row alone."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria


class Sampler:
    """What a turn draws with: processors, criteria and random numbers of its own.

    Args:
        prompt_ids: `[1, prompt_len]` int64, the whole prompt; where it lies, tokens are chosen.
        processors: As `generate` prepares them.
        criteria: Likewise.
        generator: For draws; None chooses the most probable token.
        keeps_scores: Whether criteria get the scores of all steps.

    Attributes:
        max_length: Ids of prompt and answer together, at most.
    """

    def __init__(
        self,
        prompt_ids: Tensor,
        *,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        generator: torch.Generator | None = None,
        keeps_scores: bool = False,
    ) -> None:
        self._processors: Any = processors
        self._generator = generator
        self._scores: list[Tensor] | None = [] if keeps_scores else None
        lengths = [c for c in criteria if type(c) is MaxLengthCriteria]
        ends = [c for c in criteria if type(c) is EosTokenCriteria]
        self.max_length = min(c.max_length for c in lengths)
        self._end_ids = {
            i for c in ends for i in torch.as_tensor(c.eos_token_id).flatten().tolist()
        }
        # numbers are compared without a tensor, which would make a device wait
        self._others = [c for c in criteria if c not in (*lengths, *ends)]
        self._length = prompt_ids.shape[1]
        self._buffer = prompt_ids
        self._reads_ids = bool(len(processors) or self._others)

    @property
    def is_plain(self) -> bool:
        """Whether the next token is the one with the largest logit."""
        return not len(self._processors) and self._generator is None and self._scores is None

    def choose(self, logits: Tensor) -> Tensor:
        """Chooses the next token.

        Args:
            logits: `[vocab_size]` after the last id.

        Returns:
            `[]` int64.
        """
        scores = logits[None].to(copy=True, dtype=torch.float32, device=self._buffer.device)
        scores = self._processors(self._ids, scores)
        if self._scores is not None:
            self._scores.append(scores)
        if self._generator is None:
            return scores.argmax(dim=-1)[0]
        probs = torch.nn.functional.softmax(scores, dim=-1)
        return torch.multinomial(probs, num_samples=1, generator=self._generator)[0, 0]

    def take(self, token_id: int) -> str | None:
        """Appends the chosen token.

        Returns:
            Why the answer ends with it, `"stop"` or `"length"`; None if it goes on.
        """
        if self._reads_ids:
            if self._length == self._buffer.shape[1]:
                room = self._buffer.new_zeros(1, max(16, self._length // 2))
                self._buffer = torch.cat([self._buffer, room], dim=1)
            self._buffer[0, self._length] = token_id
        self._length += 1
        scores = None if self._scores is None else tuple(self._scores)
        # all of them are asked, as some count their calls
        is_met = [bool(criterion(self._ids, scores).all()) for criterion in self._others]
        if token_id in self._end_ids or any(is_met):
            return "stop"
        return "length" if self._length >= self.max_length else None

    @property
    def _ids(self) -> Tensor:
        return self._buffer[:, : self._length]


def most_probable(logits: Sequence[Tensor]) -> Sequence[Tensor]:
    """Chooses what several plain samplers would, at once.

    Args:
        logits: `[vocab_size]` each.

    Returns:
        `[]` int64 each.
    """
    return torch.stack(list(logits)).float().argmax(dim=-1).unbind()
