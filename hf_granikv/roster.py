"""The agents of a runner, by name."""

import threading

from hf_granikv.agent import Agent


class Roster:
    """Who is there, who is free, who leaves.

    Args:
        lock: Held while names change.

    Attributes:
        all: The agents by name.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self.all: dict[str, Agent] = {}
        self._lock = lock

    def check_is_new(self, name: str) -> None:
        """Checks that nobody has a name.

        Raises:
            ValueError: Somebody has.
        """
        if name in self.all:
            raise ValueError(f"an agent named {name!r} is there already; choose another name.")

    def add(self, agent: Agent) -> Agent:
        """Takes an agent in.

        Raises:
            ValueError: Its name is taken.
        """
        with self._lock:
            self.check_is_new(agent.name)
            agent._home = self
            self.all[agent.name] = agent
        return agent

    def check_is_free(self, agent: Agent) -> None:
        """Waits for a turn that was cancelled, and checks that none goes on.

        Raises:
            ValueError: One does.
        """
        turn = agent._turn
        if turn is not None and turn.is_cancelling:
            turn.wait()
        if agent._is_asked or (turn is not None and not turn.done()):
            raise ValueError(
                f"agent {agent.name!r} is answering; wait for its turn, cancel it, or ask a fork of it."
            )
        agent._turn = None

    def fork_agent(self, agent: Agent, name: str) -> Agent:
        """See `Agent.fork`."""
        with self._lock:
            self.check_is_free(agent)
            self.check_is_new(name)
            twin = Agent(name, agent.share, agent.instructions, list(agent.history))
            twin.generation.update(agent.generation)
            if agent._memory is not None:
                twin._memory = agent._memory.fork()
            return self.add(twin)

    def reset_agent(self, agent: Agent) -> None:
        """See `Agent.reset`."""
        with self._lock:
            self.check_is_free(agent)
            agent.history.clear()
            self.forget(agent)

    def close_agent(self, agent: Agent) -> None:
        """See `Agent.close`."""
        with self._lock:
            if agent._turn is not None:
                agent._turn.cancel()
            self.forget(agent)
            del self.all[agent.name]
            agent._home = None

    def forget(self, agent: Agent) -> None:
        """Gives back what an agent holds in the pools; its history stays."""
        if agent._memory is not None:
            agent._memory.close()
        agent._memory = None

    def forget_all(self) -> None:
        """Gives back what all agents hold in the pools."""
        for agent in self.all.values():
            self.forget(agent)
