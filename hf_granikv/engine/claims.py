"""Who will read which ids, and who holds them: what is compared to find what can be held once."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_granikv.batch_rows import ParkedRow
from hf_granikv.engine.job import Job
from hf_granikv.engine.memories import Memories
from hf_granikv.engine.memory import num_common
from hf_granikv.level_cuts import can_be_cut
from hf_granikv.live_levels import LiveLevels, num_between
from hf_granikv.pools import Prefix

Ints = NDArray[np.int64]


@dataclass(eq=False, slots=True)
class Claim:
    """Ids that come after the same prefixes for whoever reads or holds them.

    Attributes:
        leaf: The end of the chain before them.
        token_ids: Ids, of which those from `start` on are meant.
        start: How many of them the chain holds.
        num_readable: How many may come to be shared: a turn computes its last one itself.
        num_held: How many are computed.
        num_agents: Who gains if they are shared.
        job: The turn whose ids they are, or
        parked: the row of idle agents that holds them, or
        level: what is shared already, and ends elsewhere.
    """

    leaf: Prefix | None
    token_ids: Sequence[int] | Ints
    start: int
    num_readable: int
    num_held: int
    num_agents: int
    job: Job | None = None
    parked: ParkedRow | None = None
    level: Prefix | None = None

    def ids(self, count: int | None = None) -> Ints:
        """`[num_readable]` the ids, or the first ones."""
        count = self.num_readable if count is None else min(count, self.num_readable)
        return np.asarray(self.token_ids[self.start : self.start + count], dtype=np.int64)

    @property
    def waits(self) -> bool:
        """Whether they are those of a turn that has yet to begin."""
        return self.job is not None and self.job.row is None


def claims_of(
    jobs: Collection[Job], compared: Collection[Job], memories: Memories, levels: LiveLevels
) -> list[Claim]:
    """Gives everything that may have ids in common.

    Args:
        jobs: All turns.
        compared: Those among them that have begun, or will before long.
        memories: What idle agents hold.
        levels: What is shared already. Turns that wait read as much of it from now on as they can.
    """
    claims = []
    for job in compared:
        if job.row is None:
            job.leaf = levels.longest(job.prefix, job.token_ids[:-1])
        claims.append(_of_job(job))
    asking = {id(job.memory) for job in jobs}
    readers: Counter[Prefix] = Counter()
    for leaf in (job.leaf for job in jobs):
        readers.update(() if leaf is None else leaf.chain)
    parked: dict[int, Claim] = {}
    for memory in memories:
        kept = memory.kept
        row, is_idle = kept.parked, id(memory) not in asking
        if row is None or row.sees_less:
            continue
        if id(row) not in parked:
            start = num_between(memory.prefix, row.prefix)
            count = row.num_tokens
            parked[id(row)] = Claim(row.prefix, kept.token_ids, start, count, count, 0, parked=row)
        parked[id(row)].num_agents += is_idle
        if is_idle:
            readers.update(() if row.prefix is None else row.prefix.chain)
    claims += parked.values()
    for level in filter(can_be_cut, levels):
        ids, count = level.token_ids.numpy(), level.num_tokens
        claims.append(Claim(level.parent, ids, 0, count, count, readers[level], level=level))
    return claims


def _of_job(job: Job) -> Claim:
    start, num_held = job.num_shared, job.num_private
    memory = job.memory
    if job.row is None and memory is not None and memory.kept.parked is not None:
        common = num_common(memory.kept.token_ids, job.token_ids)
        # what it holds after ids that it is not asked is of no use to it
        if num_between(job.prefix, memory.kept.parked.prefix) <= common:
            num_held = max(0, common - start)
    count = len(job.token_ids) - 1 - start
    return Claim(job.leaf, job.token_ids, start, count, min(num_held, count), 1, job=job)
