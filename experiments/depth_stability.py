"""Which placements still train as the stack gets deeper, and what their gradients and stream look like.

Question: the same decoder on the same text with the same batches, initial weights of one family, no warm-up, no clipping, no
decay; only the placement and the depth differ. Up to which depth does each placement learn?

Expected: Post-LN trains while it is shallow and stays at the unigram level (it learns which bytes are frequent and nothing of
their order) from some depth on; Pre-LN, Sandwich-LN and DeepNorm train at every depth here. At initialisation the residual
variance grows about linearly in depth under Pre-LN and Sandwich-LN and is 1 under Post-LN and DeepNorm, and DeepNorm's gradient is
level over the blocks. Sources: Xiong et al. 2020 (arXiv:2002.04745), Wang et al. 2022 (arXiv:2203.00555), Liu et al. 2020
(arXiv:2004.08249).

The quick preset has one rate, so it can say that Post-LN is stuck at that rate after that many steps, and not that no rate trains
it; the claim about every rate is judged by the thorough preset.
"""

import sys
from pathlib import Path

import pandas as pd

from normflax.analysis.claims import Claim
from normflax.analysis.intervals import Measured, geometric, share
from normflax.records.stability import FAILED

PRESETS = {
    "quick": ("depth_stability",),
    "thorough": (
        "depth_stability/thorough",
        "depth_stability/deepnorm_parts",
        "depth_stability/small_embeddings",
        "depth_stability/clipped",
        "depth_stability/small_eps",
        "depth_stability/warmed_up",
        "depth_stability/four_times_longer",
    ),
    "full": ("depth_stability/full",),
}
"""The grids of each preset: options of the config group `experiment`."""

OTHERS = ("pre", "sandwich", "deepnorm")


# ── Claims ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def failed(runs: pd.DataFrame) -> pd.Series:
    """Diverged or stuck."""
    return runs["verdict"].isin([str(verdict) for verdict in FAILED])


def shallow(runs: pd.DataFrame, layers: pd.DataFrame) -> Measured | None:
    """Share of Post-LN's runs that fail at two blocks."""
    part = runs[(runs["placement"] == "post") & (runs["model.depth"] == 2)]
    return share(failed(part).to_numpy()) if len(part) else None


def deep_post(runs: pd.DataFrame, layers: pd.DataFrame) -> Measured | None:
    """Share of Post-LN's runs that fail at the deepest stack, one entry a run."""
    part = deepest(runs, ("post",))
    return share(failed(part).to_numpy()) if len(part) else None


def deep_post_every_rate(runs: pd.DataFrame, layers: pd.DataFrame) -> Measured | None:
    """Share of seeds at which deepest Post-LN fails at every rate; needs three rates."""
    part = deepest(runs, ("post",))
    if part["optim.rate"].nunique() < 3:
        return None
    return share(failed(part).groupby(part["seed"]).all().to_numpy())


def deep_others(runs: pd.DataFrame, layers: pd.DataFrame) -> Measured | None:
    """Share of the other placements' seeds that fail at the deepest stack at each one's best rate."""
    part = deepest(runs, OTHERS)
    if set(part["placement"]) != set(OTHERS):
        return None
    means = part.groupby(["placement", "optim.rate"])["loss_effective"].mean()
    best = {means.loc[[placement]].idxmin() for placement in OTHERS}
    chosen = part[[key in best for key in zip(part["placement"], part["optim.rate"], strict=True)]]
    return share(failed(chosen).to_numpy())


def sandwich_growth(runs: pd.DataFrame, layers: pd.DataFrame) -> Measured | None:
    """q_S / (q_0 + S) of Sandwich-LN before the first update at the deepest stack, with S sublayers."""
    found = at_start(runs, layers, "sandwich", "second_moment")
    if found is None:
        return None
    ends = found.groupby("run").apply(lambda run: run["value"].iloc[-1] / (run["value"].iloc[0] + run["sublayer"].iloc[-1]))
    return geometric(ends.to_numpy())


def deepnorm_level(runs: pd.DataFrame, layers: pd.DataFrame) -> Measured | None:
    """Gradient norm of DeepNorm's last block over its first, before the first update at the deepest stack."""
    found = at_start(runs, layers, "deepnorm", "grad_block")
    if found is None:
        return None
    return geometric(found.groupby("run")["value"].agg(lambda block: block.iloc[-1] / block.iloc[0]).to_numpy())


