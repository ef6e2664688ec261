"""Did a run train, and if not, how did it fail: one verdict, the first rule that matches.

Symbols: l_t the training loss of step t (nats per token), T the number of steps, l0 the held-out loss of the untrained
model and SE its standard error, h the final held-out loss, u the unigram level (the cross-entropy of the training
unigram on the held-out tokens; ln V for uniform targets), l_ref the loss that can be reached, W = max(20, ⌈0.02 T⌉),
med_t the median of the last W losses up to step t, run_t the running minimum of med.

    1  NONFINITE           a loss, gradient norm, parameter or held-out loss is NaN or infinite
    2  ABOVE_INIT          med at the end > l0 + max(0.02 l0, 3 SE)
    3  UNRECOVERED_SPIKE   a spike at t, and min med_s over the windows after it > run_{t-1} + 0.05 (l0 - run_{t-1})
    4  STUCK               h > u - 0.1 (u - l_ref), where l_ref < u - 0.1
    5  SLOW                h > l_ref + 0.25 (u - l_ref), where l_ref < u
    6  OK, OK_SPIKED       the rest; OK_SPIKED when there was a spike and it recovered

A spike at t: l_t, l_{t+1} and l_{t+2} are all at least m + 7 s, with m and s the mean and the standard deviation (at
least 0.005 nats) of the W' = min(1000, max(50, T/10)) steps before t. The window is frozen there, so that a permanent
jump can't hide in its own average. The windows after a spike begin at t or later: one that reaches further back still
holds the old level and would call any jump recovered.

A run alone knows rules 1-3, and rule 4 against the levels of its data. Rule 5, and rule 4 against the best of the
sweep, need the other runs (`table`). Clipping at l0 follows Wortsman et al. 2023 (arXiv:2309.14322); stagnation,
irrecoverable spike and slow optimization are the failures named by Chen and Wei 2026 (Keel). The thresholds are ours.
"""

import math
from bisect import bisect_left, insort
from enum import StrEnum

import numpy as np
from jaxtyping import Float, Int


class Verdict(StrEnum):
    """How a run ended; `meaning` says it in a line."""

    meaning: str

    def __new__(cls, value: str, meaning: str):
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    NONFINITE = "NONFINITE", "a loss, gradient or parameter became NaN or infinite"
    ABOVE_INIT = "ABOVE_INIT", "ended above the loss of the untrained model"
    UNRECOVERED_SPIKE = "UNRECOVERED_SPIKE", "the loss jumped and never came back"
    STUCK = "STUCK", "never left the unigram level"
    SLOW = "SLOW", "trained, but closed less than three quarters of the gap to the best"
    OK = "OK", "trained"
    OK_SPIKED = "OK_SPIKED", "trained; the loss spiked and came back"


DIVERGED = frozenset({Verdict.NONFINITE, Verdict.ABOVE_INIT, Verdict.UNRECOVERED_SPIKE})
FAILED = DIVERGED | {Verdict.STUCK}


