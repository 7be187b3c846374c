"""Prefixes in files, each bound to the model that computed it by a digest of its content."""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hf_granikv.errors import PrefixFileError
from hf_granikv.model_digest import ModelDigest
from hf_granikv.pools.row_states import LayerStates, StateKey
from hf_granikv.tensor_file import map_tensors, read_header, write_tensors

_FORMAT_KEY, _FORMAT = "hf_granikv.prefix", "1"


@dataclass(frozen=True, eq=False)
class PrefixLevel:
    """What a file holds of one prefix of a chain.

    Attributes:
        token_ids: `[num_tokens]` int64 on the CPU, without those of its parent.
        keys: One `[num_kv_heads, num_stored, head_dim]` contiguous tensor per layer.
        values: Likewise.
        starts: Per layer, the absolute position of the first token that is stored.
        states: For layers that keep states: the absolute number of tokens -> per such layer what
            the states are after them, `[1, ...]` each.
        salt: What keeps equal tokens of different owners apart.
    """

    token_ids: Tensor
    keys: Sequence[Tensor] = field(repr=False)
    values: Sequence[Tensor] = field(repr=False)
    starts: Sequence[int] = field(repr=False)
    states: Mapping[int, Sequence[LayerStates]] = field(default_factory=dict, repr=False)
    salt: str | None = None


def write_prefix(
    path: str | os.PathLike[str],
    levels: Sequence[PrefixLevel],
    model: ModelDigest,
    *,
    overwrite: bool = False,
) -> None:
    """Writes a prefix and its ancestors to one file, which appears when it is complete.

    Args:
        path: Where to; an earlier prefix file there is replaced, and who has mapped it keeps it.
        levels: From the first ancestor to the prefix.
        model: Of the model that computed them.
        overwrite: Replaces a file that holds no prefix as well.

    Raises:
        PrefixFileError: If something else is at `path`, or no folder to put it in.
    """
    target = Path(os.path.realpath(path))
    _check_may_write(target, overwrite=overwrite)
    tensors = {
        name: tensor
        for level_idx, level in enumerate(levels)
        for name, tensor in _tensors(level_idx, level)
    }
    metadata = {
        _FORMAT_KEY: _FORMAT,
        "model": model.to_json(),
        "levels": json.dumps([_described(level) for level in levels]),
    }
    write_tensors(target, tensors, metadata)


def read_prefix(path: str | os.PathLike[str], model: nn.Module) -> list[PrefixLevel]:
    """Maps a prefix and its ancestors, for a model that computes as the one that computed them.

    Args:
        path: The file.
        model: The transformers model; all of it is hashed, once for each model object.

    Returns:
        The levels, from the first ancestor to the prefix; their tensors are mapped, contiguous on
        the CPU, and in storages of exactly their bytes. The file may be replaced or removed
        meanwhile, but not be written into.

    Raises:
        PrefixFileError: If it is not there, holds no prefix, was written by a later version, is
            truncated or altered, or belongs to another model; naming the first difference.
    """
    header = read_header(Path(path))
    if _FORMAT_KEY not in header.metadata:
        raise PrefixFileError(
            f"{path} is a safetensors file, but holds no prefix. Give a file that prefix.save wrote."
        )
    if header.metadata[_FORMAT_KEY] != _FORMAT:
        raise PrefixFileError(
            f"{path} has format {header.metadata[_FORMAT_KEY]!r}; this version of hf_granikv reads "
            f"format {_FORMAT!r}. Upgrade hf_granikv, or prefill and save the prefix anew."
        )
    header.check()
    # models are hashed only for files that are worth it
    saved_with = ModelDigest.from_json(header.metadata["model"])
    if difference := saved_with.difference(ModelDigest.of(model)):
        raise PrefixFileError(
            f"{path} holds a prefix of another model than the one given: {difference}. Load it with "
            "the model that computed it, or prefill with this one."
        )
    tensors = map_tensors(header)
    levels = enumerate(json.loads(header.metadata["levels"]))
    return [_rebuilt(level_idx, described, tensors) for level_idx, described in levels]


def _tensors(level_idx: int, level: PrefixLevel) -> list[tuple[str, Tensor]]:
    pairs = enumerate(zip(level.keys, level.values, strict=True))
    return [
        (f"{level_idx}.token_ids", level.token_ids),
        *(
            (f"{level_idx}.{kind}.{layer_idx}", tensor)
            for layer_idx, pair in pairs
            for kind, tensor in zip(("keys", "values"), pair, strict=True)
        ),
        *(
            (_state_name(level_idx, num_tokens, layer_idx, key), state)
            for num_tokens, layers in level.states.items()
            for layer_idx, of_layer in enumerate(layers)
            for key, state in of_layer.items()
        ),
    ]


def _state_name(level_idx: int, num_tokens: int, layer_idx: int, key: StateKey) -> str:
    return f"{level_idx}.states.{num_tokens}.{layer_idx}.{key.kind}.{key.state_idx}"


def _described(level: PrefixLevel) -> dict[str, Any]:
    """What a level says beside its tensors."""
    states = {
        num_tokens: [list(of_layer) for of_layer in layers]
        for num_tokens, layers in level.states.items()
    }
    return {"starts": list(level.starts), "states": states, "salt": level.salt}


def _rebuilt(level_idx: int, described: dict[str, Any], tensors: dict[str, Tensor]) -> PrefixLevel:
    layers = range(len(described["starts"]))
    states: dict[int, Sequence[LayerStates]] = {}
    for text, keys_by_layer in described["states"].items():
        num_tokens = int(text)
        states[num_tokens] = tuple(
            {
                key: tensors[_state_name(level_idx, num_tokens, layer_idx, key)]
                for key in (StateKey(*parts) for parts in keys)
            }
            for layer_idx, keys in enumerate(keys_by_layer)
        )
    return PrefixLevel(
        tensors[f"{level_idx}.token_ids"],
        keys=tuple(tensors[f"{level_idx}.keys.{layer_idx}"] for layer_idx in layers),
        values=tuple(tensors[f"{level_idx}.values.{layer_idx}"] for layer_idx in layers),
        starts=tuple(described["starts"]),
        states=states,
        salt=described["salt"],
    )


def _check_may_write(target: Path, *, overwrite: bool) -> None:
    if not target.parent.is_dir():
        raise PrefixFileError(f"{target.parent} is no folder; make it before saving {target.name}.")
    if not target.exists():
        return
    if not target.is_file():
        raise PrefixFileError(f"{target} is no regular file; save the prefix under another name.")
    metadata: Mapping[str, str] = {}
    with contextlib.suppress(PrefixFileError):
        metadata = read_header(target).metadata
    if not overwrite and _FORMAT_KEY not in metadata:
        raise PrefixFileError(
            f"{target} is there already and holds no prefix; save under another name, or pass "
            "overwrite=True."
        )
