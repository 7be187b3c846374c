"""Requests that arrive at random, of random lengths: the same for every engine."""

from dataclasses import dataclass

import numpy as np

from hf_granikv.bench.workload import first_plain_id


@dataclass(frozen=True)
class Request:
    """A prompt that begins with one of the prefixes.

    Attributes:
        name: Of the request.
        arrival_s: When it comes, in seconds after the start.
        prefix_idx: The prefix that it begins with.
        suffix: The ids after that, at least one.
        num_new: Tokens it asks for; nothing ends it earlier.
    """

    name: str
    arrival_s: float
    prefix_idx: int
    suffix: tuple[int, ...]
    num_new: int


@dataclass(frozen=True)
class Lengths:
    """Log-normal numbers of tokens: many short ones, a few long ones.

    Attributes:
        median: Half are shorter.
        sigma: Standard deviation of the logarithm; at 1, one in 40 is seven times the median.
        most: What longer ones are cut to.
    """

    median: float
    sigma: float
    most: int

    def draw(self, generator: np.random.Generator, count: int) -> list[int]:
        """Draws that many, at least 1 each."""
        drawn = self.median * np.exp(self.sigma * generator.standard_normal(count))
        return [int(n) for n in np.clip(np.rint(drawn), 1, self.most)]


def poisson_requests(
    count: int,
    rate: float,
    *,
    num_prefixes: int,
    suffixes: Lengths,
    outputs: Lengths,
    vocab_size: int,
    seed: int,
) -> list[Request]:
    """Requests of a Poisson process, each over a prefix drawn at random.

    Args:
        count: How many.
        rate: How many come in a second on average.
        num_prefixes: Prefixes to draw from.
        suffixes: Lengths of what is asked after the prefix.
        outputs: Lengths of the answers.
        vocab_size: Ids are below it, and not among the first, which are special.
        seed: Of all of it.
    """
    generator = np.random.default_rng(seed)
    arrivals = np.cumsum(generator.exponential(1 / rate, count))
    reads = generator.integers(num_prefixes, size=count)
    first_id = first_plain_id(vocab_size)
    lengths = zip(suffixes.draw(generator, count), outputs.draw(generator, count), strict=True)
    return [
        Request(
            f"request {i}",
            float(arrivals[i] - arrivals[0]),
            int(reads[i]),
            tuple(generator.integers(first_id, vocab_size, suffix_len).tolist()),
            num_new,
        )
        for i, (suffix_len, num_new) in enumerate(lengths)
    ]
