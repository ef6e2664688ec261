"""How often a quantity jumps: M27."""

import numpy as np
from jaxtyping import Bool, Float

HIGH = 7.0
"""Standard deviations above the mean that make a spike."""


def memory(steps: int) -> int:
    """W' = min(1000, max(50, T/10)), the number of steps that a value is held against."""
    return min(1000, max(50, steps // 10))


def spiked(values: Float[np.ndarray, "steps"], floor: float = 0.0, share: float = 0.0) -> Bool[np.ndarray, "steps"]:
    """The steps whose value is at least m + 7 s, with m and s the mean and standard deviation of the W' values before it.

    s is at least `floor` and at least `share` of |m|: what hardly moves would make spikes of nothing. The first W' steps have too
    little before them and are none; a value that is NaN or infinite is one. OLMo 2, arXiv:2501.00656, section 3.1.
    """
    w, found = memory(len(values)), np.zeros(len(values), bool)
    if len(values) <= w:
        return found
    before = np.lib.stride_tricks.sliding_window_view(values.astype(np.float64), w)[:-1]
    with np.errstate(invalid="ignore", over="ignore"):
        m, s = before.mean(-1), before.std(-1)
        s = np.maximum(s, np.maximum(floor, share * np.abs(m)))
        found[w:] = ~(values[w:] < m + HIGH * s)
    return found


def score(found: Bool[np.ndarray, "steps"]) -> float | None:
    """The share of spikes among the steps that could be one; None where there is no such step."""
    w = memory(len(found))
    return float(found[w:].mean()) if len(found) > w else None


def of_run(losses: Float[np.ndarray, "steps"], grad_norms: Float[np.ndarray, "steps"]) -> dict[str, object]:
    """What a run's status says of spikes: their scores for the loss (s at least 0.005 nats, as for its verdict) and for the
    gradient norm (s at least a hundredth of the mean), and the first 100 steps of each."""
    both = {"loss": spiked(losses, floor=0.005), "grad_norm": spiked(grad_norms, share=0.01)}
    return {name: {"score": score(found), "steps": np.flatnonzero(found)[:100].tolist()} for name, found in both.items()}
