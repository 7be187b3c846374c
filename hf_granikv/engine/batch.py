"""The batch that lives: turns join, leave, wait and resume between its steps. One thread only."""

import itertools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from hf_granikv.batch_rows import ParkedRow
from hf_granikv.engine.figures import EngineFigures
from hf_granikv.engine.job import Job
from hf_granikv.engine.memories import Memories
from hf_granikv.engine.memory import NOTHING, num_common
from hf_granikv.engine.offload import OffloadedRow, is_out_of_memory
from hf_granikv.engine.preemption import PreemptionCost
from hf_granikv.engine.sampling import chosen
from hf_granikv.engine.schedule import Limits, Moves, Seat, next_moves, step_feeds
from hf_granikv.engine.sharing import Sharing
from hf_granikv.errors import ColdPoolFullError, TornStateError
from hf_granikv.live_rows import LiveRows, Row
from hf_granikv.pools import Prefix
from hf_granikv.worth import Worth

logger = logging.getLogger(__name__)


class Batch:
    """Runs turns over rows, one step at a time.

    ```
    step   compare      what turns and idle agents have in common is held once from now on
           next_moves   evict what is idle, preempt the youngest, admit those that wait
           step_feeds   one token for each running answer, chunks for prompts
           forward      all of it at once; who breaks it is found, fails, and the others go on
           choose       a token for each row whose ids are all computed
    ```

    Args:
        rows: Holds and computes the rows.
        limits: What they may take.
        memories: What idle agents keep.
        cost: Of the ways to preempt.
        worth: Says which common tokens are worth to be held once; None holds none.
    """

    def __init__(
        self,
        rows: LiveRows,
        limits: Limits,
        memories: Memories,
        cost: PreemptionCost | None = None,
        worth: Worth | None = None,
    ) -> None:
        self.figures = EngineFigures()
        self.limits = limits
        self._rows = rows
        self._memories = memories
        self._cost = cost or PreemptionCost()
        # what has been found to fit, where that is less than what was allowed
        self._learned = limits
        self._orders = itertools.count()
        self._waiting: dict[int, Job] = {}
        self._running: dict[int, Job] = {}
        self._sharing = Sharing(rows, memories, self._waiting, self._running, worth)

    @property
    def is_empty(self) -> bool:
        """Whether no turn waits or runs."""
        return not self._waiting and not self._running

    def add(self, job: Job) -> None:
        """Lets a turn wait, behind all others."""
        job.order = next(self._orders)
        job.prefix = job.leaf = self._sharing.in_force(job.prefix)
        self._waiting[job.order] = job

    def cancel(self, job: Job) -> None:
        """Ends a turn that waits or runs; its agent keeps what it has."""
        if self._waiting.get(job.order) is job or self._running.get(job.order) is job:
            self._leave(job, lambda: job.turn.end("cancelled"))

    def cancel_all(self) -> None:
        """Ends all turns."""
        for job in [*self._waiting.values(), *self._running.values()]:
            self.cancel(job)

    def fail_all(self, error: BaseException) -> None:
        """Ends all turns with an error, and drops their rows."""
        for job in [*self._waiting.values(), *self._running.values()]:
            self._fail(job, error)

    def step(self) -> None:
        """Runs one forward pass, with what has to be moved before and chosen after it."""
        self._sharing.compare(self._learned.max_rows)
        is_limited = self._learned.max_tokens is not None
        idle = self._memories.idle(self._waiting.values()) if is_limited else []
        waiting = [job.seat for job in self._waiting.values() if not self._sharing.delays(job)]
        self._move(next_moves(self._sharing.within(self._learned), self._seats(), waiting, idle))
        self._sharing.make_room(self._learned)
        feeds = step_feeds(self._learned, self._seats())
        began_s = time.perf_counter()
        logits = self._computed({self._running[order]: n for order, n in feeds.items()})
        self.figures.num_steps += bool(logits)
        ready = {job: row for job, row in logits.items() if job.num_held == len(job.token_ids)}
        # what others wait for is shared before a turn that has computed it leaves
        self._sharing.compare(self._learned.max_rows)
        for job, token_id in chosen(ready, self._fail):
            self._take(job, token_id)
        if (num_fed := sum(feeds.values())) >= 4 * len(feeds) > 0:
            speed = num_fed / (time.perf_counter() - began_s)
            self._cost = replace(self._cost, tokens_per_s=speed)
        if self.is_empty:
            self._learned = self.limits
        self._sharing.tidy()
        self._note_held()

    def exchange(self, replaced: dict[Prefix, Prefix]) -> None:
        """Lets all who read some prefixes read others with the same ids."""
        self._sharing.exchange(replaced)

    def tidy(self) -> None:
        """Gives back what agents shared that have been closed since."""
        self._sharing.tidy()

    def check_integrity(self) -> None:
        """Checks the pools, and that they hold what the turns think.

        Raises:
            IntegrityError: With the broken equation in numbers.
        """
        self._rows.check_integrity()
        for job in self._running.values():
            held = self._rows.lend(job.row)
            assert (held.prefix, held.num_tokens) == (job.leaf, job.num_private)
        assert self._rows.num_slots_used >= sum(job.num_private for job in self._running.values())

    def _seats(self) -> list[Seat]:
        return [job.seat for job in self._running.values()]

    def _move(self, moves: Moves) -> None:
        self.figures.num_evictions += self._memories.forget(moves.evicted)  # type: ignore[arg-type]
        for order in moves.preempted:
            self._preempt(self._running[order])
        for order in moves.admitted:
            job = self._waiting[order]
            try:
                self._start(job)
            except ColdPoolFullError as error:
                self._give_way(job, 1, error)
                return
            except Exception as error:
                self._fail(job, error)

    def _start(self, job: Job) -> None:
        if job.offloaded is not None:
            parked = job.offloaded.restored()
            row, num_held = self._rows.start(job.leaf, parked), job.num_shared + parked.num_tokens
        else:
            row, num_kept = self._resumed(job)
            num_held = job.num_shared + self._rows.num_tokens(row)
            if not job.num_seen:
                job.turn.kept_tokens, job.turn.shared_tokens = num_kept, num_held - num_kept
                self.figures.kept_tokens += num_kept
                self.figures.shared_tokens += num_held - num_kept
        if job.memory is not None:
            job.memory.kept = NOTHING
        job.row, job.num_held, job.offloaded = row, num_held, None
        self._running[job.order] = self._waiting.pop(job.order)

    def _resumed(self, job: Job) -> tuple[Row, int]:
        """Gives a row with what is held of the ids of a job, and how many its memory had."""
        kept = NOTHING if job.memory is None else job.memory.kept
        num_kept, parked, num_copied = num_common(kept.token_ids, job.token_ids), kept.parked, 0
        if parked is not None and num_kept > job.num_shared and job.goes_on_from(parked):
            if job.leaf is not parked.prefix and job.leaf is not None:
                parked = parked.after(job.leaf)
                num_copied = parked.num_tokens
            try:
                row = self._rows.start(parked.prefix, parked, num_copied=num_copied)
            except ColdPoolFullError:
                # it cannot be there twice
                return self._rows.start(job.leaf), min(num_kept, job.num_shared)
            try:
                self._rows.crop(row, parked.num_tokens - num_kept + job.num_shared)
                return row, num_kept
            except ValueError:
                # states that have read further cannot be taken back
                self._rows.drop(row)
                num_kept = 0
        return self._rows.start(job.leaf), min(num_kept, job.num_shared)

    def _preempt(self, job: Job, *, may_keep: bool = True) -> None:
        may_keep = may_keep and self._cost.frees_budget
        num_tokens = job.num_private
        if may_keep and self._cost.keeps(num_tokens, num_tokens * self._rows.bytes_per_token):
            parked = self._parked(job.row)
            job.offloaded = None if parked is None else OffloadedRow.of(parked)
        else:
            self._rows.drop(job.row)
        job.row, job.num_held = None, 0
        self._waiting[job.order] = self._running.pop(job.order)
        self.figures.num_preemptions += 1

    def _computed(self, feeds: Mapping[Job, int]) -> dict[Job, Tensor]:
        """Computes the next ids of some turns; those that cannot be are dealt with and left out."""
        logits: dict[Job, Tensor] = {}
        together = {job: count for job, count in feeds.items() if not job.is_suspect}
        apart = [{job: count} for job, count in feeds.items() if job.is_suspect]
        for group in (together, *apart):
            # an earlier group may have sent it away
            if group and all(job.row is not None for job in group):
                logits |= self._computed_at_once(group)
        return logits

    def _computed_at_once(self, feeds: Mapping[Job, int]) -> dict[Job, Tensor]:
        try:
            found = self._rows.forward({job.row: job.next_ids(n) for job, n in feeds.items()})
        except Exception as error:
            is_for_each = self._broken_off(feeds, error)
        else:
            for job, count in feeds.items():
                job.is_suspect = False
                num_again = job.holds_more(count)
                job.turn.computed_tokens += num_again
                self.figures.computed_tokens += count
                self.figures.prompt_tokens += num_again
            return {job: found[job.row] for job in feeds}
        # not before the error is gone, whose frames hold tensors
        return self._computed(feeds) if is_for_each else {}

    def _broken_off(self, feeds: Mapping[Job, int], error: Exception) -> bool:
        """Deals with a forward that failed; says whether each turn is to try alone."""
        youngest, count = max(feeds.items(), key=lambda item: item[0].order)
        if is_out_of_memory(error):
            self._give_way(youngest, count, error)
        elif len(feeds) > 1:
            self.figures.note_repeated(len(feeds), error)
            for job in feeds:
                job.is_suspect = True
            return True
        elif isinstance(error, TornStateError):
            # another row's failure has cost it the states it had
            self._preempt(youngest, may_keep=False)
        else:
            self._fail(youngest, error)
        return False

    def _give_way(self, job: Job, count: int, error: Exception) -> None:
        """Makes room that the budget said was there: of idle agents, of younger turns, of chunks."""
        if idle := self._memories.idle():
            self.figures.num_evictions += self._memories.forget(each.key for each in idle)  # type: ignore[misc]
        elif {job.order} != self._running.keys() and self._running:
            together = {job, *self._running.values()}
            num_tokens = sum(each.seat.num_ids for each in together) + self._sharing.num_tokens
            num_tokens += len(together) * self.limits.tokens_per_row
            self._learned = replace(self._learned, max_tokens=num_tokens - 1)
            if job.row is not None:
                self._preempt(self._running[max(self._running)], may_keep=False)
        elif count > 1:
            self._learned = replace(self._learned, max_step_tokens=count // 2)
        else:
            self._fail(job, error)
            return
        logger.info("a step did not fit and is tried again with less: %s", error)

    def _take(self, job: Job, token_id: int) -> None:
        try:
            reason = job.sampler.take(token_id)
        except Exception as error:
            self._fail(job, error)
            return
        job.token_ids.append(token_id)
        self.figures.generated_tokens += 1
        job.turn.put(token_id, self.figures.num_steps)
        if reason is not None:
            self._leave(job, lambda: job.turn.end(reason))

    def _fail(self, job: Job, error: BaseException) -> None:
        # a row that something has gone wrong with is not kept
        row, job.row = job.row, None
        if row is not None:
            try:
                self._rows.drop(row)
            except Exception:
                logger.exception("the row of a turn that failed could not be dropped")
        self._leave(job, lambda: job.turn.fail(error))

    def _leave(self, job: Job, tell: Callable[[], None]) -> None:
        self._waiting.pop(job.order, None)
        self._running.pop(job.order, None)
        row, job.row, job.offloaded = job.row, None, None
        memory = job.memory
        if row is not None and job.num_held and memory is not None and not memory.is_closed:
            if (parked := self._parked(row)) is not None:
                self._memories.keep(memory, tuple(job.token_ids[: job.num_held]), parked)
        elif row is not None:
            self._rows.drop(row)
        self.figures.num_turns += 1
        tell()

    def _parked(self, row: Row) -> ParkedRow | None:
        """Takes a row out with what it holds; idle agents make room for the copy. None if they cannot."""
        while True:
            try:
                return self._rows.park(row)
            except Exception as error:
                longest_idle = [each.key for each in self._memories.idle()[:1]]
                if not longest_idle or not isinstance(error, ColdPoolFullError):
                    logger.info("the tokens of a turn could not be kept", exc_info=True)
                    self._rows.drop(row)
                    return None
                self.figures.num_evictions += self._memories.forget(longest_idle)  # type: ignore[arg-type]

    def _note_held(self) -> None:
        held = sum(job.num_private for job in self._running.values()) + self._sharing.num_tokens
        held += sum(tokens.num_tokens for tokens in self._memories.idle())
        self.figures.held_tokens = held
        self.figures.peak_tokens = max(self.figures.peak_tokens, held)
