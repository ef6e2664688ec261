"""Standard deviations of the base initialisers, before a role's gain; no array library, so that theory reads them too."""

from collections.abc import Callable
from typing import Any


def _xavier(fan_in: int, fan_out: int, std: Any) -> Any:
    return (2 / (fan_in + fan_out)) ** 0.5


def _given(fan_in: int, fan_out: int, std: Any) -> Any:
    return std


DEVIATIONS: dict[str, Callable[[int, int, Any], Any]] = {
    "xavier_normal": _xavier,
    "xavier_uniform": _xavier,
    "lecun": lambda fan_in, fan_out, std: fan_in**-0.5,
    "normal": _given,
    "truncated_normal": _given,
}
"""Name -> standard deviation from (fan in, fan out, model.init_std).

Glorot and Bengio 2010, equations 12 and 16; LeCun et al. 1998, section 4.6; GPT-2; BERT.
"""
