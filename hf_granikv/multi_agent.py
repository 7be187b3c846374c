"""Many agents over one shared text: stored once, answered in one batch that they join and leave."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_granikv.agent import Agent, Messages, Reply
from hf_granikv.answering import Answering, Started, renamed, runners_words
from hf_granikv.config import CacheOptions
from hf_granikv.engine.options import EngineOptions
from hf_granikv.engine.streams import Merged, MergedAsync, named, named_async
from hf_granikv.engine.turn import Turn
from hf_granikv.engine_runs import replies_of
from hf_granikv.in_process import OneOfAKind
from hf_granikv.pools import Prefix
from hf_granikv.prompts import Message, Tool, shared_ids, shared_text
from hf_granikv.questions import Question, check_tokenizer, known_agent, note_asked, questions_of
from hf_granikv.report import RunReport
from hf_granikv.roster import Roster


class MultiAgentRunner(OneOfAKind):
    """Asks many agents at once, with the text that they share stored and computed once.

    A prompt's ids are always `tok(shared text) + tok(rest of the rendered text,
    add_special_tokens=False)`. Where a tokenizer would merge across that seam (a shared text that ends
    in a space, say) they differ from the ids of the whole text tokenized at once.

    Agents are answered by one engine, on a thread of its own: they join and leave its batch at any
    token, and keep what was computed of their conversations. Any thread may call, and any event loop.

    What conversations over one text have in common from their first token on is held once: of forks
    what they held before, and a message to agents with the same history is computed by one of them.
    The same words after another history are other tokens, and never shared.

    Args:
        model: A causal language model. Loaded with `attn_implementation="granikv"` it reads the shared
            part once per step; with another one the answers are the same, without the speed.
        tokenizer: The model's tokenizer. Its chat template is used where it has one.
        dispatch: How each step chooses its backend, see `AsymmetricPagedCache`.
        max_cold_slots: Limit of tokens held of all conversations together; None grows as needed.
        max_bytes: Limit of their bytes, likewise; texts of `share` are held beside it.
        max_rows: The most agents that are answered at a time; more wait.
        max_step_tokens: The most tokens of a forward pass: how long a prompt keeps others waiting.
        min_shared_tokens: Hold every run of at least this many common tokens once; None: where the
            cost model predicts a gain, past 128 tokens.

    Raises:
        ValueError: The tokenizer knows more tokens than the model embeds, or an option means nothing.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        dispatch: str = "auto",
        max_cold_slots: int | None = None,
        max_bytes: int | None = None,
        max_rows: int = 64,
        max_step_tokens: int = 256,
        min_shared_tokens: int | None = None,
    ) -> None:
        check_tokenizer(model, tokenizer)
        self.model: Any = model
        self.tokenizer = tokenizer
        # of the agents and the tokenizer; the engine has its own
        self._lock = threading.RLock()
        self._roster = Roster(self._lock)
        self.agents = self._roster.all
        try:
            cache_options = CacheOptions(dispatch, max_cold_slots)
        except ValueError as error:
            raise ValueError(renamed(str(error))) from None
        engine_options = EngineOptions(max_bytes, max_rows, max_step_tokens, min_shared_tokens)
        self._answering = Answering(
            model, tokenizer, cache_options, engine_options, self._roster.forget_all
        )
        self._shares = self._answering.shares
        self._report = RunReport()

    def __enter__(self) -> "MultiAgentRunner":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def share(
        self, content: str | Sequence[Message], *, tools: Sequence[Tool] | None = None
    ) -> Prefix:
        """Computes and stores what many agents will read.

        Of a text that begins as an earlier one does, only the rest is. Where they part in the middle,
        past `min_shared_tokens`, the earlier one is stored in two parts from then on, over the same
        memory, and what was returned for it goes on to stand for it; but not with local layers, which
        have forgotten the middle, nor where layers keep states: there both are stored whole.

        Args:
            content: Chat messages, or a text: the system message where the chat template takes one,
                or else the head of the first user message.
            tools: JSON schemas of what its readers can call, for the chat template.

        Raises:
            ValueError: There is nothing to share, it is no text and no list of messages, or the chat
                template cannot put it first.
        """
        with self._lock:
            shared = shared_text(self.tokenizer, content, tools)
            ids = shared_ids(self.tokenizer, shared)
            return self._shares.add(shared, ids, self._answering.alone()).prefix

    def agent(
        self,
        name: str,
        prefix: Prefix,
        instructions: str | None = None,
        **generation_kwargs: Any,
    ) -> Agent:
        """Adds an agent that reads `prefix`.

        Args:
            name: Its name.
            prefix: What `share` has given.
            instructions: What stands before its first message.
            generation_kwargs: Arguments of `generate` for its turns, and `seed`; those of a call come
                first.

        Raises:
            ValueError: The name is taken, or another runner stored the prefix.
        """
        with self._lock:
            self._roster.check_is_new(name)
            share = self._shares.of(prefix)
            if share is None:
                raise ValueError(
                    f"agent {name!r} was given a prefix that this runner does not hold (it holds "
                    f"{len(self._shares)}); pass what this runner's share returned, or where the "
                    "model has changed since, the prefix of one of its agents."
                )
            agent = Agent(name, share, instructions, generation=generation_kwargs)
            return self._roster.add(agent)

    def prompt_ids(self, agent: Agent | str, message: str) -> list[int]:
        """Gives the whole prompt that `run` would send now; a ValueError if it could not."""
        with self._lock:
            return self._answering.prompt_ids(known_agent(self.agents, agent), message)

    def run(
        self, messages: Messages, *, seed: int | None = None, **generation_kwargs: Any
    ) -> dict[str, Reply]:
        """Asks every given agent its message and waits for all replies.

        Greedy decoding and sampling run in the engine, each agent as it would alone. Beams and other
        modes that need several rows, and objects of the caller's own that look at all of them, run in
        `model.generate`, in one batch per prefix; models that would read pads as tokens (hybrids) get
        one per length of the prompts. Histories grow only when all have succeeded. A prefix whose model
        has changed since is computed anew first; its agents then have another `prefix`.

        Args:
            messages: The message for each agent, keyed by the agent or its name.
            seed: Each agent's draws are those of `generate` for it alone after `torch.manual_seed(seed)`.
            generation_kwargs: Passed to `model.generate`. Without `max_new_tokens`, `max_length` and
                `generation_config`, `max_new_tokens` is 256.

        Returns:
            The replies by agent name, in the order of `messages`.

        Raises:
            ColdPoolFullError: The turn needs more private tokens than `max_cold_slots`.
            ValueError: No message, an unknown agent, one asked twice or still answering, or an argument
                of `generate` that this method sets itself or cannot serve.
        """
        with self._lock, runners_words():
            questions = self._questions(messages, seed, generation_kwargs)
            started = self._answering.start([each for each in questions if not each.reasons])
            note_asked(questions, is_asked=True)
        try:
            with self._lock, runners_words():
                others = [each for each in questions if each.reasons]
                replies, reports = self._answering.generate(others)
            replies.update((reply.name, reply) for reply in replies_of(started.turns))
            return self._finish(questions, replies, [*reports, *started.reports()])
        except BaseException:
            started.cancel()
            raise
        finally:
            note_asked(questions, is_asked=False)

    async def arun(
        self, messages: Messages, *, seed: int | None = None, **generation_kwargs: Any
    ) -> dict[str, Reply]:
        """Does what `run` does without blocking the event loop."""
        with self._lock, runners_words():
            questions = self._questions(messages, seed, generation_kwargs)
            has_others = any(each.reasons for each in questions)
            started = self._answering.start([] if has_others else questions)
            note_asked([] if has_others else questions, is_asked=True)
        if has_others:
            return await asyncio.to_thread(self.run, messages, seed=seed, **generation_kwargs)
        try:
            found = await asyncio.gather(*started.turns)
            reports = await asyncio.to_thread(started.reports)
            return self._finish(questions, {reply.name: reply for reply in found}, reports)
        except BaseException:
            started.cancel()
            raise
        finally:
            note_asked(questions, is_asked=False)

    def submit(
        self, agent: Agent | str, message: str, *, seed: int | None = None, **generation_kwargs: Any
    ) -> Turn:
        """Asks one agent, and returns at once.

        The history grows when the answer is there, before the turn is done; if it is cancelled, not.

        Raises:
            ColdPoolFullError: The turn would not fit even if it were alone.
            ValueError: As for `run`; or the engine cannot decode this way.
        """
        return self._submit({agent: message}, seed, generation_kwargs).turns[0]

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        name: str = "",
        seed: int | None = None,
        **generation_kwargs: Any,
    ) -> Turn:
        """Asks for the answer to a whole conversation, and returns at once.

        For callers that send all of it each time, as agent frameworks do. What it has in common with a
        text of `share`, or with earlier calls, is not computed again. `max_rows` conversations are held.

        Args:
            messages: The conversation; of a tokenizer without a chat template the contents are joined.
            tools: As for `share`.
            name: The name of the reply.
            seed: As for `run`.
            generation_kwargs: Likewise.

        Raises:
            ColdPoolFullError: As for `submit`.
            ValueError: They are no messages of text, or as for `submit`.
        """
        with self._lock, runners_words():
            return self._answering.chat(messages, tools, name, seed, generation_kwargs)

    def stream(
        self, messages: Messages, *, seed: int | None = None, **generation_kwargs: Any
    ) -> Iterator[tuple[str, str]]:
        """Asks every given agent its message; gives `(name, piece of text)` as pieces come.

        Histories grow with their answers. Errors come when all have ended. Who stops listening cancels.
        """
        started = self._submit(messages, seed, generation_kwargs)
        return named(Merged(started.turns), partial(self._note, started))

    def astream(
        self, messages: Messages, *, seed: int | None = None, **generation_kwargs: Any
    ) -> AsyncIterator[tuple[str, str]]:
        """Does what `stream` does, for `async for`."""
        started = self._submit(messages, seed, generation_kwargs)
        return named_async(MergedAsync(started.turns), partial(self._note, started))

    def report(self) -> RunReport:
        """Gives the figures of the latest `run`, `arun`, `stream` or `astream` that came to its end."""
        return self._report

    def explain(self) -> str:
        """Says which path ran how often, what agents came to share, and why other things were not."""
        with self._lock:
            return self._answering.explain()

    def close(self) -> None:
        """Cancels all turns, ends the engine, and gives back what agents hold."""
        with self._lock:
            self._answering.close()

    def _questions(
        self, messages: Messages, seed: int | None, kwargs: dict[str, Any]
    ) -> list[Question]:
        questions = questions_of(
            self.agents, messages, seed, kwargs, model=self.model, tokenizer=self.tokenizer
        )
        for question in questions:
            self._roster.check_is_free(question.agent)
        # everything that may have to be computed anew is, before anything else is
        for share in dict.fromkeys(question.agent.share for question in questions):
            self._shares.current(share, self._answering.alone())
        return questions

    def _submit(self, messages: Messages, seed: int | None, kwargs: dict[str, Any]) -> Started:
        with self._lock, runners_words():
            questions = self._questions(messages, seed, kwargs)
            if reasons := dict.fromkeys(reason for each in questions for reason in each.reasons):
                raise ValueError(
                    f"an answer that comes piece by piece cannot be decoded with {'; '.join(reasons)}; "
                    "ask with run, which calls generate for that."
                )
            return self._answering.start(questions, keeps_history=True)

    def _note(self, started: Started) -> None:
        if not started.is_cancelled:
            self._report = RunReport.joined(started.reports())

    def _finish(
        self, questions: list[Question], replies: dict[str, Reply], reports: list[RunReport]
    ) -> dict[str, Reply]:
        with self._lock:
            for question in questions:
                question.heard(replies[question.agent.name])
            self._report = RunReport.joined(reports)
        return {each.agent.name: replies[each.agent.name] for each in questions}
