"""How a runner has questions answered: by its engine, or by `generate` in batches."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from hf_granikv.agent import Agent, Reply
from hf_granikv.config import CacheOptions
from hf_granikv.conversations import Conversations
from hf_granikv.engine.engine import Engine
from hf_granikv.engine.memory import Memory
from hf_granikv.engine.options import EngineOptions
from hf_granikv.engine.turn import Turn
from hf_granikv.engine_runs import EngineRun
from hf_granikv.errors import ColdPoolFullError
from hf_granikv.generate_runs import generated
from hf_granikv.pools import Prefix
from hf_granikv.prompts import (
    Message,
    SharedText,
    Tool,
    check_message,
    render,
    render_whole,
    shared_ids,
    suffix_ids,
)
from hf_granikv.questions import Question
from hf_granikv.report import RunReport
from hf_granikv.settings import GenerationSettings
from hf_granikv.shares import Share, Shares
from hf_granikv.worth import Worth


@dataclass(frozen=True, slots=True)
class Started:
    """Turns on their way, and what they were asked.

    Attributes:
        questions: One for each turn.
        turns: The turns.
        run: Takes their figures; None if there are none.
    """

    questions: list[Question]
    turns: list[Turn]
    run: EngineRun | None

    @property
    def is_cancelled(self) -> bool:
        """Whether all turns were, as by a runner that is closed."""
        return all(turn.finish_reason == "cancelled" for turn in self.turns)

    def cancel(self) -> None:
        """Cancels all turns."""
        for turn in self.turns:
            turn.cancel()

    def reports(self) -> list[RunReport]:
        """Gives the figures, when all turns are done."""
        agents = [each.agent for each in self.questions]
        return [] if self.run is None else [self.run.report(self.turns, agents)]


class Answering:
    """The model of a runner, with what is stored for it and who runs it.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        cache_options: Of the cache.
        engine_options: Of the engine.
        forgets: Called when the model has changed, so that everything computed is void.

    Attributes:
        shares: The texts that agents read.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        cache_options: CacheOptions,
        engine_options: EngineOptions,
        forgets: Callable[[], None],
    ) -> None:
        at_least = Worth(model, engine_options.min_shared_tokens).at_least
        self.shares = Shares(model, cache_options, self._start_over, self._exchange, at_least)
        self._model = model
        self._tokenizer = tokenizer
        self._options = engine_options
        self._forgets = forgets
        self._conversations = Conversations(engine_options.max_rows)
        self._engine: Engine | None = None
        self._is_closed = False

    def alone(self) -> AbstractContextManager[object]:
        """Entered by whoever uses the model outside of the engine."""
        return nullcontext() if self._engine is None else self._engine.paused()

    def prompt_ids(self, agent: Agent, message: str) -> list[int]:
        """Gives the whole prompt of an agent that is asked `message`.

        Raises:
            ValueError: Nothing follows the shared text.
        """
        check_message(agent.name, message)
        share: Share = agent.share
        text = render(self._tokenizer, share.shared, agent.conversation(message))
        suffix = suffix_ids(self._tokenizer, share.shared, text)
        if not suffix:
            raise ValueError(
                f"agent {agent.name!r} has no token after the shared text; give it a message."
            )
        return share.ids + suffix

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        name: str,
        seed: int | None,
        kwargs: dict[str, Any],
    ) -> Turn:
        """Lets a whole conversation be answered; see `MultiAgentRunner.chat`."""
        settings = GenerationSettings.checked(
            kwargs, self._model.generation_config, self._tokenizer
        )
        text = render_whole(self._tokenizer, messages, tools)
        share = self.shares.read_by(text)
        if share is None:
            prefix, head = None, []
            ids = shared_ids(self._tokenizer, SharedText(text, tuple(messages)))
        else:
            prefix, head = self.shares.current(share, self.alone()).prefix, share.ids
            ids = suffix_ids(self._tokenizer, share.shared, text)
        engine = self._running_engine()

        def submit(memory: Memory) -> Turn:
            return engine.submit(
                [*head, *ids], memory=memory, name=name, seed=seed, **settings.kwargs
            )

        return self._conversations.ask(prefix, ids, engine.memory, submit)

    def start(self, questions: list[Question], *, keeps_history: bool = False) -> Started:
        """Hands questions to the engine; if one of them cannot be, the others are cancelled.

        Args:
            questions: What it can answer.
            keeps_history: Whether each agent's history grows with its answer.
        """
        if not questions:
            return Started([], [], None)
        engine = self._running_engine()
        started = Started(questions, [], EngineRun(engine))
        try:
            with engine.gathering():
                for question in questions:
                    started.turns.append(self._submitted(engine, question, keeps_history))
        except BaseException:
            started.cancel()
            raise
        return started

    def generate(self, questions: list[Question]) -> tuple[dict[str, Reply], list[RunReport]]:
        """Answers questions with `generate`, one batch for each text and each set of arguments."""
        batches: dict[tuple[int, int], list[Question]] = {}
        for each in questions:
            batches.setdefault((id(each.agent.share), id(each.settings)), []).append(each)
        replies: dict[str, Reply] = {}
        reports: list[RunReport] = []
        for batch in batches.values():
            prompts = {each.agent.name: self.prompt_ids(each.agent, each.message) for each in batch}
            share, settings = batch[0].agent.share, batch[0].settings
            with self.alone():
                found, report = generated(self._model, self._tokenizer, share, prompts, settings)
            replies.update(found)
            reports.append(report)
        return replies, reports

    def explain(self) -> str:
        """See `MultiAgentRunner.explain`."""
        head, *lines = self.shares.cache.explain().splitlines()
        said = [head, *(f"generate: {line}" for line in lines)]
        if self._engine is not None:
            said += [f"engine: {line}" for line in self._engine.journal.lines()]
        return "\n".join(said)

    def close(self) -> None:
        """Ends the engine."""
        self._is_closed = True
        self._conversations.forget()
        if self._engine is not None:
            self._engine.close()

    def _submitted(self, engine: Engine, question: Question, keeps_history: bool) -> Turn:
        agent = question.agent
        if agent._memory is None:
            agent._memory = engine.memory(agent.prefix)
        agent._turn = engine.submit(
            self.prompt_ids(agent, question.message),
            memory=agent._memory,
            name=agent.name,
            seed=question.seed,
            on_end=question.heard if keeps_history else None,
            **question.settings.kwargs,
        )
        turn: Turn = agent._turn
        return turn

    def _running_engine(self) -> Engine:
        if self._is_closed:
            raise RuntimeError("the runner is closed; make another one.")
        if self._engine is None:
            self._engine = Engine(self._model, self.shares.cache, self._tokenizer, self._options)
        return self._engine

    def _exchange(self, replaced: dict[Prefix, Prefix]) -> None:
        if self._engine is not None:
            self._engine.exchange(replaced)

    def _start_over(self, error: Exception) -> None:
        self._forgets()
        self._conversations.forget()
        if self._engine is not None:
            self._engine.close(error)
            self._engine = None


@contextmanager
def runners_words() -> Iterator[None]:
    """Names the limit as a runner does."""
    try:
        yield
    except ColdPoolFullError as error:
        raise ColdPoolFullError(renamed(str(error))) from error


def renamed(text: str) -> str:
    """Gives a text about `cold_slots` with the name that a runner has for them."""
    return text.replace("cold_slots", "max_cold_slots").replace("max_max_", "max_")
