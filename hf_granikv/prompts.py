"""Turns conversations over a shared text into text, token ids and padded batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from jinja2 import TemplateError
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]
# a JSON schema, as chat templates take them
Tool = Mapping[str, Any]

_SEPARATOR = "\n\n"


@dataclass(frozen=True, slots=True)
class SharedText:
    """The text at the head of every prompt of the agents that share it.

    Attributes:
        text: The rendered text, exactly as it stands at the head of each rendered prompt.
        messages: The messages behind it; empty where the tokenizer has no chat template.
        tools: What the template is told that the agents can call.
    """

    text: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


def shared_text(
    tokenizer: "PreTrainedTokenizerBase",
    content: str | Sequence[Message],
    tools: Sequence[Tool] | None = None,
) -> SharedText:
    """Gives the text that all prompts over `content` begin with.

    With a chat template a `str` becomes a system message where the template accepts one, and the
    head of the first user message otherwise. Without a template it is taken as it is.

    Raises:
        ValueError: `content` is empty, is neither text nor messages of text, or is a list of messages
            that the template cannot put at the head of a prompt, or that no template is there for.
    """
    contents = [content] if isinstance(content, str) else contents_of("share", content)
    if not any(text.strip() for text in contents):
        raise ValueError("share was given nothing to share; pass a text or messages with content.")
    _check_tools("share", tokenizer, tools)
    tools = tuple(tools or ())
    if tokenizer.chat_template is None:
        if not isinstance(content, str):
            raise ValueError(
                f"share was given {len(contents)} messages, but the tokenizer has no chat template; "
                "pass one str, or set tokenizer.chat_template."
            )
        return SharedText(content, ())
    if not isinstance(content, str):
        return _shared_messages(tokenizer, content, tools)
    try:
        return _shared_messages(tokenizer, [{"role": "system", "content": content}], tools)
    except ValueError:
        return _shared_messages(tokenizer, [{"role": "user", "content": content}], tools)


def check_message(name: str, message: object) -> None:
    """Checks what the agent `name` is asked.

    Raises:
        ValueError: It is no text, or a blank one.
    """
    if not isinstance(message, str):
        raise ValueError(
            f"the message for agent {name!r} is a {type(message).__name__}; pass a str."
        )
    if not message.strip():
        raise ValueError(
            f"the message for agent {name!r} is blank; ask it something, or leave it out of this turn."
        )


def render(
    tokenizer: "PreTrainedTokenizerBase", shared: SharedText, messages: Sequence[Message]
) -> str:
    """Gives the whole text of a prompt: the shared text, then `messages`, ready for an answer.

    Adjacent user messages are joined. Without a chat template contents are concatenated as they are.

    Raises:
        ValueError: The rendered text does not begin with the shared text.
    """
    if not shared.messages:
        return shared.text + "".join(message["content"] for message in messages)
    text = _apply_template(tokenizer, [*shared.messages, *messages], shared.tools, prompts=True)
    if not text.startswith(shared.text):
        raise ValueError(
            "the chat template renders this conversation without the shared text at its head, so the "
            "stored prefix cannot serve it; share the text as a user message "
            "([{'role': 'user', 'content': text}]), or share it again if the template has changed."
        )
    return text


def render_whole(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
) -> str:
    """Gives the text of a whole conversation, ready for an answer.

    Raises:
        ValueError: It is no list of messages of text, it says nothing, or the chat template refuses it.
    """
    contents = contents_of("chat", messages)
    if not any(text.strip() for text in contents):
        raise ValueError("chat was given nothing to answer; pass messages with content.")
    _check_tools("chat", tokenizer, tools)
    if tokenizer.chat_template is None:
        return "".join(contents)
    try:
        return _apply_template(tokenizer, messages, tools or (), prompts=True)
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"the chat template refuses messages of {roles} ({error}); send them in other roles."
        ) from error


def shared_ids(tokenizer: "PreTrainedTokenizerBase", shared: SharedText) -> list[int]:
    """Gives the token ids of the shared text, with the special tokens that open a text."""
    body = _ids(tokenizer, shared.text)
    # a template writes its own special tokens into the text
    if shared.messages:
        return body
    ids = tokenizer(shared.text, verbose=False)["input_ids"]
    # some tokenizers close every text with a token, and nothing may follow that one
    return ids if ids[-len(body) :] == body else ids[:-1]


def suffix_ids(tokenizer: "PreTrainedTokenizerBase", shared: SharedText, text: str) -> list[int]:
    """Gives the token ids of what follows the shared text in the whole prompt `text`."""
    return _ids(tokenizer, text.removeprefix(shared.text))


def left_padded(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Gives `(input_ids, attention_mask)`, both `[num_rows, longest]`, with pads on the left."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad_id] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def contents_of(who: str, messages: object) -> list[str]:
    """Gives the texts of messages.

    Raises:
        ValueError: They are no messages of text, in the words of whoever was given them.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        or_text = "a str, or " if who == "share" else ""
        raise ValueError(
            f"{who} was given a {type(messages).__name__}; pass {or_text}a list of messages "
            "{'role': ..., 'content': ...}."
        )
    for message in messages:
        keys = ("role", "content")
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in keys
        ):
            raise ValueError(
                f"{who} was given the message {message!r}; give each message a 'role' and a "
                "'content' that are one str each (join the text parts of a content list)."
            )
    return [message["content"] for message in messages]


def _check_tools(
    who: str, tokenizer: "PreTrainedTokenizerBase", tools: Sequence[Tool] | None
) -> None:
    if tools and tokenizer.chat_template is None:
        raise ValueError(
            f"{who} was given {len(tools)} tools, but the tokenizer has no chat template to tell the model "
            "of them; set tokenizer.chat_template, or describe them in the text."
        )


def _shared_messages(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], tools: tuple[Tool, ...]
) -> SharedText:
    ends_with_user = messages[-1]["role"] == "user"
    try:
        # a later turn may move what an early one has at its head, so both are tried
        openings = [
            _apply_template(tokenizer, [*messages, *turn], tools)
            for turn in (_turn("a"), _turn("b"), [*_turn("a"), _reply(), *_turn("b")])
        ]
        # up to the agent's own text where that continues the last message, else whole messages
        text = (
            _common_head(*openings[:2])
            if ends_with_user
            else _apply_template(tokenizer, messages, tools)
        )
    except TemplateError as error:
        raise ValueError(
            f"the chat template refuses the shared messages ({error}); share other roles."
        ) from error
    is_head = all(opening.startswith(text) for opening in openings)
    if not is_head or any(message["content"].strip() not in text for message in messages):
        raise ValueError(
            "the chat template does not put the shared messages at the head of a conversation; "
            "share the text as one user message."
        )
    return SharedText(text, tuple(messages), tools)


def _common_head(first: str, second: str) -> str:
    pairs = zip(first, second, strict=False)
    end = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    return first[:end]


def _turn(content: str) -> list[Message]:
    return [{"role": "user", "content": content}]


def _reply() -> Message:
    return {"role": "assistant", "content": "c"}


def _apply_template(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    prompts: bool = False,
) -> str:
    joined: list[dict[str, str]] = []
    for message in messages:
        if joined and message["role"] == joined[-1]["role"] == "user":
            joined[-1]["content"] += _SEPARATOR + message["content"]
        else:
            joined.append(dict(message))
    schemas: list[Any] | None = [dict(tool) for tool in tools] or None
    text = tokenizer.apply_chat_template(
        joined, tools=schemas, tokenize=False, add_generation_prompt=prompts
    )
    return cast("str", text)


def _ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