def collapse(runs: pd.DataFrame, layers: pd.DataFrame) -> Measured | None:
    """Gradient norm of block 1 under Post-LN over that under Pre-LN, by seed, at the logged step nearest to 50."""
    first = layers.loc[(layers["field"] == "grad_block") & (layers["block"] == 1), ["run", "step", "value"]]
    part = deepest(runs, ("post", "pre"))[["run", "placement", "seed", "optim.rate"]].merge(first, on="run")
    part = part[part["optim.rate"] == part["optim.rate"].min()]
    if set(part["placement"]) != {"post", "pre"}:
        return None
    step = min(set(part["step"]), key=lambda s: abs(s - 50))
    norms = part[part["step"] == step].pivot_table(index="seed", columns="placement", values="value")
    ratio = (norms["post"] / norms["pre"]).dropna()
    return geometric(ratio.to_numpy()) if len(ratio) else None


def deepest(runs: pd.DataFrame, placements: tuple[str, ...]) -> pd.DataFrame:
    """The judged runs of these placements at the greatest depth of the experiment."""
    runs = runs[runs["verdict"].notna()]
    return runs[runs["placement"].isin(placements) & (runs["model.depth"] == runs["model.depth"].max())]


def at_start(runs: pd.DataFrame, layers: pd.DataFrame, placement: str, field: str) -> pd.DataFrame | None:
    """A field of the deepest runs of one placement at step 0, by run and from the bottom up; one rate, since none has acted."""
    part = deepest(runs, (placement,))
    part = part[part["optim.rate"] == part["optim.rate"].min()]
    found = layers[(layers["field"] == field) & (layers["step"] == 0) & layers["run"].isin(part["run"])]
    return found.sort_values(["run", "block", "sublayer"]) if len(found) else None


CLAIMS = (
    Claim(
        "post_shallow_trains",
        "guard against a broken Post-LN",
        "Two blocks of Post-LN train",
        "share of runs that fail at 2 blocks",
        shallow,
        at_most=0.0,
    ),
    Claim(
        "post_deep_fails",
        "Xiong et al. 2020; Wang et al. 2022, section 3",
        "Deep Post-LN without warm-up does not leave the unigram level, at the rates and steps of this run",
        "share of runs that fail at the greatest depth",
        deep_post,
        at_least=1.0,
    ),
    Claim(
        "post_deep_fails_at_every_rate",
        "Xiong et al. 2020; Wang et al. 2022, section 3",
        "No rate trains deep Post-LN without warm-up",
        "share of seeds that fail at every one of at least three rates at the greatest depth",
        deep_post_every_rate,
        at_least=1.0,
    ),
    Claim(
        "others_deep_train",
        "Wang et al. 2022, table 1; Xiong et al. 2020",
        "Pre-LN, Sandwich-LN and DeepNorm train at the same depth",
        "share of runs that fail at the greatest depth, each placement at its best rate",
        deep_others,
        at_most=0.0,
    ),
    Claim(
        "sandwich_growth",
        "Kim et al. 2025 (Peri-LN), arXiv:2502.02732",
        "Sandwich-LN's stream gains 1 in second moment with every sublayer at initialisation",
        "q_S/(q_0 + S) at step 0, greatest depth",
        sandwich_growth,
        at_least=0.85,
        at_most=1.10,
    ),
    Claim(
        "deepnorm_level",
        "Wang et al. 2022, section 4",
        "DeepNorm's gradient is level over the blocks at initialisation",
        "gradient norm of the last block over the first at step 0, greatest depth",
        deepnorm_level,
        at_least=0.85,
        at_most=1.18,
    ),
    Claim(
        "post_gradient_collapse",
        "Wang et al. 2022, figure 4d",
        "Deep Post-LN's gradient at the bottom of the stack collapses in the first steps",
        "gradient norm of block 1, Post-LN over Pre-LN, at step 50, greatest depth, smallest rate",
        collapse,
        at_most=0.1,
    ),
)


# ── Figures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def figures(runs: pd.DataFrame, layers: pd.DataFrame) -> dict:
    """Every figure of the experiment by file name. Those by block show one setting, the middle one where there are several."""
    from normflax.figures.captions import differing
    from normflax.figures.depth import loss_against_depth
    from normflax.figures.layers import by_block, heat_maps

    split = differing(runs)
    settings = [part for _, part in runs.groupby(split, dropna=False)] if split else [runs]
    one = settings[len(settings) // 2]
    deep = int(one["model.depth"].max())
    return {
        "loss_against_depth": loss_against_depth(runs),
        "gradient_by_block": by_block(layers, one, "grad_block", 0),
        "variance_by_block": by_block(layers, one, "variance", 0),
        "gradient_map": heat_maps(layers, one, "grad_block", deep),
        "variance_map": heat_maps(layers, one, "variance", deep),
    }


def tables(runs: pd.DataFrame, layers: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Tables in place of the comparison of placements: none."""
    return {}


if __name__ == "__main__":
    from normflax.cli import draw

    sys.exit(draw("depth_stability", Path(sys.argv[1])))
