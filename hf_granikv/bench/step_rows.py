"""Rows of peers that took turns step by step."""

from collections.abc import Iterator, Sequence

from hf_granikv.bench.agreement import Agreement
from hf_granikv.bench.peers import NoContext, Peer
from hf_granikv.bench.race import Timing
from hf_granikv.bench.rows import Row, absent, measured

_Figure = tuple[str, str, Sequence[float], str]


def step_rows(
    bench: str,
    workload: str,
    peers: Sequence[Peer],
    timings: dict[str, Timing],
    agreements: dict[str, Agreement],
    reasons: dict[str, str],
) -> list[Row]:
    """Times, what is above the model alone, bytes and agreement of each peer, and who is absent."""
    floor = timings.get(NoContext.name)
    rows = [
        measured(bench, peer.name, workload, metric, unit, values, note)
        for peer in peers
        for metric, unit, values, note in _figures(
            peer, timings[peer.name], floor, agreements.get(peer.name)
        )
    ]
    return rows + [absent(bench, name, workload, reason) for name, reason in reasons.items()]


def _figures(
    peer: Peer, timing: Timing, floor: Timing | None, agreement: Agreement | None
) -> Iterator[_Figure]:
    note = "; ".join(text for text in (peer.note, peer.backends()) if text)
    yield "step", "ms", [1e3 * s for s in timing.seconds], note
    if not peer.is_compared:
        return
    if floor is not None and peer.has_models_time:
        pairs = zip(timing.seconds, floor.seconds, strict=True)
        yield "step_above_no_context", "ms", [1e3 * (s - low) for s, low in pairs], ""
    yield "held", "bytes", [peer.bytes_held()], ""
    if timing.growth_bytes is not None:
        yield "resident_growth", "bytes", [timing.growth_bytes], ""
    if agreement is not None:
        yield "logits_difference", "standard deviations", agreement.differences, ""
        same = agreement.num_same_best / len(agreement.differences)
        yield "same_best_token", "fraction of rows", [same], ""
