"""Families x modes x layouts: what is exact, what is dense, what is refused, and the table of it.

    python tests/conformance.py > docs/conformance.md

`integration/test_conformance.py` holds every cell; the table is drawn from the same registries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from families import DENSE_ROUTE, HYBRIDS, LOCAL, REFUSED, SHARED_PATH, Family
from prompts import left_padded, middle_padded, suffix_only, suffixes, tokens, whole
from torch import Tensor

Inputs = dict[str, Tensor]
Rows = Sequence[Sequence[int]]

SERVED: dict[str, Family] = {**SHARED_PATH, **LOCAL, **DENSE_ROUTE}
KINDS: dict[str, dict[str, Family]] = {
    "shared path": SHARED_PATH,
    "shared path, local layers by position": LOCAL,
    "dense route": DENSE_ROUTE,
}
# no attention interface: these know no attention but their own
WITHOUT_INTERFACE = ("bloom", "falcon", "gpt_neo")


@dataclass(frozen=True)
class Mode:
    """A way to call `generate`, on suffixes of these lengths.

    Attributes:
        options: Arguments of `generate`.
        lengths: Suffix lengths; ragged ones are compared with each row alone, the others with the
            same call without a cache, at the same seed.
        is_scored: Whether scores are compared too.
        is_drafted: Whether tokens are guessed ahead, which must not change the greedy ones; without
            a cache there is no such call.
    """

    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = (3, 7, 0, 5)
    is_scored: bool = False
    is_drafted: bool = False

    def rows(self) -> list[list[int]]:
        """Suffixes; a lone row repeats itself, so that prompt lookup finds something."""
        if len(self.lengths) == 1:
            return [tokens(3, seed=8) * (self.lengths[0] // 3)]
        return suffixes(*self.lengths)

    @property
    def is_ragged(self) -> bool:
        return len(set(self.lengths)) > 1


EVEN = (5, 5)
LONE = (9,)
MODES: dict[str, Mode] = {
    "greedy": Mode(),
    "greedy, scores": Mode(lengths=EVEN, is_scored=True),
    "sampling": Mode({"do_sample": True, "top_k": 20}, EVEN),
    "3 sequences each": Mode({"do_sample": True, "num_return_sequences": 3}, EVEN),
    "beams": Mode({"num_beams": 3, "num_return_sequences": 2}, EVEN, is_scored=True),
    "beam sampling": Mode({"num_beams": 3, "do_sample": True}, EVEN, is_scored=True),
    "prompt lookup": Mode({"prompt_lookup_num_tokens": 3}, LONE, is_drafted=True),
    "assistant": Mode({"assistant_model": True}, LONE, is_drafted=True),
    "guidance": Mode({"guidance_scale": 1.5}),
    "repetition penalty": Mode({"repetition_penalty": 1.8}),
    "no repeated n-grams": Mode({"no_repeat_ngram_size": 2}),
    "all processors of ids": Mode(
        {
            "bad_words_ids": [[47], [13, 42]],
            "encoder_no_repeat_ngram_size": 3,
            "encoder_repetition_penalty": 1.1,
            "no_repeat_ngram_size": 2,
            "repetition_penalty": 1.2,
            "sequence_bias": [[[5, 9], 4.0], [[7], -3.0]],
        }
    ),
    "early end": Mode({"eos_token_id": [2, 5, 13, 44, 58], "min_new_tokens": 2}, EVEN),
}

# what hybrids refuse by layer name: pads, and tokens that would have to be taken back
HYBRID_MODES: dict[str, Mode] = {
    name: replace(mode, lengths=EVEN) if mode.is_ragged else mode
    for name, mode in MODES.items()
    if not mode.is_drafted
}

LAYOUTS: dict[str, Callable[[Rows], Inputs]] = {
    "left padding": lambda rows: left_padded(whole(rows)),
    "more padding than needed": lambda rows: left_padded(whole(rows), extra=4),
    "suffix ids, whole mask": suffix_only,
    "prefix, pads, suffix": middle_padded,
}


def attention_of(family: str) -> str:
    """The attention that a family is tried with."""
    return "eager" if family in WITHOUT_INTERFACE else "granikv"


def table() -> str:
    """The table of the documentation, in Markdown."""
    lines = [
        "# What is exact",
        "",
        "Drawn from the registries of the tests by `python tests/conformance.py > "
        "docs/conformance.md`; every cell is a test in",
        "`tests/integration/test_conformance.py`. Tiny random models in float32; tokens (and scores "
        "within 1e-4) equal those of",
        "generation without a cache: each row alone where rows are ragged, the same call where they "
        "are of one length.",
        "",
        "| families | kind |",
        "|---|---|",
    ]
    lines += [f"| {', '.join(families)} | {kind} |" for kind, families in KINDS.items()]
    lines += [
        f"| {', '.join(HYBRIDS)} | hybrids: rows of one length, all of one chain; scores within 3e-3 |",
        f"| {', '.join(REFUSED)} | refused when the cache is built, naming the layer's kind |",
        "",
        "Dense route: keys and values are put together for every forward, right but not faster; "
        "`explain()` counts it.",
        "",
        f"Modes, each with every family served: {'; '.join(MODES)}. Hybrids: all of these but "
        f"{', '.join(name for name in MODES if name not in HYBRID_MODES)}, which they refuse.",
        "",
        f"Layouts, each with every family served, ragged, greedy: {'; '.join(LAYOUTS)}. Hybrids: all, "
        "without pads between tokens of a row.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
