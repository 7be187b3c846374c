"""Letting stored prefixes end earlier, so that others can go on from there: nothing is computed."""

from collections.abc import Iterable

from hf_granikv.held_prefixes import HeldPrefixes
from hf_granikv.pools import Prefix


def can_be_cut(level: Prefix) -> bool:
    """Whether every layer has stored all tokens of a level, so that it can end anywhere in it."""
    return not level.states and all(first <= level.start for first in level.starts)


def head_of(held: HeldPrefixes, level: Prefix, num_tokens: int, *, copies: bool) -> Prefix:
    """Makes a prefix of the first tokens of one, or gives that one if these are all.

    Args:
        held: Takes one hold of it.
        level: A prefix that can be cut.
        num_tokens: How many tokens.
        copies: Whether it has storage of its own. Otherwise it shows a part of that of the level, which
            stays as long as any part does.
    """
    if num_tokens == level.num_tokens:
        return level
    return _part(held, level, 0, num_tokens, level.parent, copies=copies)


def graft(held: HeldPrefixes, level: Prefix, head: Prefix, *, copies: bool) -> dict[Prefix, Prefix]:
    """Puts what comes after its head in the place of a prefix.

    Args:
        held: Holds what takes the place, and lets go of the others.
        level: A prefix that can be cut.
        head: Another one of its first ids, or all of them, after the same parent.
        copies: As for `head_of`.

    Returns:
        For the level, and for all held that extend it, what readers have to read instead: the same ids
        in other parts.
    """
    replaced = {level: head}
    if head.stop < level.stop:
        num_tokens = head.num_tokens
        replaced[level] = _part(held, level, num_tokens, level.num_tokens, head, copies=copies)
    let_go(held, [level])
    return replaced | follow(held, replaced)


def follow(held: HeldPrefixes, replaced: dict[Prefix, Prefix]) -> dict[Prefix, Prefix]:
    """Makes prefixes extend what has taken the place of their parents.

    Returns:
        What has taken theirs, over the same storages.
    """
    followed: dict[Prefix, Prefix] = {}
    for below in sorted(held.all, key=lambda each: each.start):
        parent = None if below.parent is None else (replaced | followed).get(below.parent)
        if parent is not None:
            followed[below] = _part(held, below, 0, below.num_tokens, parent, copies=True)
    let_go(held, followed)
    return followed


def _part(
    held: HeldPrefixes, level: Prefix, start: int, stop: int, parent: Prefix | None, *, copies: bool
) -> Prefix:
    pairs = []
    for keys, values, first in zip(level.keys, level.values, level.starts, strict=True):
        # what it keeps of its parents stays with its first part
        own = slice(level.start + start - first if start else 0, level.start + stop - first)
        pairs.append((keys[:, own], values[:, own]))
    is_whole = stop - start == level.num_tokens
    part = held.hot.seal(
        level.token_ids[start:stop],
        pairs,
        parent=parent,
        salt=level.salt,
        num_fused=0 if start else level.num_fused,
        saver=level.saver,
        is_part=level.is_part if is_whole else not copies,
    )
    held.take(part)
    return part


def let_go(held: HeldPrefixes, prefixes: Iterable[Prefix]) -> None:
    """Drops every hold of some prefixes."""
    for prefix in prefixes:
        while prefix in held.all:
            held.let_go(prefix)
