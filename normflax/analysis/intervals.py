"""A number over seeds, with how well it is known."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float
from scipy import stats

Z = 1.959964  # the 97.5 % point of the normal distribution


@dataclass(frozen=True)
class Measured:
    """A value over `seeds` runs and an interval around it."""

    value: float
    low: float
    high: float
    seeds: int


def share(flags: Bool[np.ndarray, "runs"]) -> Measured:
    """The share of runs that are true, with its 95 % Wilson interval.

        (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)

    It does not shrink to a point at 0 of 3. Wilson 1927, J. Am. Stat. Assoc. 22:209.
    """
    n, p = len(flags), float(np.mean(flags))
    middle, spread = p + Z**2 / (2 * n), Z * np.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2))
    scale = 1 + Z**2 / n
    return Measured(p, max(0.0, float((middle - spread) / scale)), min(1.0, float((middle + spread) / scale)), n)


def geometric(values: Float[np.ndarray, "runs"]) -> Measured:
    """The geometric mean of a positive scale over seeds, with the range of the seeds."""
    return Measured(float(np.exp(np.mean(np.log(values)))), float(np.min(values)), float(np.max(values)), len(values))


def jackknife(values: Float[np.ndarray, "seeds *rest"], statistic: Callable[[np.ndarray], float]) -> Measured:
    """A statistic of what n seeds measured, with its 95 % interval from the n values that lack one seed each:

        s² = (n - 1)/n · Σ (θ_without_i - mean)²        θ ± t_{n-1} · s

    For a mean it is the usual interval of Student's t. One seed has no interval: low and high are NaN.
    Efron and Stein 1981, Ann. Stat. 9:586.
    """
    n, value = len(values), float(statistic(values))
    if n < 2:
        return Measured(value, float("nan"), float("nan"), n)
    without = np.array([statistic(np.delete(values, i, axis=0)) for i in range(n)])
    spread = float(stats.t.ppf(0.975, n - 1) * np.sqrt((n - 1) / n * np.sum((without - without.mean()) ** 2)))
    return Measured(value, value - spread, value + spread, n)
