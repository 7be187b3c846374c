"""Choice of a backend by a roofline model."""

from hf_granikv.dispatch.device_constants import constants_for
from hf_granikv.dispatch.dispatcher import Decision, Dispatcher

__all__ = ["Decision", "Dispatcher", "constants_for"]
