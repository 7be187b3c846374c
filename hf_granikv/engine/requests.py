"""What may be asked of one turn, and what transformers makes of it.

Processors and stopping criteria are those that `model.generate` prepares: it is called with a
`custom_generate` that takes them and computes nothing.
"""

import copy
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation import GenerationMode, StopStringCriteria

from hf_granikv.announce import device_of_ids, transformers_model
from hf_granikv.compat import CACHE_ARGUMENT
from hf_granikv.engine.sampler import Sampler
from hf_granikv.settings import argument_in_force

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OWN = {
    *("attention_mask", "cache", "custom_generate", "input_ids", "inputs", "inputs_embeds"),
    *("past_key_values", "position_ids", "use_cache", "cache_implementation", "logits_to_keep"),
}
# what needs other rows beside that of the turn, or proposes several tokens; each with what it is unless asked
_OTHER_MODES: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "num_return_sequences": (None, 1),
    "constraints": (None,),
    "force_words_ids": (None,),
    "guidance_scale": (None, 1, 1.0),
    "negative_prompt_ids": (None,),
    "negative_prompt_attention_mask": (None,),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "assistant_model": (None,),
    "assistant_tokenizer": (None,),
    "assistant_early_exit": (None,),
    "prompt_lookup_num_tokens": (None,),
    "use_mtp": (None, False),
    "synced_gpus": (None, False),
    "token_healing": (None, False),
    "streamer": (None,),
    "prefill_chunk_size": (None,),
}
_STOP_STRINGS = threading.Lock()
_ONE_ROW = {GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE}


class Asked:
    """The generation arguments of one turn over the defaults of the model.

    Args:
        model: The model, or a wrapper of it.
        kwargs: As `model.generate` takes them.
    """

    def __init__(self, model: nn.Module, kwargs: Mapping[str, Any]) -> None:
        self._model = transformers_model(model)
        self._kwargs = dict(kwargs)

    def get(self, name: str) -> Any:
        """See `argument_in_force`."""
        return argument_in_force(name, self._kwargs, self._model.generation_config)

    def reasons_against(self) -> list[str]:
        """Gives, in words, what a row among others cannot serve; empty if there is nothing."""
        reasons = [
            f"{name}={self.get(name)!r}"
            for name, harmless in _OTHER_MODES.items()
            if not any(self.get(name) is value or self.get(name) == value for value in harmless)
        ]
        known = {*GenerationConfig().to_dict(), *_OWN, *_OTHER_MODES, *_EXTRAS}
        reasons += [f"{name}, an argument of the forward" for name in {*self._kwargs} - known]
        return reasons

    def check(self) -> None:
        """Checks that the turn can run in the engine.

        Raises:
            ValueError: With every argument that is against it.
        """
        if own := sorted(_OWN & self._kwargs.keys()):
            raise ValueError(f"a turn was given {', '.join(own)}, which the engine sets itself.")
        if reasons := self.reasons_against():
            raise ValueError(
                f"the engine was given {'; '.join(reasons)}, and runs greedy decoding and sampling "
                "of one answer per turn; MultiAgentRunner.run decodes the other modes with generate."
            )

    def sampler(
        self, token_ids: Sequence[int], tokenizer: "PreTrainedTokenizerBase", seed: int | None
    ) -> Sampler:
        """Prepares the turn as `generate` would for a batch of this row alone.

        Args:
            token_ids: The whole prompt.
            tokenizer: For stop strings.
            seed: Draws are those of `generate` after `torch.manual_seed(seed)`. None takes a seed
                from torch's own generator, so that a seeded program repeats itself.

        Raises:
            ValueError: For what `generate` refuses, and for other modes.
        """
        self.check()
        taken = self._prepared(token_ids, tokenizer)
        config: GenerationConfig = taken["generation_config"]
        # what this transformers version adds to the modes known above
        if (mode := config.get_generation_mode()) not in _ONE_ROW or len(taken["input_ids"]) > 1:
            raise ValueError(
                f"the generation mode is {mode.value} of {len(taken['input_ids'])} rows; the engine "
                "runs greedy decoding and sampling of one answer per turn."
            )
        generator = None
        if config.do_sample:
            seed = int(torch.randint(2**62, ())) if seed is None else seed
            generator = torch.Generator(taken["input_ids"].device).manual_seed(seed)
        return Sampler(
            taken["input_ids"],
            processors=taken["logits_processor"],
            criteria=taken["stopping_criteria"],
            generator=generator,
            keeps_scores=bool(config.return_dict_in_generate and config.output_scores),
        )

    def _prepared(
        self, token_ids: Sequence[int], tokenizer: "PreTrainedTokenizerBase"
    ) -> dict[str, Any]:
        kwargs = {**self._kwargs}
        # a callable's tokenizer gets lost in generate, so stop strings come as a criterion
        criteria = list(kwargs.get("stopping_criteria") or ())
        strings = self.get("stop_strings")
        if strings and not any(type(each) is StopStringCriteria for each in criteria):
            # transformers keeps what it works out for a vocabulary in one dict for all threads
            with _STOP_STRINGS:
                criteria.append(StopStringCriteria(kwargs.get("tokenizer") or tokenizer, strings))
        kwargs |= {"stopping_criteria": StoppingCriteriaList(criteria)}
        for name in ("stop_strings", "tokenizer"):
            kwargs.pop(name, None)
        # the caller's model and config stay as they are
        asked: Any = copy.copy(self._model)
        asked.generation_config = _without_cache_or_strings(self._model.generation_config)
        if kwargs.get("generation_config") is not None:
            kwargs["generation_config"] = _without_cache_or_strings(kwargs["generation_config"])
        ids = torch.tensor([list(token_ids)], device=device_of_ids(self._model))
        taken: dict[str, Any] = asked.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            custom_generate=_taken,
            **kwargs,
        )
        return taken


_EXTRAS = {
    *("generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"),
    *("tokenizer", "trust_remote_code"),
}


def _without_cache_or_strings(config: GenerationConfig) -> GenerationConfig:
    config = copy.deepcopy(config)
    config.cache_implementation = config.stop_strings = None
    return config


def _taken(
    model: Any,
    input_ids: Tensor,
    *,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> dict[str, Any]:
    model_kwargs.pop(CACHE_ARGUMENT, None)
    return {
        "input_ids": input_ids,
        "logits_processor": logits_processor,
        "stopping_criteria": stopping_criteria,
        "generation_config": generation_config,
    }
