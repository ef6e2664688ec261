"""The statistics that claims about models at initialisation are judged by, from their runs and layers."""

import numpy as np
import pandas as pd

from normflax.analysis import propagation as found
from normflax.analysis.intervals import Measured, jackknife
from normflax.analysis.propagation import arm, by_depth, by_seed, last_block, log_slope, rows, totals

DEPTH = 64
"""Blocks of the stack that curves over blocks are judged on."""


def measured(values: np.ndarray, statistic) -> Measured | None:
    """The statistic over seeds, or None where nothing was measured."""
    return jackknife(values, statistic) if values.size else None


def mean_log(values: np.ndarray) -> np.ndarray:
    """The geometric mean over seeds."""
    return np.exp(np.log(values).mean(0))


def growth(runs: pd.DataFrame, layers: pd.DataFrame, placement: str, column: str = "value"):
    """Blocks and second moments [seeds, blocks] of one placement at DEPTH blocks."""
    part = arm(runs, model__init="lecun", model__depth=DEPTH)
    return by_seed(rows(layers, part, "second_moment"), placement, column=column)


def pre_theory_error(runs, layers):
    """Largest |ln(q/q_theory)| over blocks under Pre-LN."""
    (_, q), (_, expected) = (growth(runs, layers, "pre", column) for column in ("value", "theory"))
    return measured(q, lambda q: np.abs(np.log(mean_log(q) / expected[0])).max()) if np.isfinite(expected).any() else None


def pre_slope(runs, layers):
    """Slope of ln q_l in ln l over l ≥ 8 under Pre-LN."""
    l, q = growth(runs, layers, "pre")
    return measured(q, lambda q: log_slope(l, q, least=8))


def sandwich_end(runs, layers):
    """q_L / (q_0 + 2L) under Sandwich-LN."""
    l, q = growth(runs, layers, "sandwich")
    return measured(q, lambda q: mean_log(q)[-1] / (mean_log(q)[0] + 2 * l[-1]))


def deepnorm_input(runs, layers):
    """Largest |M03²/alpha² - 1| under DeepNorm, from the second norm on."""
    part = arm(runs, model__init="lecun", model__depth=DEPTH, placement="deepnorm")
    lengths = rows(layers, part, "norm_input", site="post").pivot(index="seed", columns="sublayer", values="value").to_numpy(float)
    alpha = (2 * DEPTH) ** 0.25
    return measured(lengths, lambda lengths: np.abs(lengths.mean(0)[1:] ** 2 / alpha**2 - 1).max())


def layer_slope(placement: str, mask: str):
    """M07: slope of ln M06b in ln l over the blocks l ≥ max(4, L/16)."""

    def measure(runs, layers):
        part = arm(runs, model__depth=DEPTH, model__mask=mask)
        l, g = by_seed(rows(layers, part, "grad_block"), placement)
        return measured(g, lambda g: log_slope(l, g, least=found.first_fitted(DEPTH)))

    return measure


def deepnorm_ends(runs, layers):
    """Gradient of DeepNorm's last block over its first."""
    _, g = by_seed(rows(layers, arm(runs, model__depth=DEPTH), "grad_block"), "deepnorm")
    return measured(g, lambda g: mean_log(g)[-1] / mean_log(g)[0])


def post_floor(runs, layers):
    """√T · min_l ‖G_l‖/‖G_L‖ of Post-LN's activation gradients, 16 blocks of width 128, bidirectional."""
    part = arm(runs, model__depth=16, model__mask="bidirectional", model__width=128)
    _, g = by_seed(rows(layers, part, "grad_frobenius"), "post")
    return measured(g, lambda g: np.sqrt(part["train.tokens"].iloc[0]) * mean_log(g).min() / mean_log(g)[-1])


def post_level(runs, layers):
    """Smallest over largest gradient of a block of Post-LN: the smaller of both masks, 32 blocks of width 128."""
    parts = [arm(runs, model__depth=32, model__mask=mask, model__width=128) for mask in ("causal", "bidirectional")]
    both = [by_seed(rows(layers, part, "grad_block"), "post")[1] for part in parts]
    if not all(values.size for values in both):
        return None
    n = min(map(len, both))
    both = [values[:n] for values in both]
    return jackknife(np.stack(both, 1), lambda g: min(mean_log(g[:, i]).min() / mean_log(g[:, i]).max() for i in range(2)))


def last_ffn(runs, layers, **settings) -> pd.DataFrame:
    """‖∂ℓ/∂W_2‖ of the last FFN of every model."""
    return last_block(rows(layers, arm(runs, **settings), "grad_matrix", site="down"))


def depth_slope(table, placement: str, most: int):
    """Slope in ln L over 8 ≤ L ≤ `most` of what `table(runs, layers)` holds for every model; it takes both ends and one between."""

    def measure(runs, layers):
        depths, values = by_depth(table(runs, layers), placement)
        if not {8, most} <= set(depths) or ((depths >= 8) & (depths <= most)).sum() < 3:
            return None
        return measured(values, lambda values: log_slope(depths, values, least=8, most=most))

    return measure


def square_ratio(runs, layers):
    """M06 of the last W_2 at 14 blocks over that at 6, Pre-LN with an FFN as wide as the stream."""
    depths, values = by_depth(last_ffn(runs, layers, model__ffn_ratio=1.0, model__depth=(6, 14)), "pre")
    return measured(values, lambda values: mean_log(values)[1] / mean_log(values)[0]) if list(depths) == [6, 14] else None


def total(runs, layers) -> pd.DataFrame:
    """M09 of the branch matrices of every model."""
    return totals(rows(layers, arm(runs), "grad_block"))


def amplified(runs, layers) -> pd.DataFrame:
    """M11 of the last state of every model."""
    return last_block(rows(layers, arm(runs), "amplification"))


def post_over_pre(runs, layers):
    """M11 at 100 blocks, Post-LN over Pre-LN."""
    pairs = [by_depth(amplified(runs, layers), name) for name in ("post", "pre")]
    if any(100 not in depths for depths, _ in pairs):
        return None
    n = min(len(values) for _, values in pairs)
    values = np.stack([values[:n, list(depths).index(100)] for depths, values in pairs], 1)
    return jackknife(values, lambda v: mean_log(v)[0] / mean_log(v)[1])


def cosine_end(placement: str):
    """Mean cosine between tokens after the last of 24 blocks."""

    def measure(runs, layers):
        part = arm(runs, model__init="lecun", model__depth=24)
        _, rho = by_seed(rows(layers, part, "token_cosine"), placement)
        return measured(rho, lambda rho: rho.mean(0)[-1])

    return measure


def post_rate(runs, layers):
    """(1 - ρ_{l+1})/(1 - ρ_l) of Post-LN, the one of blocks 8 to 14 that is farthest from 1/2 (interval: least and largest);
    bidirectional."""
    part = arm(runs, model__init="lecun", model__depth=24, model__mask="bidirectional")
    _, rho = by_seed(rows(layers, part, "token_cosine"), "post")

    if not rho.size:
        return None
    left = mean_log(1 - rho[:, 8:16])  # further up float32 has no digits left of it
    ratios = left[1:] / left[:-1]
    return Measured(float(ratios[np.abs(ratios - 0.5).argmax()]), float(ratios.min()), float(ratios.max()), len(rho))
