"""What turns and idle agents have in common is held once, and computed by one of them at most."""

import logging
from collections.abc import Collection
from dataclasses import replace
from weakref import WeakKeyDictionary

from hf_granikv.engine.claims import Claim, claims_of
from hf_granikv.engine.job import Job
from hf_granikv.engine.memories import Memories
from hf_granikv.engine.readers import Readers
from hf_granikv.engine.schedule import Limits
from hf_granikv.live_rows import LiveRows
from hf_granikv.pools import Prefix
from hf_granikv.shared_prefix import Level, shared_prefixes, worthwhile_levels
from hf_granikv.worth import Worth

logger = logging.getLogger(__name__)

_KEEPS_STATES = (
    "layers keep states, which are known after the last token of a row only and cannot be cut"
)


class Sharing:
    """Looks for common ids when turns come, and sees to it that they are held once.

    ```
    a is asked    [ text ][ history          ][ message ] .     both are computed by a, then held once;
    b is asked    [ text ][ history          ][ message ] .     b waits for that
    c is idle     [ text ][ history          ]                  holds it already: nothing is computed
    d is asked    [ text ][ another history  ][ message ] .     the same words after others: not the same
    ```

    Tokens are the same where all ids from the first one on are, after the same stored prefix, and
    nowhere else. Levels end where their readers part, and go with the last of them.

    Args:
        rows: Of the batch.
        memories: What idle agents hold.
        waiting: The turns that wait, by their arrival; the batch's own.
        running: Those that run, likewise.
        worth: Says what is worth it; None shares nothing.
    """

    def __init__(
        self,
        rows: LiveRows,
        memories: Memories,
        waiting: dict[int, Job],
        running: dict[int, Job],
        worth: Worth | None,
    ) -> None:
        self._rows = rows
        self._levels = rows.levels
        self._memories = memories
        self._waiting = waiting
        self._running = running
        self._worth = worth
        self._readers = Readers(rows, memories, waiting, running)
        # turns that compute for others, and up to which of their ids; those who wait for that
        self._leaders: dict[Job, int] = {}
        self._followers: set[Job] = set()
        self._refusals: list[str] = []
        self._replaced: WeakKeyDictionary[Prefix, Prefix] = WeakKeyDictionary()

    @property
    def num_tokens(self) -> int:
        """Tokens of all levels."""
        return self._levels.num_tokens

    def compare(self, num_next: int) -> None:
        """Looks for what is common, if there is news since the last time.

        Rows of turns that run may be exchanged for others, which hold the same after longer chains.

        Args:
            num_next: How many of those that wait are looked at.
        """
        if self._worth is None:
            return
        nearest = [self._waiting[order] for order in sorted(self._waiting)[:num_next]]
        fresh = [job for job in nearest if job.offloaded is None]
        if all(job.is_compared for job in fresh) and not any(map(self._is_due, self._leaders)):
            return
        led = set(self._leaders)
        try:
            while self._compare_once([*fresh, *self._running.values()], led, self._worth):
                pass
        except Exception as error:
            # turns can do without
            logger.exception("what turns have in common could not be shared")
            self._refusals = [f"it failed: {error}"]
            self._leaders, self._followers = {}, set()
        self._merge(self._worth)
        for reason in self._refusals:
            self._levels.journal.note_not_shared(reason)
        for job in fresh:
            job.is_compared = True

    def delays(self, job: Job) -> bool:
        """Whether a turn waits for tokens that another one computes, or to be looked at."""
        return job in self._followers or not (job.is_compared or self._worth is None)

    def within(self, limits: Limits) -> Limits:
        """What is left of the limits beside what is shared."""
        if limits.max_tokens is None:
            return limits
        return replace(limits, max_tokens=max(0, limits.max_tokens - self.num_tokens))

    def make_room(self, limits: Limits) -> None:
        """Drops the levels that no running turn reads, if they do not fit beside those that run."""
        used = limits.committed([job.seat for job in self._running.values()]) + self.num_tokens
        if limits.max_tokens is None or used <= limits.max_tokens:
            return
        leaves = [job.leaf for job in self._running.values() if job.leaf is not None]
        dropped = set(self._levels).difference(*(leaf.chain for leaf in leaves))
        for job in self._waiting.values():
            while job.leaf is not None and job.leaf in dropped:
                job.leaf, job.offloaded = job.leaf.parent, None
        for row in self._memories.parked:
            if row.prefix is not None and not dropped.isdisjoint(row.prefix.chain):
                self._memories.forget([id(row)])
        self.tidy()

    def tidy(self) -> None:
        """Lets go of the levels that nobody reads any more."""
        if any(self._levels):
            self._levels.keep_only(self._readers.leaves)

    def exchange(self, replaced: dict[Prefix, Prefix]) -> None:
        """Lets all who read some prefixes read others with the same ids, and whoever comes with one."""
        self._replaced.update(replaced)
        replaced = replaced | self._levels.follow(replaced)
        self._readers.rename(replaced)
        self._readers.exchange(replaced)

    def in_force(self, prefix: Prefix | None) -> Prefix | None:
        """What has taken the place of a prefix, if anything has."""
        while prefix is not None and prefix in self._replaced:
            prefix = self._replaced[prefix]
        return prefix

    def _is_due(self, leader: Job) -> bool:
        """Whether a turn has computed what others wait for, or never will."""
        is_there = leader.order in self._waiting or leader.order in self._running
        return not is_there or leader.num_held >= self._leaders[leader]

    def _compare_once(self, compared: Collection[Job], led: set[Job], worth: Worth) -> bool:
        """Shares what is common and held; gives whether there was any, so that more may be now."""
        self._leaders, self._followers, self._refusals = {}, set(), []
        after: dict[Prefix | None, list[Claim]] = {}
        for claim in claims_of(self._readers.jobs, compared, self._memories, self._levels):
            if claim.num_readable > 0:
                after.setdefault(claim.leaf, []).append(claim)
        for claims in after.values():
            for group in self._with_common_heads(claims, worth):
                levels = self._worthwhile(group, worth)
                tops = [level for level in levels if level.parent is None]
                shared = [self._share([group[i] for i in top.rows], top.stop, led) for top in tops]
                if any(shared):
                    return True
        return False

    def _merge(self, worth: Worth) -> None:
        """Stores levels as one that the same turns read, where that is faster in the steps to come."""
        while (pair := self._next_to_merge(worth)) is not None:
            try:
                self._rows.make_room([], sum(level.num_tokens for level in pair))
                replaced = self._levels.merge(*pair)
            except Exception:
                logger.info("%s and %s stay apart", *pair, exc_info=True)
                return
            self._readers.exchange(replaced)
            self._levels.journal.merged_levels += 1

    def _next_to_merge(self, worth: Worth) -> tuple[Prefix, Prefix] | None:
        """Two levels that are better stored as one."""
        for before, level in self._levels.extended_once(self._readers.leaves):
            jobs = [job for job in self._readers.jobs if job.leaf and level in job.leaf.chain]
            if jobs and worth.merging_pays(
                num_rows=len(jobs),
                num_tokens=level.num_tokens,
                num_before=before.num_tokens,
                num_steps=max(job.num_to_come for job in jobs),
            ):
                return before, level
        return None

    def _with_common_heads(self, claims: list[Claim], worth: Worth) -> list[list[Claim]]:
        """Groups claims of which the first ids are the same, as many as may be worth it."""
        groups: list[list[Claim]] = []
        if not any(claim.waits for claim in claims):
            return groups
        for node in shared_prefixes([claim.ids(worth.at_least) for claim in claims]):
            group = [claims[i] for i in node.rows]
            if any(claim.waits for claim in group):
                if node.num_tokens == worth.at_least:
                    groups.append(group)
                elif (num_agents := sum(claim.num_agents for claim in group)) > 1:
                    self._is_refused(worth, num_agents, node.num_tokens, 0, 0)
        return groups

    def _worthwhile(self, group: list[Claim], worth: Worth) -> list[Level]:
        def pays(level: Level) -> bool:
            claims = [group[i] for i in level.rows]
            if not any(claim.waits for claim in claims):
                return False
            # those who share them already gain nothing by sharing them with more
            num_apart = sum(claim.num_agents for claim in claims if claim.level is None)
            num_saved = _num_saved(claims, level)
            if not num_saved and sum(claim.num_agents for claim in claims) < 2:
                return False
            num_steps = max(c.job.num_to_come for c in claims if c.job is not None)
            return not self._is_refused(worth, num_apart, level.num_tokens, num_saved, num_steps)

        nodes = shared_prefixes([claim.ids() for claim in group])
        return worthwhile_levels(nodes, [claim.num_readable + 1 for claim in group], pays)

    def _is_refused(
        self, worth: Worth, num_rows: int, num_tokens: int, num_saved: int, num_steps: int
    ) -> bool:
        """Whether something is better not shared; notes why."""
        reason = worth.why_not(
            num_rows=num_rows, num_tokens=num_tokens, num_saved=num_saved, num_steps=num_steps
        )
        if reason is None and self._rows.has_states:
            reason = _KEEPS_STATES
        if reason is not None:
            self._refusals.append(reason)
        return reason is not None

    def _share(self, claims: list[Claim], num_tokens: int, led: set[Job]) -> bool:
        """Holds the first tokens of claims once; where nobody has them, lets one turn compute them."""
        holder = _holder(claims, num_tokens)
        if holder is None:
            jobs = {claim.job: claim for claim in claims if claim.job is not None}
            leader = max(
                jobs, key=lambda job: (job.row is not None, jobs[job].num_held, -job.order)
            )
            self._leaders[leader] = leader.num_shared + num_tokens
            self._followers.update(job for job in jobs if job.row is None and job is not leader)
            return False
        copied = [claim.parked or claim.level for claim in claims if claim.job is None]
        num_copied = num_tokens + sum(each.num_tokens for each in copied if each is not None)
        level = self._held_once(holder, num_tokens, num_copied)
        if level is None:
            return False
        if holder.job in led:
            self._levels.journal.once_tokens += num_tokens
        elif holder.level is None:
            self._levels.journal.promoted_tokens += num_tokens
        for claim in claims:
            self._read(claim, level)
        return True

    def _held_once(self, holder: Claim, num_tokens: int, num_copied: int) -> Prefix | None:
        """Makes a level of what somebody holds; None if that fails."""
        try:
            self._rows.make_room([], num_copied)
            if holder.level is not None:
                return self._levels.head_of(holder.level, num_tokens)
            job, parked = holder.job, holder.parked
            parked = parked if job is None else self._rows.lend(job.row, num_tokens)
            assert parked is not None
            return self._levels.promote(parked, holder.ids(num_tokens).tolist())
        except Exception as error:
            logger.info("%d common tokens could not be shared", num_tokens, exc_info=True)
            self._refusals.append(f"it failed: {error}")
            return None

    def _read(self, claim: Claim, level: Prefix) -> None:
        """Lets whoever reads or holds ids read the first of them in a level."""
        job = claim.job
        if claim.level is not None and claim.level is not level:
            self._readers.exchange(self._levels.graft(claim.level, level))
        elif job is None and claim.parked is not None:
            self._memories.exchange({id(claim.parked): claim.parked.after(level)})
        elif job is not None and claim.waits:
            job.leaf = level
        elif job is not None:
            self._readers.restart(job, level)


def _num_saved(claims: list[Claim], level: Level) -> int:
    """Tokens that turns need not compute if the level is shared."""
    missing = [
        level.stop - min(level.stop, max(level.start, claim.num_held))
        for claim in claims
        if claim.job is not None
    ]
    return sum(missing) - (min(missing) if _holder(claims, level.stop) is None else 0)


def _holder(claims: list[Claim], num_tokens: int) -> Claim | None:
    """Who holds so many tokens: by preference what is shared already, then who is idle."""
    holders = [claim for claim in claims if not claim.waits and claim.num_held >= num_tokens]
    return min(holders, key=lambda c: (c.level is None, c.parked is None), default=None)
