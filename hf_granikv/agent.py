"""Who reads a shared text, and what it answered."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hf_granikv.prompts import Message

if TYPE_CHECKING:
    from hf_granikv.pools import Prefix


@dataclass(frozen=True, slots=True)
class Reply:
    """What one agent answered in one turn.

    Attributes:
        name: The agent's name.
        text: The answer without special tokens.
        token_ids: The generated ids, the end token included where there is one.
        prompt_tokens: Tokens of the agent's prompt, the prefix included.
        finish_reason: `"stop"` where the answer ended by itself or by a stopping criterion,
            `"length"` where it was cut.
    """

    name: str
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: str


@dataclass(eq=False, slots=True)
class Agent:
    """One reader of a prefix; made by `MultiAgentRunner.agent`.

    Attributes:
        name: Its name, unique in its runner.
        prefix: The stored prefix that it reads.
        instructions: What stands before its first message, if anything.
        history: The user and assistant messages of its earlier turns.
    """

    name: str
    prefix: "Prefix"
    instructions: str | None = None
    history: list[Message] = field(default_factory=list)

    def conversation(self, message: str) -> list[Message]:
        """Gives everything that follows the shared text when `message` is asked now."""
        opening = [user_message(self.instructions)] if self.instructions else []
        return [*opening, *self.history, user_message(message)]


# keys of a mapping are invariant to a type checker, so each kind of key is named
Messages = Mapping[Agent | str, str] | Mapping[str, str] | Mapping[Agent, str]


def user_message(content: str) -> Message:
    """Gives a chat message of the user."""
    return {"role": "user", "content": content}
