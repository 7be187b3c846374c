"""Turns token ids into text as they come, in pieces that together are the text of all of them."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# decoders write it for bytes that are no character, or not yet
_NO_CHARACTER = "\ufffd"
# a byte of a tokenizer that falls back on bytes; a run of these is decoded as a whole
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def decoded(tokenizer: "PreTrainedTokenizerBase", token_ids: Sequence[int]) -> str:
    """Gives the text of an answer: without special tokens, otherwise as the tokenizer has it."""
    return cast("str", tokenizer.decode(list(token_ids), skip_special_tokens=True))


class TextPieces:
    """The text of one answer in pieces: their concatenation is `decoded` of all its ids.

    A piece is given as soon as no later token can change it. A character that is split over several
    tokens comes whole, with the last of them; bytes that a tokenizer spells as `<0xE4>` come when
    their run has ended; and where the tokenizer cleans up spaces, a word comes with the next one. A
    stop string is part of the text and of the pieces, as it is of what `generate` returns.

    ```
    ids     [ ........ | start ... read | ........ ]
    text       given     given, decoded   new        a piece is what the new ids add to the context
    ```

    Args:
        tokenizer: The model's tokenizer.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer: Any = tokenizer
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._ids: list[int] = []
        self._start = self._read = 0
        self._given = ""

    def put(self, token_ids: Sequence[int]) -> str:
        """Takes the next ids and gives the text that is settled by them, often none."""
        if not token_ids:
            return ""
        self._ids += token_ids
        if self._tokenizer.clean_up_tokenization_spaces:
            # the space before a comma goes when the comma comes, so the last word may still change
            text = decoded(self._tokenizer, self._ids)
            return self._give(text[: max(text.rfind(" "), 0)])
        window = decoded(self._tokenizer, self._ids[self._start :])
        before = decoded(self._tokenizer, self._ids[self._start : self._read])
        if self._may_change(window) or not window.startswith(before):
            return ""
        piece = window[len(before) :]
        # ids without text are no context: a first word loses its space in some tokenizers
        if piece:
            self._start = self._read
        self._read = len(self._ids)
        self._given += piece
        return piece

    def end(self) -> str:
        """Gives what is left when no more ids will come."""
        return self._give(decoded(self._tokenizer, self._ids))

    def _give(self, text: str) -> str:
        if not text.startswith(self._given):
            return ""
        piece = text[len(self._given) :]
        self._given = text
        return piece

    def _may_change(self, text: str) -> bool:
        if text.endswith(_NO_CHARACTER):
            return True
        # special tokens are left out of the text and do not end a run
        seen = (i for i in reversed(self._ids[self._start :]) if i not in self._special_ids)
        last = self._tokenizer.convert_ids_to_tokens(next(seen, self._ids[-1]))
        return isinstance(last, str) and _BYTE_TOKEN.fullmatch(last) is not None
