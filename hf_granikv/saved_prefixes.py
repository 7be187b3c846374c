"""Prefixes that leave a cache for a file, and come into one from there."""

import os
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_granikv.announce import transformers_model
from hf_granikv.engine_use import between_steps
from hf_granikv.known_models import KnownModels
from hf_granikv.layer_kinds import ServedModel
from hf_granikv.loaded_levels import check_levels, hold, moved, without_held
from hf_granikv.models_cache import ModelsCache
from hf_granikv.pools import Prefix
from hf_granikv.prefix_file import check_may_write, read_prefix, write_prefix


class PrefixSaver:
    """Writes prefixes with the digest of the model that computed them.

    Args:
        models: The models that compute as the prefixes were computed.
    """

    def __init__(self, models: KnownModels) -> None:
        self._models = models

    def __call__(self, prefix: Prefix, path: str | os.PathLike[str], *, overwrite: bool) -> None:
        """See `Prefix.save`."""
        # before a model is hashed
        check_may_write(path, overwrite=overwrite)
        write_prefix(path, prefix.chain, self._models.digest(), overwrite=overwrite)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "a prefix cannot be pickled, since it belongs to a model of this process; write it with "
            "prefix.save(path), and read it with cache.load(path, model)."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "PrefixSaver":
        return self


class LoadingCache(ModelsCache):
    """A cache that takes prefixes from files."""

    @between_steps
    def load(self, path: str | os.PathLike[str], model: nn.Module) -> Prefix:
        """Maps a prefix that `prefix.save` wrote, and all it extends, for rows to come.

        Every byte of the file is checked. What the cache holds stays as it is, and is not loaded
        twice. Layers on the CPU stay mapped: the file may be replaced or removed, but not be
        written into.

        Args:
            path: The file.
            model: The model that will generate; all of it is hashed, once for each model object.

        Returns:
            The prefix, under its salt, with one hold for `release`; `prefix.parent` is what it extends.

        Raises:
            PrefixFileError: If the file is not there, holds no prefix, is truncated or altered, or
                belongs to another model; naming the first difference.
            StalePrefixError: If the cache holds prefixes that another model has computed.
            ValueError: If the model does not go with the config of the cache, part of it is offloaded,
                or the cache holds rows that started without any prefix.
        """
        inner, held, layers = transformers_model(model), self._state.prefixes, self._served.layers
        self._served.check_same(ServedModel.from_config(inner.config), type(inner).__name__)
        self._state.prefixes.check_takes(self._state.num_rows)
        levels = read_prefix(path, inner)
        check_levels(path, levels, layers, held.any)
        parent, fresh = without_held(levels, held)
        devices = layer_devices(inner, len(layers))
        fresh = [moved(level, layers, devices) for level in fresh]
        self.attach(model)
        return hold(parent, fresh, held, self._saver)

    @property
    def _saver(self) -> PrefixSaver:
        """What prefixes are saved with that the models known now compute."""
        return PrefixSaver(self._models.shared())


def layer_devices(model: PreTrainedModel, num_layers: int) -> list[torch.device]:
    """Where each layer computes its keys and values.

    Raises:
        ValueError: If the model is on several devices, and has no list of layers that tells.
    """
    devices = {weight.device for weight in model.parameters()}
    if len(devices) == 1:
        return [*devices] * num_layers
    num_modules = model.config.get_text_config(decoder=True).num_hidden_layers
    stacks = (m for m in model.get_decoder().modules() if isinstance(m, nn.ModuleList))
    layers = next((stack for stack in stacks if len(stack) == num_modules), None)
    if layers is None:
        raise ValueError(
            f"{type(model).__name__} is on {len(devices)} devices, and it cannot be told which of its "
            "layers are on which; load it on one device, or prefill the prefix."
        )
    return [next(layer.parameters()).device for layer in list(layers)[:num_layers]]
