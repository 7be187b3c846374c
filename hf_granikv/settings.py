"""The arguments of one `model.generate` call of a runner: checked, completed and looked up."""

from dataclasses import dataclass
from typing import Any

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
        cls, kwargs: dict[str, Any], model_config: Any, tokenizer: Any, pad_id: int
    ) -> "GenerationSettings":
        """Completes the caller's `kwargs`.

        Raises:
            ValueError: They name what the runner builds, or ask for several answers per prompt.
        """
        if own := [name for name in _OWN_ARGUMENTS if name in kwargs]:
            raise ValueError(
                f"run was given {', '.join(own)}, which it builds from the messages; do not pass them."
            )
        completed = {"pad_token_id": pad_id, **kwargs}
        if not {"max_new_tokens", "max_length", "generation_config"} & kwargs.keys():
            completed["max_new_tokens"] = DEFAULT_MAX_NEW_TOKENS
        if "stop_strings" in kwargs:
            completed.setdefault("tokenizer", tokenizer)
        settings = cls(completed, model_config)
        num_answers = settings.get("num_return_sequences") or 1
        if num_answers > 1:
            raise ValueError(
                f"run gives one reply per agent, num_return_sequences={num_answers} was asked; "
                "for several, call model.generate with an AsymmetricPagedCache."
            )
        return settings

    def get(self, name: str) -> Any:
        """Gives what `generate` uses for `name`: the call's, its config's, the model's; or None."""
        configs = (self.kwargs.get("generation_config"), self.model_config)
        values = [self.kwargs.get(name), *(getattr(config, name, None) for config in configs)]
        return next((value for value in values if value is not None), None)

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
        eos = self.get("eos_token_id")
        eos_ids = set(eos) if isinstance(eos, list | tuple) else {eos}
        end = next((i for i, token_id in enumerate(ids) if token_id in eos_ids), None)
        if end is not None:
            return ids[: end + 1], True
        # rows that another criterion stopped early are filled up with pads
        if self.kwargs.get("stopping_criteria") or self.kwargs.get("stop_strings"):
            while ids and ids[-1] == self.kwargs["pad_token_id"]:
                ids = ids[:-1]
        return ids, False
