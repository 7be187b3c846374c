"""Many agents over one shared text: stored once, answered in one batch per turn."""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from hf_granikv.agent import Agent, Messages, Reply, user_message
from hf_granikv.announce import device_of_ids
from hf_granikv.batches import in_batches
from hf_granikv.cache import AsymmetricPagedCache
from hf_granikv.compat import CACHE_ARGUMENT
from hf_granikv.config import CacheOptions
from hf_granikv.errors import ColdPoolFullError, StalePrefixError
from hf_granikv.prompts import (
    Message,
    SharedText,
    check_message,
    left_padded,
    render,
    shared_ids,
    shared_text,
    suffix_ids,
)
from hf_granikv.report import RunReport
from hf_granikv.settings import GenerationSettings, padding_id
from hf_granikv.timing import StepTimer, forward_progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_granikv.pools import Prefix

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Share:
    """A stored prefix with the text behind it and the cache that serves it."""

    prefix: "Prefix"
    shared: SharedText
    ids: list[int]
    cache: AsymmetricPagedCache
    prefill_s: float


class MultiAgentRunner:
    """Asks many agents in one batch, with the text that they share stored and computed once.

    A prompt's ids are always `tok(shared text) + tok(rest of the rendered text,
    add_special_tokens=False)`. Where a tokenizer would merge across that seam (a shared text that ends
    in a space, say) they differ from the ids of the whole text tokenized at once.

    Args:
        model: A causal language model. Loaded with `attn_implementation="granikv"` it reads the shared
            part once per step; with another one the answers are the same, without the speed.
        tokenizer: The model's tokenizer. Its chat template is used where it has one.
        dispatch: How each step chooses its backend, see `AsymmetricPagedCache`.
        max_cold_slots: Limit of private tokens held per prefix; None grows as needed.

    Raises:
        ValueError: The tokenizer knows more tokens than the model embeds, or an option means nothing.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        *,
        dispatch: str = "auto",
        max_cold_slots: int | None = None,
    ) -> None:
        embedding: Any = model.get_input_embeddings()
        vocab_size = embedding.weight.shape[0]
        if len(tokenizer) > vocab_size:
            raise ValueError(
                f"the tokenizer knows {len(tokenizer)} tokens, the model embeds {vocab_size}; "
                "pass the model's own tokenizer, or call model.resize_token_embeddings."
            )
        self.model: Any = model
        self.tokenizer = tokenizer
        self.agents: dict[str, Agent] = {}
        try:
            self._options = CacheOptions(dispatch, max_cold_slots)
        except ValueError as error:
            raise ValueError(_in_our_words(error)) from None
        self._shares: dict[int, _Share] = {}
        self._report = RunReport()

    def share(self, content: str | Sequence[Message]) -> "Prefix":
        """Computes and stores what many agents will read.

        Args:
            content: A text, or chat messages. With a chat template a text becomes the system message,
                or the head of the first user message where the template takes no system message.

        Raises:
            ValueError: There is nothing to share, it is no text and no list of messages, or the chat
                template cannot put it first.
        """
        shared = shared_text(self.tokenizer, content)
        return self._compute(shared, shared_ids(self.tokenizer, shared)).prefix

    def agent(self, name: str, prefix: "Prefix", instructions: str | None = None) -> Agent:
        """Adds an agent that reads `prefix`.

        Raises:
            ValueError: The name is taken, or another runner stored the prefix.
        """
        if name in self.agents:
            raise ValueError(f"an agent named {name!r} is there already; choose another name.")
        if id(prefix) not in self._shares:
            raise ValueError(
                f"agent {name!r} was given a prefix that this runner does not hold (it holds "
                f"{len(self._shares)}); pass what this runner's share returned, or where the model "
                "has changed since, the prefix of one of its agents."
            )
        agent = self.agents[name] = Agent(name, prefix, instructions)
        return agent

    def prompt_ids(self, agent: Agent | str, message: str) -> list[int]:
        """Gives the whole prompt that `run` would send now if `agent` were asked `message`.

        Raises:
            ValueError: The agent is unknown, or nothing follows the shared text.
        """
        agent = self._known(agent)
        check_message(agent.name, message)
        share = self._shares[id(agent.prefix)]
        text = render(self.tokenizer, share.shared, agent.conversation(message))
        suffix = suffix_ids(self.tokenizer, share.shared, text)
        if not suffix:
            raise ValueError(
                f"agent {agent.name!r} has no token after the shared text; give it a message."
            )
        return share.ids + suffix

    def run(self, messages: Messages, **generation_kwargs: Any) -> dict[str, Reply]:
        """Asks every given agent its message, in one batch per prefix.

        Models that would read pads as tokens (hybrids) get a batch per length of the prompts.
        Histories grow only when the whole turn has succeeded. A prefix whose model has changed since
        is computed anew first; its agents then have another `prefix`.

        Args:
            messages: The message for each agent, keyed by the agent or its name.
            generation_kwargs: Passed to `model.generate`. Without `max_new_tokens`, `max_length` and
                `generation_config`, `max_new_tokens` is 256.

        Returns:
            The replies by agent name, in the order of `messages`.

        Raises:
            ColdPoolFullError: The turn needs more private tokens than `max_cold_slots`.
            ValueError: No message, an unknown agent, one asked twice, or an argument of `generate`
                that this method sets itself or cannot serve.
        """
        asked = self._resolve(messages)
        turns: dict[int, dict[str, str]] = {}
        for name, message in asked.items():
            turns.setdefault(id(self.agents[name].prefix), {})[name] = message
        num_rows = max(map(len, turns.values()))
        settings = GenerationSettings.checked(
            generation_kwargs, self.model.generation_config, self.tokenizer, num_rows=num_rows
        )
        replies: dict[str, Reply] = {}
        reports: list[RunReport] = []
        for prefix_id, turn in turns.items():
            share = self._current(self._shares[prefix_id])
            prefix_replies, report = self._ask(share, turn, settings)
            replies.update(prefix_replies)
            reports.append(report)
        for name, message in asked.items():
            answer = {"role": "assistant", "content": replies[name].text}
            self.agents[name].history += [user_message(message), answer]
        self._report = RunReport.joined(reports)
        return {name: replies[name] for name in asked}

    def report(self) -> RunReport:
        """Gives the figures of the latest successful `run`; all zero before the first."""
        return self._report

    def _compute(self, shared: SharedText, ids: list[int]) -> _Share:
        cache = AsymmetricPagedCache(self.model.config, **asdict(self._options))
        start = time.perf_counter()
        with forward_progress(self.model, f"granikv prefix of {len(ids)} tokens"):
            prefix = cache.prefill(self.model, torch.tensor([ids]))
        share = _Share(prefix, shared, ids, cache, time.perf_counter() - start)
        self._shares[id(prefix)] = share
        return share

    def _current(self, share: _Share) -> _Share:
        """Gives the share as the model is now."""
        try:
            share.cache.attach(self.model)
            return share
        except StalePrefixError as error:
            logger.info("a prefix of %d tokens is computed anew: %s", len(share.ids), error)
        renewed = self._compute(share.shared, share.ids)
        for agent in self.agents.values():
            if agent.prefix is share.prefix:
                agent.prefix = renewed.prefix
        del self._shares[id(share.prefix)]
        return renewed

    def _resolve(self, messages: Messages) -> dict[str, str]:
        if not messages:
            raise ValueError("run was given no messages; pass {agent or name: message, ...}.")
        asked: dict[str, str] = {}
        for key, message in messages.items():
            name = self._known(key).name
            if name in asked:
                raise ValueError(f"agent {name!r} was asked twice; pass it or its name, once.")
            check_message(name, message)
            asked[name] = message
        return asked

    def _known(self, agent: Agent | str) -> Agent:
        name: Any = getattr(agent, "name", agent)
        known = self.agents.get(name)
        if known is None or agent not in (name, known):
            names = ", ".join(self.agents) or "none"
            raise ValueError(f"agent {name!r} is unknown; known: {names}. Add it with agent().")
        return known

    def _ask(
        self, share: _Share, turn: dict[str, str], settings: GenerationSettings
    ) -> tuple[dict[str, Reply], RunReport]:
        prompts = {name: self.prompt_ids(name, message) for name, message in turn.items()}
        width = max(map(len, prompts.values()))
        limit = settings.max_new_tokens(width)
        num_columns = None if limit is None else width + limit
        replies: dict[str, Reply] = {}
        reports: list[RunReport] = []
        for batch in in_batches(self.model, prompts, num_columns):
            batch_replies, report = self._answer(share, batch, settings)
            replies.update(batch_replies)
            reports.append(report)
        return replies, RunReport.of_batches(reports)

    def _answer(
        self, share: _Share, turn: dict[str, list[int]], settings: GenerationSettings
    ) -> tuple[dict[str, Reply], RunReport]:
        prompts = list(turn.values())
        ids, mask = left_padded(prompts, padding_id(self.tokenizer))
        width, device = ids.shape[1], device_of_ids(self.model)
        limit = settings.max_new_tokens(width)

        timer = StepTimer(settings.kwargs.get("streamer"), limit)
        heard = {"streamer": timer} if settings.takes_streamer else {}
        steps_before = dict(share.cache.stats().backend_steps)
        try:
            with timer:
                output = self.model.generate(
                    input_ids=ids.to(device),
                    attention_mask=mask.to(device),
                    **{**settings.kwargs, **heard, CACHE_ARGUMENT: share.cache},
                )
        except ColdPoolFullError as error:
            raise ColdPoolFullError(_in_our_words(error)) from error
        sequences = output if isinstance(output, Tensor) else output.sequences
        answers = sequences[:, width:].tolist()
        replies = {
            name: self._reply(name, answer, len(prompt), limit, settings)
            for name, answer, prompt in zip(turn, answers, prompts, strict=True)
        }
        stats = share.cache.stats()
        generated_tokens = sum(len(reply.token_ids) for reply in replies.values())
        report = RunReport(
            num_agents=len(turn),
            prefix_tokens=len(share.ids),
            suffix_tokens=sum(map(len, prompts)) - len(prompts) * len(share.ids),
            generated_tokens=generated_tokens,
            decode_steps=timer.decode_steps,
            decoded_tokens=None if timer.decode_steps is None else generated_tokens - len(turn),
            prefix_prefill_s=share.prefill_s,
            suffix_prefill_s=timer.prefill_s,
            decode_s=timer.decode_s,
            generate_s=timer.total_s,
            hot_bytes=stats.hot_bytes,
            cold_bytes=stats.cold_bytes,
            dense_equivalent_bytes=stats.dense_equivalent_bytes,
            backend_steps=dict(Counter(stats.backend_steps) - Counter(steps_before)),
        )
        return replies, report

    def _reply(
        self,
        name: str,
        generated: list[int],
        prompt_tokens: int,
        limit: int | None,
        settings: GenerationSettings,
    ) -> Reply:
        ids, has_end = settings.answer_ids(generated)
        is_cut = not has_end and (limit is None or len(ids) >= limit)
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Reply(
            name, cast("str", text), tuple(ids), prompt_tokens, "length" if is_cut else "stop"
        )


def _in_our_words(error: Exception) -> str:
    return str(error).replace("cold_slots", "max_cold_slots")
