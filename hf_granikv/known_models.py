"""Which model objects may read a prefix: those that compute as it was computed."""

from collections.abc import Iterator
from weakref import WeakKeyDictionary

from torch import nn

from hf_granikv.errors import StalePrefixError
from hf_granikv.identity import ModelIdentity, argument_of_rows, content_difference
from hf_granikv.model_digest import ModelDigest

_REMEDY = "call cache.invalidate() and prefill again."


class KnownModels:
    """The models that one cache has met, each as it was then; none of them is kept alive."""

    def __init__(self) -> None:
        self._identities: WeakKeyDictionary[nn.Module, ModelIdentity] = WeakKeyDictionary()

    def __contains__(self, model: nn.Module) -> bool:
        return model in self._identities

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(list(self._identities))

    def start(self, model: nn.Module) -> None:
        """Forgets all models but the one that is about to compute a prefix, as it is now.

        Raises:
            ValueError: If rows of the call under way run through weights of their own.
        """
        _check_rows_are_alike(model)
        self._identities = WeakKeyDictionary({model: ModelIdentity(model)})

    def admit(self, model: nn.Module) -> None:
        """Adds a model object that computes as the model of the prefix does.

        Raises:
            ValueError: If the two contain each other.
            StalePrefixError: If anything differs, or nothing is left to compare with.
        """
        if model in self:
            self.check(model)
            return
        for known in self:
            if model in known.modules() or known in model.modules():
                raise ValueError(
                    f"{type(model).__name__} and {type(known).__name__}, which this cache knows, "
                    "contain each other; use the one that was attached first."
                )
        self._check_same(model)
        self._identities[model] = ModelIdentity(model)

    def check(self, model: nn.Module) -> None:
        """Checks that a known model still computes as the prefix was computed.

        Raises:
            StalePrefixError: If it has changed, naming what.
            ValueError: If rows of the call under way run through weights of their own.
        """
        _check_rows_are_alike(model)
        identity = self._identities[model]
        if not identity.is_of(model):
            raise StalePrefixError(
                f"the prefix was computed with other weights than {type(model).__name__} has now: "
                f"{identity.difference(model)}. To go on with the model as it is, {_REMEDY}"
            )

    def doubt(self) -> None:
        """Parts the models from what they have computed, for writes that no mark shows.

        Nothing of that can be saved any more, and each model is hashed anew. They stay known.
        """
        for model in self:
            ModelDigest.forget(model)
        computed, self._identities = self._identities, self._identities.copy()
        computed.clear()

    def digest(self) -> ModelDigest:
        """The content of the models, for what they have computed since the start.

        Raises:
            StalePrefixError: If no model is left that computes as it did then, naming what changed.
        """
        unchanged = self._unchanged()
        if unchanged is not None:
            return ModelDigest.of(unchanged)
        changed = next(iter(self), None)
        if changed is None:
            why = "no model that computes it is left, or cache.invalidate was called since"
        else:
            difference = self._identities[changed].difference(changed)
            why = f"{type(changed).__name__} has changed since it computed it: {difference}"
        raise StalePrefixError(
            f"the prefix cannot be saved: {why}. Save a prefix before that, or prefill it anew."
        )

    def shared(self) -> "KnownModels":
        """The models known until this object starts anew or doubts, those to come included."""
        twin = KnownModels()
        twin._identities = self._identities
        return twin

    def copy(self) -> "KnownModels":
        """The same models, to be added to independently."""
        twin = KnownModels()
        twin._identities = self._identities.copy()
        return twin

    def _unchanged(self) -> nn.Module | None:
        return next((known for known in self if self._identities[known].is_of(known)), None)

    def _check_same(self, model: nn.Module) -> None:
        known = self._unchanged()
        if known is None:
            raise StalePrefixError(
                f"{type(model).__name__} cannot be compared with the model that the prefix was "
                f"computed with: that one is gone or has changed. {_REMEDY.capitalize()}"
            )
        if difference := content_difference(known, model):
            raise StalePrefixError(
                f"the prefix was computed with another {type(known).__name__} than the one given: "
                f"{difference}. Use the model of the prefix, or {_REMEDY}"
            )


def _check_rows_are_alike(model: nn.Module) -> None:
    if name := argument_of_rows(model):
        raise ValueError(
            f"{name} lets rows of this call run through other weights than the prefix, which one "
            "adapter has computed for all of them. Run the rows of each adapter by themselves, with "
            "set_adapter and a cache for each; or leave this cache out."
        )
