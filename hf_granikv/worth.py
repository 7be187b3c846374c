"""What sharing tokens is worth on a model as it is loaded."""

from typing import Any

import torch

from hf_granikv.announce import device_of_ids, transformers_model
from hf_granikv.attention import ATTENTION_NAME
from hf_granikv.backends import BACKENDS
from hf_granikv.dispatch import constants_for
from hf_granikv.dispatch.roofline import DeviceConstants
from hf_granikv.dispatch.sharing import FLOOR_TOKENS, level_gain_s, merging_gain_s
from hf_granikv.views import GroupShape, dtype_name


class Worth:
    """Says of tokens that rows of a living batch have in common whether to hold them once.

    Args:
        model: A transformers model, or a wrapper of one.
        min_shared_tokens: Share every run of at least this many tokens; None: where the cost model
            predicts a gain.

    Attributes:
        at_least: The fewest tokens that may be worth it.
    """

    def __init__(self, model: Any, min_shared_tokens: int | None = None) -> None:
        self._model: Any = transformers_model(model)
        self._is_forced = min_shared_tokens is not None
        self.at_least = min_shared_tokens or FLOOR_TOKENS + 1

    def why_not(
        self, *, num_rows: int, num_tokens: int, num_saved: int, num_steps: int
    ) -> str | None:
        """Gives why some rows should not share some tokens; None if they should.

        Args:
            num_rows: Those who hold them each for itself, or would.
            num_tokens: Tokens after those that the rows share already.
            num_saved: Tokens, over all rows, that need not be computed then.
            num_steps: Decode steps to come, at most.
        """
        if num_tokens < self.at_least:
            return f"{num_tokens} tokens are common to {num_rows} agents, it takes {self.at_least}"
        if self._is_forced:
            return None
        if (reason := why_slow(self._model)) is not None:
            return reason
        gain_s = level_gain_s(
            step_shape(self._model, num_rows, num_tokens),
            hidden_size=self._model.config.get_text_config(decoder=True).hidden_size,
            num_saved=num_saved,
            num_steps=num_steps,
            constants=self._constants,
            backends=BACKENDS,
        )
        if gain_s > 0:
            return None
        return (
            f"sharing {num_tokens} tokens of {num_rows} agents would lose {-1e6 * gain_s:.0f} us per "
            f"layer in {num_steps} steps"
        )

    def merging_pays(
        self, *, num_rows: int, num_tokens: int, num_before: int, num_steps: int
    ) -> bool:
        """Whether tokens that rows share and those before them should be stored as one.

        Args:
            num_rows: Who reads both.
            num_tokens: Tokens of the later level.
            num_before: Of the one before.
            num_steps: Decode steps to come, at most.
        """
        gain_s = merging_gain_s(
            step_shape(self._model, num_rows, num_tokens),
            num_before,
            num_steps=num_steps,
            constants=self._constants,
            backends=BACKENDS,
        )
        return gain_s > 0

    @property
    def _constants(self) -> DeviceConstants:
        return constants_for(device_of_ids(self._model))


def step_shape(model: Any, num_rows: int, num_tokens: int) -> GroupShape:
    """The size of one decode step of some rows over tokens that they share."""
    config = model.config.get_text_config(decoder=True)
    num_q_heads = _most(config.num_attention_heads)
    num_kv_heads = _most(getattr(config, "num_key_value_heads", None) or num_q_heads)
    return GroupShape(
        num_rows=num_rows,
        q_len=1,
        prefix_len=num_tokens,
        num_kv_heads=num_kv_heads,
        gqa_ratio=num_q_heads // num_kv_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_q_heads,
        dtype_bytes=model.dtype.itemsize,
        dtype=dtype_name(model.dtype),
    )


def why_slow(model: Any) -> str | None:
    """Why shared tokens would be right but slow in a model as it is loaded; None if they are not."""
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    is_dense = torch.is_autocast_enabled(device_of_ids(model).type) or model.dtype == torch.float64
    if attention == ATTENTION_NAME and not is_dense:
        return None
    return (
        f"under attn_implementation={attention!r}, or autocast, a shared prefix is right but slow, as "
        f"it is in float64; load the model with {ATTENTION_NAME!r}, or pass min_shared_tokens."
    )


def _most(heads: Any) -> int:
    # some models say it for each layer
    return int(max(heads) if isinstance(heads, (list, tuple)) else heads)
