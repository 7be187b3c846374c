"""The part of a cache that knows which models may use it."""

from torch import nn
from transformers import PreTrainedModel

from hf_granikv.announce import attach_hook, transformers_model
from hf_granikv.engine_use import EngineUse, between_steps
from hf_granikv.known_models import KnownModels
from hf_granikv.layer_kinds import ServedModel
from hf_granikv.rows_cache import RowsCache


class ModelsCache(RowsCache):
    """A cache that takes models."""

    _models: KnownModels
    engines: EngineUse

    @between_steps
    def attach(self, model: nn.Module) -> PreTrainedModel:
        """Lets another object with the weights of the prefix use the cache.

        Every element is compared with the model that computed the prefix. `prefill` needs no
        comparison for the model it is given, and forgets all others.

        Returns:
            The transformers model inside `model`.

        Raises:
            ValueError: If the model does not go with the config of the cache, or is another one than
                that of an engine which runs over the cache, with no prefix to compare them by.
            StalePrefixError: If it is not as the model of the prefix, or that is gone or has changed.
        """
        inner = transformers_model(model)
        self._served.check_same(ServedModel.from_config(inner.config), type(inner).__name__)
        if self._state.prefixes:
            self._models.admit(inner)
        else:
            if inner not in self._models:
                self.engines.check_none_runs(type(inner).__name__)
            self._models.start(inner)
        attach_hook(inner)
        return inner
