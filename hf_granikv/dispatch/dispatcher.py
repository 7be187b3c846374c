"""Chooses the backend of each prefix group, once per step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from hf_granikv.dispatch.device_constants import constants_for
from hf_granikv.dispatch.roofline import DeviceConstants, Work, predict_all, regime_of
from hf_granikv.views import GroupShape

_HYSTERESIS = 0.10


class Candidate(Protocol):
    """What the dispatcher asks of a backend."""

    def unsupported_reasons(self, shape: GroupShape) -> list[str]:
        """Gives every reason why the backend cannot serve the group; none = it can."""

    def work(self, shape: GroupShape) -> Work:
        """Gives what the backend would have to do for the group."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The backend chosen for a group, and why.

    Attributes:
        backend_name: Key of the chosen backend.
        predicted_s: Predicted seconds per layer of every backend that can run.
        refused: Reasons of every backend that cannot.
        regime: What limits the chosen backend: `"compute"`, `"memory"`, `"launch"` or
            `"communication"`.
        origin: Where the constants of the prediction come from.
    """

    backend_name: str
    predicted_s: dict[str, float]
    refused: dict[str, list[str]]
    regime: str
    origin: str


class Dispatcher:
    """Picks the backend with the least predicted time, or the one asked for.

    Args:
        choice: `"auto"` or the name of one of the backends.
        backends: Backends by name.
        constants: What the device can do; None takes its calibration, or a built-in table.

    Raises:
        ValueError: `choice` names no backend.
    """

    def __init__(
        self,
        choice: str = "auto",
        *,
        backends: Mapping[str, Candidate],
        constants: DeviceConstants | None = None,
    ) -> None:
        if choice != "auto" and choice not in backends:
            known = ", ".join(["auto", *backends])
            raise ValueError(f"dispatch {choice!r} is unknown; known: {known}.")
        self.choice = choice
        self._backends = backends
        self._constants = constants
        self._decisions: dict[tuple, Decision] = {}
        self._last: dict[tuple, tuple[str, int]] = {}

    def choose(self, shape: GroupShape, device: str) -> Decision:
        """Decides which backend serves a group of this shape.

        Prefix lengths that agree in their four leading bits share a decision, so a step in which
        little has moved costs one dictionary lookup. The earlier choice for as many rows over about
        as many tokens stays unless another is predicted to be more than 10 % faster.

        Args:
            shape: The group's matrix problem.
            device: Such as `"cpu"` or `"cuda:0"`; picks the constants if none were given.

        Raises:
            ValueError: The backend asked for cannot serve the group, or none can.
        """
        family = shape._replace(prefix_len=0), device
        key = (family, _length_bucket(shape.prefix_len))
        decision = self._decisions.get(key)
        if decision is None:
            name, prefix_len = self._last.get(family, ("", 0))
            # another prefix altogether tells nothing
            is_near = prefix_len <= 2 * shape.prefix_len <= 4 * prefix_len
            decision = self._decide(shape, device, name if is_near else None)
            self._decisions[key] = decision
        self._last[family] = decision.backend_name, shape.prefix_len
        return decision

    def _decide(self, shape: GroupShape, device: str, earlier: str | None) -> Decision:
        constants = self._constants or constants_for(device)
        reasons = {name: b.unsupported_reasons(shape) for name, b in self._backends.items()}
        refused = {name: why for name, why in reasons.items() if why}
        works = {n: b.work(shape) for n, b in self._backends.items() if n not in refused}
        predicted_s = predict_all(works, constants, shape.dtype_name)
        if self.choice in refused or not predicted_s:
            why = "; ".join(f"{name}: {', '.join(listed)}" for name, listed in refused.items())
            raise ValueError(
                f"dispatch {self.choice!r} cannot serve {shape}: {why}. "
                f"Usable here: {', '.join(predicted_s) or 'none'}."
            )
        name = self.choice
        if name == "auto":
            name = min(predicted_s, key=predicted_s.__getitem__)
            if earlier in predicted_s and not _is_clearly_faster(
                predicted_s[name], predicted_s[earlier]
            ):
                name = earlier
        regime = regime_of(works[name], constants, name, shape.dtype_name)
        return Decision(name, predicted_s, refused, regime, constants.origin)


def _is_clearly_faster(new_s: float, earlier_s: float) -> bool:
    return new_s < earlier_s * (1 - _HYSTERESIS)


def _length_bucket(prefix_len: int) -> int:
    shift = max(0, prefix_len.bit_length() - 4)
    return prefix_len >> shift << shift
