"""Which placements need a warm-up, and at which rates.

Question: the same decoder of six blocks on the same text with the same batches; only the placement, the peak rate and the length of
the linear warm-up differ, and the number of steps does not. What does a warm-up win at each rate, and where does no warm-up help?

Expected: Post-LN needs a warm-up above some rate and fails without; Pre-LN does not. Xiong et al. 2020 (arXiv:2002.04745, figure
2: Post-LN 8.45 BLEU without a warm-up at rate 1e-3 against about 34 with 4000 steps of it; Pre-LN loses nothing). The map with its
failure boundary follows Kalra and Barkeshli 2024 (arXiv:2406.09405, figure 4), several warm-ups at several rates Wortsman et al.
2023 (arXiv:2309.14322, figure 5).

A longer warm-up also has less learning behind it: the arm `equal_area` of the thorough preset gives the runs with a warm-up as many
steps more as make the sum of their rates that of the run without one. Adam's beta2 and clipping act like a warm-up; they are fixed
here (beta2 0.98, no clipping), and arms vary them.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from normflax.analysis import sensitivity
from normflax.analysis.claims import Claim
from normflax.analysis.intervals import Measured

PRESETS = {
    "quick": ("warmup_sensitivity",),
    "thorough": (
        "warmup_sensitivity/thorough",
        "warmup_sensitivity/equal_area",
        "warmup_sensitivity/slow_beta2",
        "warmup_sensitivity/clipped",
    ),
    "full": ("warmup_sensitivity/full",),
}
"""The grids of each preset: options of the config group `experiment`."""

FLOOR = 0.005
"""Nats per token below which a benefit is taken for nothing when it is divided by."""


# ── Claims ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def telling_rate(runs: pd.DataFrame) -> float | None:
    """The rate at which a warm-up wins Post-LN most; None where no rate shows a benefit."""
    grid = sensitivity.cells(runs)
    rates = sensitivity.by_rate(grid, sensitivity.level(runs))
    post = rates[(rates["placement"] == "post") & rates["WB"].notna()] if len(rates) else rates
    if not len(post):
        return None
    return float(post["rate"].to_numpy()[post["WB"].to_numpy().argmax()])


def gap(runs: pd.DataFrame, placement: str) -> Measured | None:
    """WB/(u - l_best) of a placement at Post-LN's most telling rate: mean over seeds, and their range."""
    rate = telling_rate(runs)
    won = sensitivity.benefit_by_seed(runs, placement, rate) if rate is not None else pd.Series(dtype=float)
    if won.empty:
        return None
    share = won.to_numpy() / (sensitivity.level(runs) - sensitivity.cells(runs)["loss"].min())
    return Measured(float(share.mean()), float(share.min()), float(share.max()), len(share))


def gap_post(runs: pd.DataFrame, layers: pd.DataFrame) -> Measured | None:
    """Post-LN's share of the gap that a warm-up closes."""
    return gap(runs, "post")


def gap_pre(runs: pd.DataFrame, layers: pd.DataFrame) -> Measured | None:
    """Pre-LN's, at the same rate."""
    return gap(runs, "pre")


def ratio(runs: pd.DataFrame, layers: pd.DataFrame) -> Measured | None:
    """Post-LN's benefit over Pre-LN's at that rate, by seed."""
    rate = telling_rate(runs)
    if rate is None:
        return None
    post, pre = (sensitivity.benefit_by_seed(runs, name, rate) for name in ("post", "pre"))
    both = pd.DataFrame({"post": post, "pre": pre}).dropna()
    if both.empty:
        return None
    value = both["post"].mean() / max(both["pre"].mean(), FLOOR)
    by_seed = both["post"].to_numpy() / np.maximum(both["pre"].to_numpy(), FLOOR)
    return Measured(float(value), float(by_seed.min()), float(by_seed.max()), len(both))


CLAIMS = (
    Claim(
        "gap_post",
        "Xiong et al. 2020, figure 2",
        "Post-LN needs a warm-up above some rate",
        "WB(Post-LN)/(u - l_best) at the rate where it is largest",
        gap_post,
        at_least=0.3,
    ),
    Claim(
        "gap_pre",
        "Xiong et al. 2020, figure 2",
        "Pre-LN does not need it at the same rate",
        "WB(Pre-LN)/(u - l_best) at that rate",
        gap_pre,
        at_most=0.1,
    ),
    Claim(
        "wb_ratio",
        "Xiong et al. 2020, figure 2",
        "A warm-up wins Post-LN several times what it wins Pre-LN",
        "WB(Post-LN)/max(WB(Pre-LN), 0.005) at that rate",
        ratio,
        at_least=3.0,
    ),
)


# ── Figures and tables ──────────────────────────────────────────────────────────────────────────────────────────────


def figures(runs: pd.DataFrame, layers: pd.DataFrame) -> dict:
    """Every figure of the experiment by file name."""
    from normflax.figures.maps import loss_against_warmup, warmup_maps

    return {"warmup_map": warmup_maps(runs), "loss_against_warmup": loss_against_warmup(runs)}


def tables(runs: pd.DataFrame, layers: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The numbers behind the maps by file name."""
    grid = sensitivity.cells(runs)
    unigram = sensitivity.level(runs)
    return {
        "warmup_sensitivity": sensitivity.scalars(grid, unigram),
        "benefit_by_rate": sensitivity.by_rate(grid, unigram),
        "largest_rates": sensitivity.largest_rates(grid),
    }


if __name__ == "__main__":
    from normflax.cli import draw

    sys.exit(draw("warmup_sensitivity", Path(sys.argv[1])))
