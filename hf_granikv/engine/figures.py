"""What an engine has done since it was made."""

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineFigures:
    """Counts of an engine; they only grow, but for what is held now.

    Attributes:
        num_steps: Forward passes.
        num_turns: Turns that ended, in whatever way.
        computed_tokens: Tokens computed: of prompts, of answers, and again after a preemption.
        prompt_tokens: Those of prompts among them, and those computed again.
        kept_tokens: Prompt tokens that needed no computation, since the agent held them.
        shared_tokens: Prompt tokens that needed none, since others held or computed them.
        generated_tokens: Tokens of answers.
        num_preemptions: How often a running turn had to wait again.
        num_repeated: Forward passes of several rows that failed, and were repeated row by row.
        num_evictions: How often an idle agent's tokens were dropped.
        held_tokens: Tokens after the prefixes held now: private ones, those of idle agents included,
            and what agents share of them, once.
        peak_tokens: The most that were held at the end of a step.
    """

    num_steps: int = 0
    num_turns: int = 0
    computed_tokens: int = 0
    prompt_tokens: int = 0
    kept_tokens: int = 0
    shared_tokens: int = 0
    generated_tokens: int = 0
    num_preemptions: int = 0
    num_repeated: int = 0
    num_evictions: int = 0
    held_tokens: int = 0
    peak_tokens: int = 0

    def note_repeated(self, num_rows: int, error: Exception) -> None:
        """Counts a forward pass that failed and is repeated row by row; warns of the first one."""
        if not self.num_repeated:
            logger.warning(
                "a forward of %d rows failed and is repeated row by row; later ones are counted",
                num_rows,
                exc_info=error,
            )
        self.num_repeated += 1
