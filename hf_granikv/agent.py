"""Who reads a shared text, and what it answered."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

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
            `"length"` where it was cut, `"cancelled"` where somebody ended it.
    """

    name: str
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: str


class AgentHome(Protocol):
    """The runner of an agent, as far as the agent calls it."""

    def fork_agent(self, agent: "Agent", name: str) -> "Agent":
        """See `Agent.fork`."""

    def reset_agent(self, agent: "Agent") -> None:
        """See `Agent.reset`."""

    def close_agent(self, agent: "Agent") -> None:
        """See `Agent.close`."""


@dataclass(eq=False, slots=True)
class Agent:
    """One reader of a prefix; made by `MultiAgentRunner.agent`.

    Attributes:
        name: Its name, unique in its runner.
        share: The text that it reads, as its runner has stored it.
        instructions: What stands before its first message, if anything.
        history: The user and assistant messages of its earlier turns. May be changed between turns:
            of the next prompt, what differs from what is held is computed.
        generation: Arguments of `generate` for its turns, and `seed`; those of a call come first.
    """

    name: str
    share: Any = field(repr=False)
    instructions: str | None = None
    history: list[Message] = field(default_factory=list)
    generation: dict[str, Any] = field(default_factory=dict)
    # what the runner keeps with it: its tokens in the pools, and the turn under way
    _memory: Any = field(default=None, repr=False)
    _turn: Any = field(default=None, repr=False)
    _is_asked: bool = field(default=False, repr=False)
    _home: AgentHome | None = field(default=None, repr=False)

    @property
    def prefix(self) -> "Prefix":
        """The stored prefix that it reads; another one when the model has changed since."""
        prefix: Prefix = self.share.prefix
        return prefix

    def conversation(self, message: str) -> list[Message]:
        """Gives everything that follows the shared text when `message` is asked now."""
        opening = [user_message(self.instructions)] if self.instructions else []
        return [*opening, *self.history, user_message(message)]

    def heard(self, message: str, answer: str) -> None:
        """Adds a turn to the history."""
        self.history += [user_message(message), {"role": "assistant", "content": answer}]

    def fork(self, name: str) -> "Agent":
        """Gives another agent with the same history, which shares what this one holds, copy-on-write.

        Raises:
            ValueError: The name is taken, or this agent is answering.
        """
        return self._its_home.fork_agent(self, name)

    def reset(self) -> None:
        """Forgets the history, and gives back what is held of it.

        Raises:
            ValueError: The agent is answering.
        """
        self._its_home.reset_agent(self)

    def close(self) -> None:
        """Leaves the runner, and gives back what it holds; a turn under way is cancelled."""
        self._its_home.close_agent(self)

    @property
    def _its_home(self) -> AgentHome:
        if self._home is None:
            raise ValueError(f"agent {self.name!r} has no runner; it was closed, or made by hand.")
        return self._home


# keys of a mapping are invariant to a type checker, so each kind of key is named
Messages = Mapping[Agent | str, str] | Mapping[str, str] | Mapping[Agent, str]


def user_message(content: str) -> Message:
    """Gives a chat message of the user."""
    return {"role": "user", "content": content}
