"""Rows of a batch that read several prefixes."""

from dataclasses import dataclass

import torch
from torch import Tensor

# special tokens and single bytes come first in a vocabulary; in a random text they make activations
# that bfloat16 has no digits for, and any two ways to compute them differ
_FIRST_ID = 100


def first_plain_id(vocab_size: int) -> int:
    """The least id that is not special."""
    return min(_FIRST_ID, vocab_size // 10)


def random_ids(vocab_size: int, shape: tuple[int, ...]) -> Tensor:
    """Random ids of that shape, none of them special."""
    return torch.randint(first_plain_id(vocab_size), vocab_size, shape)


@dataclass(frozen=True, eq=False)
class Workload:
    """Rows that read prefixes.

    Attributes:
        prefixes: Each `[1, prefix_len]` ids.
        suffixes: `[num_rows, suffix_len]` ids.
        reads: Which prefix each row reads.
    """

    prefixes: tuple[Tensor, ...]
    suffixes: Tensor
    reads: tuple[int, ...]

    @classmethod
    def random(
        cls, lengths: list[int], num_agents: int, suffix_len: int, vocab_size: int, shuffled: bool
    ) -> "Workload":
        """Random ids; rows of one prefix are neighbours unless shuffled."""
        prefixes = tuple(random_ids(vocab_size, (1, length)) for length in lengths)
        reads = [i for i in range(len(lengths)) for _ in range(num_agents)]
        if shuffled:
            reads = [reads[i] for i in torch.randperm(len(reads)).tolist()]
        suffixes = random_ids(vocab_size, (len(reads), suffix_len))
        return cls(prefixes, suffixes, tuple(reads))

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return len(self.reads)

    def rows_of(self, prefix_idx: int) -> list[int]:
        """The rows that read a prefix."""
        return [row for row, read in enumerate(self.reads) if read == prefix_idx]

    @property
    def pads(self) -> Tensor:
        """`[num_rows]` pads to the left of each row."""
        lengths = torch.tensor([self.prefixes[read].shape[1] for read in self.reads])
        return lengths.max() - lengths

    def padded_prompts(self) -> dict[str, Tensor]:
        """Whole prompts under left padding, as `generate` takes them."""
        pads = self.pads
        columns = torch.arange(
            int(pads[0]) + self.prefixes[self.reads[0]].shape[1] + self.suffixes.shape[1]
        )
        rows = [
            torch.cat([ids.new_zeros(int(pad)), ids[0], suffix])
            for pad, ids, suffix in zip(
                pads, (self.prefixes[read] for read in self.reads), self.suffixes, strict=True
            )
        ]
        mask = (columns >= pads[:, None]).long()
        return {"input_ids": torch.stack(rows), "attention_mask": mask}
