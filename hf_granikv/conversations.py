"""Conversations that callers keep themselves, and send as a whole each time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hf_granikv.engine.memory import Memory, num_common
from hf_granikv.engine.turn import Turn
from hf_granikv.pools import Prefix

# what is held is copied to go on from it, all of it: so much of it has to be of use
MIN_COMMON_RATIO = 1 / 16


@dataclass(eq=False, slots=True)
class Conversation:
    """What is held of one conversation.

    Attributes:
        memory: Holds its private tokens.
        num_prompt: How many of these were its latest prompt.
        turn: Its latest turn.
    """

    memory: Memory
    num_prompt: int
    turn: Turn

    @property
    def is_idle(self) -> bool:
        """Whether no turn of it goes on."""
        return self.turn.done()


class Conversations:
    """Finds what is held of a conversation by the ids that it starts with.

    Args:
        limit: The most conversations that are held; those asked longest ago are forgotten first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # the one asked longest ago first
        self._all: list[Conversation] = []

    def __len__(self) -> int:
        return len(self._all)

    def ask(
        self,
        prefix: Prefix | None,
        token_ids: Sequence[int],
        new_memory: Callable[[Prefix | None], Memory],
        submit: Callable[[Memory], Turn],
    ) -> Turn:
        """Lets a prompt be answered that goes on from what is held of its conversation.

        A prompt that contains the latest prompt of a conversation continues that one. One that has
        less in common with it, or comes while that one is answered, starts from a copy.

        Args:
            prefix: The end of the chain of prefixes that it reads.
            token_ids: Its ids after those.
            new_memory: Makes an empty memory for readers of a prefix.
            submit: Submits the prompt with a memory.
        """
        found, num_held = self._closest(prefix, token_ids)
        if found is None:
            memory = new_memory(prefix)
        elif found.is_idle and num_held >= found.num_prompt:
            memory = found.memory
        else:
            memory = found.memory.fork()
        turn = submit(memory)
        self._all = [each for each in self._all if each.memory is not memory]
        self._all.append(Conversation(memory, len(token_ids), turn))
        self._forget_oldest()
        return turn

    def forget(self) -> None:
        """Gives back what is held of all of them."""
        for each in self._all:
            each.memory.close()
        self._all = []

    def _closest(
        self, prefix: Prefix | None, token_ids: Sequence[int]
    ) -> tuple[Conversation | None, int]:
        """The conversation of which most can be kept, and how much; none if it is not worth it."""
        closest, most = None, 0
        for each in self._all:
            kept = each.memory.kept
            if each.memory.prefix is prefix:
                num_held = num_common(kept.token_ids, token_ids)
                if num_held > most and num_held >= MIN_COMMON_RATIO * len(kept.token_ids):
                    closest, most = each, num_held
        return closest, most

    def _forget_oldest(self) -> None:
        for each in [each for each in self._all if each.is_idle]:
            if len(self._all) <= self._limit:
                return
            each.memory.close()
            self._all.remove(each)