def window(steps: int) -> int:
    """W = max(20, ⌈0.02 T⌉), the number of losses under a median."""
    return max(20, -(-steps // 50))


def running_median(losses: Float[np.ndarray, "steps"], width: int) -> Float[np.ndarray, "steps"]:
    """med_t: the median of the last `width` losses up to t, of all of them while they are fewer. No loss may be NaN."""
    ordered: list[float] = []
    median = np.empty(len(losses))
    for t, loss in enumerate(losses):
        insort(ordered, float(loss))
        if t >= width:
            del ordered[bisect_left(ordered, float(losses[t - width]))]
        n = len(ordered)
        median[t] = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    return median


def first_nonfinite(losses: Float[np.ndarray, "steps"], grad_norms: Float[np.ndarray, "steps"]) -> int | None:
    """t_div, the first step whose loss or gradient norm is NaN or infinite; None when there is none."""
    bad = np.flatnonzero(~(np.isfinite(losses) & np.isfinite(grad_norms)))
    return int(bad[0]) if len(bad) else None


def spikes(losses: Float[np.ndarray, "steps"]) -> Int[np.ndarray, "spikes"]:
    """The steps t that begin three losses of at least m + 7 s. None before step W'."""
    w = min(1000, max(50, len(losses) // 10))
    if len(losses) < w + 3:
        return np.empty(0, int)
    x = losses.astype(np.float64)
    x -= np.median(x)  # the variance below is a difference of squares
    box = np.full(w, 1 / w)
    m, square = (np.convolve(y, box, "valid")[:-3] for y in (x, x**2))  # entry i: the w steps before t = w + i
    s = np.maximum(np.sqrt(np.maximum(square - m**2, 0)), 0.005)
    lowest = np.minimum(np.minimum(x[w:-2], x[w + 1 : -1]), x[w + 2 :])
    return w + np.flatnonzero(lowest - m >= 7 * s)


def unrecovered_spike(losses: Float[np.ndarray, "steps"], l0: float) -> bool:
    """Whether some spike is never followed by a median within 0.05 (l0 - run_{t-1}) of the best one before it.

    Where fewer than W steps follow a spike, those after its first three losses make the one window; a spike that is the end of the
    run may yet recover and is none. Every loss must be finite.
    """
    T = len(losses)
    W = window(T)
    median = running_median(losses, W)
    best_before = np.minimum.accumulate(median)
    best_from = np.minimum.accumulate(median[::-1])[::-1]
    for t in spikes(losses):
        after = best_from[t + W - 1] if t + W <= T else np.median(losses[t + 3 :]) if t + 3 < T else -math.inf
        if after > best_before[t - 1] + 0.05 * (l0 - best_before[t - 1]):
            return True
    return False


def stuck(heldout: float, unigram: float, l_ref: float) -> bool:
    """Rule 4. A NaN stands for a level that is not known and matches nothing."""
    return l_ref < unigram - 0.1 and heldout > unigram - 0.1 * (unigram - l_ref)


def slow(heldout: float, unigram: float, l_ref: float) -> bool:
    """Rule 5. A NaN stands for a level that is not known and matches nothing."""
    return l_ref < unigram and heldout > l_ref + 0.25 * (unigram - l_ref)


def run_verdict(
    losses: Float[np.ndarray, "steps"],
    grad_norms: Float[np.ndarray, "steps"],
    *,
    l0: float,
    l0_se: float,
    heldout: float | None,
    unigram: float | None,
    floor: float | None = None,
    bigram: float | None = None,
    parameters_finite: bool = True,
) -> Verdict:
    """What a run knows alone: rules 1-3, and rule 4 with l_ref the known entropy `floor`, else the `bigram` level.

    Losses and levels in nats per token; None stands for what was not measured. A run that ended early as non-finite
    gives its losses up to that step. Raises ValueError for a run without a step.
    """
    if not len(losses):
        raise ValueError("a run of 0 steps has no verdict: it takes at least one loss")
    if not parameters_finite or first_nonfinite(losses, grad_norms) is not None:
        return Verdict.NONFINITE
    if not math.isfinite(l0) or (heldout is not None and not math.isfinite(heldout)):
        return Verdict.NONFINITE
    losses = losses.astype(np.float64)
    if np.median(losses[-window(len(losses)) :]) > l0 + max(0.02 * l0, 3 * l0_se):
        return Verdict.ABOVE_INIT
    if unrecovered_spike(losses, l0):
        return Verdict.UNRECOVERED_SPIKE
    l_ref = bigram if floor is None else floor
    if heldout is not None and unigram is not None and l_ref is not None and stuck(heldout, unigram, l_ref):
        return Verdict.STUCK
    return Verdict.OK_SPIKED if len(spikes(losses)) else Verdict.OK


def sweep_verdict(run: Verdict, *, heldout: float, unigram: float, l_ref: float) -> Verdict:
    """A run's verdict beside the others': rules 4 and 5 against l_ref; what diverged stays so.

    NaN stands for a level that is not known; without l_ref the run's own verdict stands.
    """
    if run in DIVERGED or not all(map(math.isfinite, (heldout, unigram, l_ref))):
        return run
    if stuck(heldout, unigram, l_ref):
        return Verdict.STUCK
    if slow(heldout, unigram, l_ref):
        return Verdict.SLOW
    return Verdict.OK if run is Verdict.STUCK else run


def effective_loss(verdict: Verdict, *, heldout: float, unigram: float, l0: float) -> float:
    """l_eff = min(h, u), or min(h, l0) where there is no unigram level (NaN): the loss of this run in a mean over runs.

    A run that is NONFINITE counts as the level itself; a held-out loss that was not measured (NaN) stays NaN.
    """
    level = l0 if math.isnan(unigram) else unigram
    return level if verdict is Verdict.NONFINITE else heldout if math.isnan(heldout) else min(heldout, level)
