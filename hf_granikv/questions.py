"""Who is asked what in one call, with which arguments, and who can answer it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_granikv.agent import Agent, Messages, Reply
from hf_granikv.engine.requests import Asked
from hf_granikv.prompts import check_message
from hf_granikv.settings import GenerationSettings

# objects of the caller's own that may look at all rows of a batch, or count its steps
_WHOLE_BATCH = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")


@dataclass(frozen=True, slots=True)
class Question:
    """A message for one agent.

    Attributes:
        agent: Who is asked.
        message: What.
        settings: The arguments of `generate` for it; one object for all that may share a batch.
        seed: For its draws.
        reasons: Why `generate` has to answer it and not the engine; empty if the engine can.
    """

    agent: Agent
    message: str
    settings: GenerationSettings
    seed: int | None
    reasons: tuple[str, ...]

    def heard(self, reply: Reply) -> None:
        """Adds the question and its answer to the agent's history, unless it was cancelled."""
        if reply.finish_reason != "cancelled":
            self.agent.heard(self.message, reply.text)


def questions_of(
    agents: Mapping[str, Agent],
    messages: Messages,
    seed: int | None,
    kwargs: dict[str, Any],
    *,
    model: Any,
    tokenizer: Any,
) -> list[Question]:
    """Gives the questions of one call, checked before anything is computed.

    Args:
        agents: All there are, by name.
        messages: The message for each agent, keyed by the agent or its name.
        seed: Of the call; None leaves it to each agent's own.
        kwargs: Of the call; what they leave open is each agent's own.
        model: The model.
        tokenizer: Its tokenizer.

    Raises:
        ValueError: No message, an unknown agent, one asked twice, or arguments that nothing can serve.
    """
    asked = _resolved(agents, messages)
    per_prefix = Counter(id(agents[name].prefix) for name in asked)
    common: GenerationSettings | None = None
    questions = []
    for name, message in asked.items():
        agent = agents[name]
        own = dict(agent.generation)
        own_seed = own.pop("seed", None)
        settings = common
        if own or settings is None:
            num_rows = 1 if own else max(per_prefix.values())
            settings = GenerationSettings.checked(
                {**own, **kwargs}, model.generation_config, tokenizer, num_rows=num_rows
            )
        if not own:
            common = settings
        reasons = Asked(model, settings.kwargs).reasons_against()
        if len(asked) > 1:
            reasons += [f"{each} for several agents" for each in _WHOLE_BATCH if kwargs.get(each)]
        its_seed = own_seed if seed is None else seed
        if its_seed is not None and reasons:
            raise ValueError(
                f"seed={its_seed} goes for draws of one agent by itself, and {'; '.join(reasons)} is "
                "decoded by generate for all together; call torch.manual_seed instead."
            )
        questions.append(Question(agent, message, settings, its_seed, tuple(reasons)))
    return questions


def known_agent(agents: Mapping[str, Agent], agent: Agent | str) -> Agent:
    """Gives the agent that is meant.

    Raises:
        ValueError: There is none of that name, or another one.
    """
    name: Any = getattr(agent, "name", agent)
    known = agents.get(name)
    if known is None or agent not in (name, known):
        names = ", ".join(agents) or "none"
        raise ValueError(f"agent {name!r} is unknown; known: {names}. Add it with agent().")
    return known


def _resolved(agents: Mapping[str, Agent], messages: Messages) -> dict[str, str]:
    if not messages:
        raise ValueError("run was given no messages; pass {agent or name: message, ...}.")
    asked: dict[str, str] = {}
    for key, message in messages.items():
        name = known_agent(agents, key).name
        if name in asked:
            raise ValueError(f"agent {name!r} was asked twice; pass it or its name, once.")
        check_message(name, message)
        asked[name] = message
    return asked


def note_asked(questions: list[Question], *, is_asked: bool) -> None:
    """Keeps agents from being asked again before their history has grown."""
    for question in questions:
        question.agent._is_asked = is_asked


def check_tokenizer(model: Any, tokenizer: Any) -> None:
    """Checks that a model embeds whatever a tokenizer gives.

    Raises:
        ValueError: If it does not, or they are no model and no tokenizer.
    """
    if not hasattr(model, "get_input_embeddings") or not hasattr(tokenizer, "decode"):
        raise ValueError(
            f"a {type(model).__name__} was given as the model and a {type(tokenizer).__name__} as the "
            "tokenizer; pass the model first, then its tokenizer."
        )
    vocab_size = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"the tokenizer knows {len(tokenizer)} tokens, the model embeds {vocab_size}; "
            "pass the model's own tokenizer, or call model.resize_token_embeddings."
        )
