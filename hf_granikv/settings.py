"""The arguments of one `model.generate` call of a runner: checked, completed and looked up."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

DEFAULT_MAX_NEW_TOKENS = 256

# what a runner builds itself from the messages
_OWN_ARGUMENTS = (
    "attention_mask",
    "cache",
    "input_ids",
    "inputs",
    "inputs_embeds",
    "past_key_values",
    "position_ids",
    "use_cache",
)

# generate proposes several tokens at once with these, which it can for one row only
_ONE_ROW_ARGUMENTS = ("prompt_lookup_num_tokens", "assistant_model", "assistant_early_exit")


def padding_id(tokenizer: Any) -> int:
    """Gives the id that fills the left of a batch."""
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((token_id for token_id in ids if token_id is not None), 0)


def argument_in_force(name: str, kwargs: Mapping[str, Any], model_config: Any) -> Any:
    """Gives what `generate` uses for `name`: the call's, its config's, the model's; or None.

    The call's counts even where it is None; a None in a config leaves the name open.
    """
    if name in kwargs:
        return kwargs[name]
    configs = (kwargs.get("generation_config"), model_config)
    values = (getattr(config, name, None) for config in configs)
    return next((value for value in values if value is not None), None)


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """The caller's generation arguments over the model's defaults.

    Attributes:
        kwargs: What goes to `model.generate`.
        model_config: The model's generation config, which holds what `kwargs` leave open.
    """

    kwargs: dict[str, Any]
    model_config: Any

    @classmethod
    def checked(
        cls, kwargs: dict[str, Any], model_config: Any, tokenizer: Any, *, num_rows: int = 1
    ) -> "GenerationSettings":
        """Completes the caller's `kwargs` for batches of at most `num_rows`.

        Raises:
            ValueError: They name what the runner builds, ask for several answers per prompt, or for
                a way to generate that a batch over a stored prefix cannot go.
        """
        if own := [name for name in _OWN_ARGUMENTS if name in kwargs]:
            raise ValueError(
                f"run was given {', '.join(own)}, which it builds from the messages; do not pass them."
            )
        completed = {"pad_token_id": padding_id(tokenizer), **kwargs}
        if not {"max_new_tokens", "max_length", "generation_config"} & kwargs.keys():
            completed["max_new_tokens"] = DEFAULT_MAX_NEW_TOKENS
        settings = cls(completed, model_config)
        settings._check_modes(num_rows)
        if settings.get("stop_strings"):
            completed.setdefault("tokenizer", tokenizer)
        if settings._has_other_ends:
            completed["pad_token_id"] = settings._fill_id(tokenizer)
        return settings

    def _check_modes(self, num_rows: int) -> None:
        num_answers = self.get("num_return_sequences") or 1
        if num_answers > 1:
            raise ValueError(
                f"run gives one reply per agent, num_return_sequences={num_answers} was asked; "
                "for several, call model.generate with an AsymmetricPagedCache."
            )
        alone = [name for name in _ONE_ROW_ARGUMENTS if self.get(name) is not None]
        if alone and num_rows > 1:
            raise ValueError(
                f"{', '.join(alone)} works for one agent at a time, {num_rows} share this batch; "
                "leave it out, or run each agent by itself."
            )

    def get(self, name: str) -> Any:
        """See `argument_in_force`."""
        return argument_in_force(name, self.kwargs, self.model_config)

    @property
    def takes_streamer(self) -> bool:
        """Whether `generate` accepts a streamer; with beams it does not."""
        return (self.get("num_beams") or 1) == 1

    def max_new_tokens(self, width: int) -> int | None:
        """Gives the most tokens an answer can have after a batch of `width` columns, if limited."""
        limit = self.get("max_new_tokens")
        if limit is None and (max_length := self.get("max_length")) is not None:
            limit = max_length - width
        return limit

    def answer_ids(self, ids: list[int]) -> tuple[list[int], bool]:
        """Cuts one row of generated `ids` where its answer ends.

        Returns:
            The ids, the end token included where there is one, and whether there is one.
        """
        end_ids = self.end_ids
        end = next((i for i, token_id in enumerate(ids) if token_id in end_ids), None)
        if end is not None:
            return ids[: end + 1], True
        # rows that another criterion stopped early are filled up
        if self._has_other_ends:
            while ids and ids[-1] == self.kwargs["pad_token_id"]:
                ids = ids[:-1]
        return ids, False

    @property
    def end_ids(self) -> set[int]:
        """The ids that end an answer."""
        eos = self.get("eos_token_id")
        return set() if eos is None else set(torch.as_tensor(eos).flatten().tolist())

    @property
    def _has_other_ends(self) -> bool:
        return bool(self.get("stopping_criteria") or self.get("stop_strings"))

    def _fill_id(self, tokenizer: Any) -> int:
        """Gives what fills stopped rows: an id that no answer ends with, the given one if it can be."""
        taken = {None, tokenizer.eos_token_id, *self.end_ids}
        if not self.takes_streamer:
            # beam search reads 0 as "none given" and fills with an end token
            taken.add(0)
        given = (self.kwargs["pad_token_id"], tokenizer.unk_token_id, tokenizer.bos_token_id)
        return next(i for i in (*given, *range(len(tokenizer))) if i not in taken)
