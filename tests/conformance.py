"""Families x modes x layouts: what is exact, what is dense, what is refused, and the table of it.

    python tests/conformance.py > docs/conformance.md

`integration/test_conformance.py` holds every cell; the table is drawn from the same registries.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from decoding_modes import EVEN, MODES, Inputs, Mode
from families import DENSE_ROUTE, HYBRIDS, LOCAL, REFUSED, SHARED_PATH, Family
from prompts import left_padded, middle_padded, right_padded, suffix_only, whole

Rows = Sequence[Sequence[int]]

SERVED: dict[str, Family] = {**SHARED_PATH, **LOCAL, **DENSE_ROUTE}
KINDS: dict[str, dict[str, Family]] = {
    "shared path": SHARED_PATH,
    "shared path, local layers by position": LOCAL,
    "dense route": DENSE_ROUTE,
    "hybrids: rows of one length, all of one chain": HYBRIDS,
}
# no attention interface: these know no attention but their own
WITHOUT_INTERFACE = ("bloom", "falcon", "gpt_neo")

LAYOUTS: dict[str, Callable[[Rows], Inputs]] = {
    "left padding": lambda rows: left_padded(whole(rows)),
    "more padding than needed": lambda rows: left_padded(whole(rows), extra=4),
    "suffix ids, whole mask": suffix_only,
    "prefix, pads, suffix": middle_padded,
    "right padding": lambda rows: right_padded(whole(rows)),
}

# what hybrids refuse by layer name: pads, and tokens that would have to be taken back
HYBRID_MODES: dict[str, Mode] = {
    name: replace(mode, lengths=EVEN) for name, mode in MODES.items() if not mode.is_drafted
}


# layers of gemma3n read ids, which embeddings do not tell
REFUSED_CELLS: dict[tuple[str, str], str] = {
    ("gemma3n", "inputs_embeds"): "reads input_ids in its layers",
    # by transformers itself
    ("falcon_h1", "inputs_embeds"): "doesn't have its forwarding implemented",
    ("zamba2", "inputs_embeds"): "doesn't have its forwarding implemented",
    ("nemotron_h", "inputs_embeds"): "doesn't have its forwarding implemented",
    **{
        (family, mode): "stateful models|assisted decoding is not possible"
        for family in HYBRIDS
        for mode in MODES
        if mode not in HYBRID_MODES
    },
}
# of scores and logits, against each row alone
ATOL = 1e-4
# `DynamicCache` is as far from uncached generation there: up to 1.5e-3
WIDER_ATOL = dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), 3e-3)


class Cell(NamedTuple):
    family: str
    mode: str
    layout: str


def cells(families: Mapping[str, Family], modes: Mapping[str, Mode]) -> Iterator[Cell]:
    """Every family in every mode in every layout that the mode can take."""
    for family, (name, mode) in product(families, modes.items()):
        if (family, name) not in REFUSED_CELLS:
            yield from (Cell(family, name, layout) for layout in mode.layouts or LAYOUTS)


def attention_of(family: str) -> str:
    """The attention that a family is tried with."""
    return "eager" if family in WITHOUT_INTERFACE else "granikv"


def table() -> str:
    """The table of the documentation, in Markdown."""
    head = [
        "# What is exact",
        "",
        "Drawn from the registries of the tests by `python tests/conformance.py > "
        "docs/conformance.md`; every cell is a test in",
        "`tests/integration/test_conformance.py`. Tiny random models in float32; tokens equal those of "
        "generation without a cache,",
        "each row alone, and scores, logits and scores of beams, where a mode returns them, lie within "
        f"{ATOL:g} of its own",
        f"({', '.join(f'{family}: {atol:g}' for family, atol in WIDER_ATOL.items())}). Random numbers "
        "of a row are those that it draws alone.",
        "",
        "| families | kind |",
        "|---|---|",
    ]
    families = [f"| {', '.join(members)} | {kind} |" for kind, members in KINDS.items()]
    columns = [kind.split(":")[0] for kind in KINDS]
    modes = [
        f"| {name} | {', '.join(map(str, mode.lengths))} | "
        f"{' | '.join(_verdict(name, kind) for kind in KINDS)} |"
        for name, mode in MODES.items()
    ]
    return (
        "\n".join(
            [
                *head,
                *families,
                f"| {', '.join(REFUSED)} | refused when the cache is built, naming the layer's kind |",
                "",
                "Dense route: keys and values are put together for every forward, right but not faster; "
                "`explain()` counts it.",
                "",
                f"| mode | private tokens of the rows | {' | '.join(columns)} |",
                f"|---|---|{'---|' * len(columns)}",
                *modes,
                "",
                f"Hybrids: {' and '.join(map(str, EVEN))} private tokens; ragged rows are refused by layer "
                "name.",
                "",
                f"Layouts: {'; '.join(LAYOUTS)}. Every family meets every mode in every layout, but",
                "; ".join(
                    f"{name} in {', '.join(mode.layouts)} alone"
                    for name, mode in MODES.items()
                    if mode.layouts
                )
                + ".",
            ]
        )
        + "\n"
    )


def _verdict(mode: str, kind: str) -> str:
    refused = [family for family in KINDS[kind] if (family, mode) in REFUSED_CELLS]
    if len(refused) == len(KINDS[kind]):
        return "refused"
    word = "exact, dense" if kind == "dense route" else "exact"
    return f"{word}; refused: {', '.join(refused)}" if refused else word


if __name__ == "__main__":
    print(table(), end="")
