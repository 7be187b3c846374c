"""Who reads which chain of prefixes: turns that wait or run, and idle agents."""

import logging
from collections.abc import Mapping
from dataclasses import replace

from hf_granikv.engine.job import Job
from hf_granikv.engine.memories import Memories
from hf_granikv.live_levels import num_between
from hf_granikv.live_rows import LiveRows
from hf_granikv.pools import Prefix

logger = logging.getLogger(__name__)


class Readers:
    """Lets turns and idle agents go over to other chains of the same ids.

    Args:
        rows: Of the batch.
        memories: What idle agents hold.
        waiting: The turns that wait, by their arrival; the batch's own.
        running: Those that run, likewise.
    """

    def __init__(
        self,
        rows: LiveRows,
        memories: Memories,
        waiting: dict[int, Job],
        running: dict[int, Job],
    ) -> None:
        self._rows = rows
        self._memories = memories
        self._waiting = waiting
        self._running = running

    @property
    def jobs(self) -> list[Job]:
        """All turns."""
        return [*self._waiting.values(), *self._running.values()]

    @property
    def leaves(self) -> list[Prefix | None]:
        """Where their chains end."""
        parked = self._memories.parked
        return [*(job.leaf for job in self.jobs), *(row.prefix for row in parked)]

    def rename(self, replaced: Mapping[Prefix, Prefix]) -> None:
        """Lets agents be readers of others in the place of the prefixes that they were given."""
        for each in (*self._memories, *self.jobs):
            if each.prefix is not None:
                each.prefix = replaced.get(each.prefix, each.prefix)

    def exchange(self, replaced: Mapping[Prefix, Prefix]) -> None:
        """Lets all who read some prefixes read others: the same ids in other parts. Nothing is copied."""
        self._memories.exchange(
            {
                id(row): row.after(replaced[row.prefix])
                for row in self._memories.parked
                if row.prefix is not None and row.prefix in replaced
            }
        )
        self._rows.exchange(replaced)
        for job in self.jobs:
            if job.leaf is None or job.leaf not in replaced:
                continue
            job.leaf = replaced[job.leaf]
            if job.offloaded is not None:
                parked = job.offloaded.parked.after(job.leaf)
                job.offloaded = replace(job.offloaded, parked=parked)

    def restart(self, job: Job, leaf: Prefix) -> None:
        """Gives a turn that runs another row, of what it holds after a longer chain.

        If that fails it waits again.
        """
        row, job.leaf, job.row = job.row, leaf, None
        num_left = max(0, job.num_held - num_between(job.prefix, leaf))
        try:
            self._rows.make_room([], num_left)
            rest = self._rows.lend(row).after(leaf)
            self._rows.drop(row)
            row = None
            job.row = self._rows.start(leaf, rest, num_copied=num_left)
            job.num_held = max(job.num_held, job.num_shared)
        except Exception:
            logger.info("a row could not be exchanged; its turn waits again", exc_info=True)
            if row is not None:
                self._rows.drop(row)
            job.num_held = 0
            self._waiting[job.order] = self._running.pop(job.order)
