"""Peers on the same inputs: prepared, compared, then timed in turns."""

import argparse
import gc
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_granikv.bench.agreement import Agreement, ResultsDiffer, Tolerance, disagreements
from hf_granikv.bench.peers import Peer, PeerAbsent, PeerFactory
from hf_granikv.bench.workload import Workload
from hf_granikv.disturbance import Disturbance

# memory that peers of a few bytes, the compiler and steps take on the way
_RESERVE_BYTES = 2e9


@dataclass
class Timing:
    """What the steps of one peer took.

    Attributes:
        seconds: Of each step.
        growth_bytes: The most that resident memory grew by in a step; None if that was not watched.
    """

    seconds: list[float] = field(default_factory=list)
    growth_bytes: int | None = None


def chosen(
    arguments: argparse.Namespace, factories: dict[str, PeerFactory], model: PreTrainedModel
) -> list[str]:
    """The names of the peers that are asked for, or else the usual ones.

    Raises:
        ValueError: One that was named cannot run here, or nothing can be compared with the first.
    """
    if arguments.peers is None:
        usual: list[str] = arguments.default_peers
        return usual
    names = list(dict.fromkeys(arguments.peers))
    for name in names:
        if reason := factories[name](model).missing():
            raise ValueError(f"--peers {name}: {reason}; leave it out, or change that.")
    if not factories[names[0]](model).is_compared:
        raise ValueError(
            f"--peers begins with {names[0]}, whose results are other ones; name first whom the others "
            "are compared with."
        )
    return names


def prepared(
    factories: dict[str, PeerFactory],
    names: Sequence[str],
    model: PreTrainedModel,
    workload: Workload,
    num_steps: int,
) -> tuple[list[Peer], dict[str, str]]:
    """The peers that run here, with the prompts computed, and why others do not.

    Raises:
        ValueError: The first one does not.
    """
    peers: list[Peer] = []
    reasons: dict[str, str] = {}
    with tqdm(names, unit="peer", leave=False, disable=None) as bar:
        for name in bar:
            bar.set_description(f"preparing {name}")
            peer = factories[name](model)
            try:
                _check(peer, workload, num_steps)
                peer.prepare(workload, num_steps)
            except PeerAbsent as error:
                reasons[name] = str(error)
            else:
                peers.append(peer)
            gc.collect()
    if names[0] in reasons:
        raise ValueError(f"{names[0]} cannot be measured here: {reasons[names[0]]}")
    return peers, reasons


def compare(
    peers: Sequence[Peer], tokens: Tensor, tolerance: Tolerance
) -> tuple[dict[str, Agreement], dict[str, str]]:
    """Checks, while warming up, that all peers compute what the first one does.

    Args:
        peers: They are prepared.
        tokens: [num_steps, num_rows, 1] ids.
        tolerance: The most that they may differ by, as in `Agreement`.

    Returns:
        How far each is from the first, and which other engines are not to be timed, and why.

    Raises:
        ResultsDiffer: A cache differs by more, or its logits are no numbers.
    """
    agreements = {peer.name: Agreement() for peer in peers[1:] if peer.is_compared}
    last = peers[0]
    for ids in tokens:
        logits = []
        for peer in peers:
            _warm(last, peer, ids)
            logits.append(peer.step(ids))
            last = peer
        for peer, theirs in zip(peers[1:], logits[1:], strict=True):
            if peer.is_compared:
                agreements[peer.name].add(theirs, logits[0])
    differing = disagreements(agreements, peers[0].name, tolerance)
    for peer in peers[1:]:
        if peer.name in differing and not peer.is_other_engine:
            raise ResultsDiffer(differing[peer.name])
    return agreements, differing


def checked_race(
    peers: Sequence[Peer],
    reasons: dict[str, str],
    tokens: Tensor,
    num_warmup: int,
    tolerance: Tolerance,
    *,
    rotates: bool,
    description: str,
) -> tuple[list[Peer], dict[str, Timing], dict[str, Agreement], dict[str, str]]:
    """Compares peers while they warm up, and times those that compute the same.

    Args:
        peers: What `prepared` gave.
        reasons: Likewise.
        tokens: [num_steps, num_rows, 1] ids.
        num_warmup: How many of the steps are not timed.
        tolerance: See `compare`.
        rotates: See `race`.
        description: Likewise.

    Returns:
        Who was timed, the times, how far each is from the first, and why others were not timed.

    Raises:
        ResultsDiffer: See `compare`.
    """
    agreements, differing = compare(peers, tokens[:num_warmup], tolerance)
    same = [peer for peer in peers if peer.name not in differing]
    timings = race(same, tokens[num_warmup:], rotates=rotates, description=description)
    return same, timings, agreements, {**reasons, **differing}


def race(
    peers: Sequence[Peer], tokens: Tensor, *, rotates: bool, description: str
) -> dict[str, Timing]:
    """Times every step of each peer; says so on stderr if other processes took the processors.

    Args:
        peers: They are prepared, and warm.
        tokens: [num_steps, num_rows, 1] ids.
        rotates: Whether another peer begins in each turn: who comes after one that streams gigabytes
            finds nothing in the processor's caches.
        description: For the progress bar.
    """
    timings = {peer.name: Timing() for peer in peers}
    steps = tqdm(tokens, desc=description, unit="step", leave=False, disable=None)
    last, disturbance = peers[-1], Disturbance()
    for turn, ids in enumerate(steps):
        first = turn % len(peers) if rotates else 0
        for peer in [*peers[first:], *peers[:first]]:
            _warm(last, peer, ids)
            last, timing = peer, timings[peer.name]
            before = resident_bytes()
            start = time.perf_counter()
            peer.step(ids)
            timing.seconds.append(time.perf_counter() - start)
            timing.growth_bytes = max(timing.growth_bytes or 0, resident_bytes() - before)
    if disturbed := disturbance.described():
        print(f"{description}: {disturbed}", file=sys.stderr)
    return timings


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def free_bytes() -> float:
    """Memory that processes can still get; infinite where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    return next(
        (1024.0 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable")), math.inf
    )


def _check(peer: Peer, workload: Workload, num_steps: int) -> None:
    if reason := peer.missing():
        raise PeerAbsent(reason)
    needed, free = peer.bytes_needed(workload, num_steps), free_bytes()
    # little ones are tried: who has no room for them has none for the model
    if needed > _RESERVE_BYTES / 4 and needed + _RESERVE_BYTES > free:
        raise PeerAbsent(
            f"it would hold {needed / 1e9:.1f} of the {free / 1e9:.1f} GB that are free"
        )


def _warm(last: Peer, peer: Peer, ids: Tensor) -> None:
    """Lets a peer's threads take over from others, which spin for a while when they have nothing to do."""
    if last.has_own_threads != peer.has_own_threads:
        peer.warm(ids)
