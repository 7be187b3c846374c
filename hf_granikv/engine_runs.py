"""Answers of agents that the engine gives: waiting for them, and what they cost."""

import time
from collections import Counter
from collections.abc import Sequence

from tqdm.auto import tqdm

from hf_granikv.accounting import dense_row_bytes
from hf_granikv.agent import Agent, Reply
from hf_granikv.engine.engine import Engine
from hf_granikv.engine.turn import Turn
from hf_granikv.report import RunReport


def replies_of(turns: Sequence[Turn]) -> list[Reply]:
    """Waits for turns, and shows that they go on; if one fails or the caller is interrupted, all end.

    Raises:
        Exception: What the first of them that failed did so with.
    """
    try:
        # a caller sees nothing of a short run
        with tqdm(desc="granikv", unit="token", delay=1, leave=False, disable=None) as bar:
            for turn in turns:
                turn.listen(bar.update)
            return [turn.result() for turn in turns]
    except BaseException as error:
        for turn in turns:
            turn.cancel()
        if isinstance(error, Exception):
            # so that its agents can be asked again
            for turn in turns:
                turn.wait()
        raise


class EngineRun:
    """Takes the figures of a run.

    Args:
        engine: What runs it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._steps_before = Counter(engine.backend_steps)
        journal = engine.journal
        self._shared_before = journal.promoted_tokens, journal.once_tokens
        self._start_s = time.perf_counter()

    def report(self, turns: Sequence[Turn], agents: Sequence[Agent]) -> RunReport:
        """Gives the figures of its turns, which are done.

        Args:
            turns: The turns.
            agents: Who was asked in each.
        """
        shares = [agent.share for agent in agents]
        # what a turn leaves is noted within its last step
        with self._engine.paused():
            kept = [agent._memory.kept.parked for agent in agents]
        parked = {id(row): row for row in kept if row is not None}
        first_s = max(turn.first_token_s or self._start_s for turn in turns)
        last_s = max(turn.last_token_s or self._start_s for turn in turns)
        num_generated = sum(len(turn.token_ids) for turn in turns)
        read = {share.prefix: share for share in shares}
        levels = {level for prefix in read for level in prefix.chain}
        journal, (promoted, once) = self._engine.journal, self._shared_before
        suffixes = [
            turn.prompt_tokens - share.prefix.stop
            for turn, share in zip(turns, shares, strict=True)
        ]
        steps = Counter(self._engine.backend_steps) - self._steps_before
        return RunReport(
            num_agents=len(turns),
            prefix_tokens=sum(level.num_tokens for level in levels),
            suffix_tokens=sum(suffixes),
            kept_tokens=sum(turn.kept_tokens for turn in turns),
            shared_tokens=sum(turn.shared_tokens for turn in turns),
            promoted_tokens=journal.promoted_tokens - promoted,
            once_tokens=journal.once_tokens - once,
            generated_tokens=num_generated,
            decode_steps=max(t.last_step for t in turns) - max(t.first_step for t in turns),
            decoded_tokens=sum(max(0, len(turn.token_ids) - 1) for turn in turns),
            prefix_prefill_s=sum(share.prefill_s for share in read.values()),
            suffix_prefill_s=first_s - self._start_s,
            decode_s=last_s - first_s,
            generate_s=last_s - self._start_s,
            hot_bytes=sum(level.num_bytes for level in levels) + self._engine.level_bytes,
            cold_bytes=sum(row.num_bytes for row in parked.values()),
            dense_equivalent_bytes=sum(
                dense_row_bytes(
                    share.cache.rows.layers,
                    share.prefix,
                    turn.prompt_tokens + len(turn.token_ids) - 1,
                )
                for turn, share in zip(turns, shares, strict=True)
            ),
            backend_steps=dict(steps),
        )
