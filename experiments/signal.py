"""What the stream and its gradients look like before the first update as depth grows, and whether theory says the same.

Question: of models that have made no update, how large is the stream after every block, how alike are its tokens, how large is the
gradient of every block, and how far does a small change of the weights move the output? Nothing is trained, so the answers depend
on the model, its initialisation and the probes alone: a wrong residual scale, a missing final norm, a per-token or per-batch slip
each breaks one of the numbers. Theory (normflax/theory) gives a curve for every placement, from its entry in the table.

Expected: under Pre-LN the stream grows about linearly and a block's gradient falls as one over its square root; Post-LN's last
gradient does not depend on depth and its first does not vanish; DeepNorm is level in everything; weight noise adds up with depth
under Post-LN, as the logarithm under Pre-LN, and not at all under DeepNorm. Sources: Xiong et al. 2020 (arXiv:2002.04745), Wang
et al. 2022 (arXiv:2203.00555), Liu et al. 2020 (arXiv:2004.08249), Kedia et al. 2024 (arXiv:2403.09635), Noci et al. 2022
(arXiv:2206.03126). The page docs/signal.md reads the figures.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from normflax.analysis import initial
from normflax.analysis.claims import Claim
from normflax.analysis.initial import DEPTH, amplified, depth_slope, last_ffn, total
from normflax.analysis.propagation import arm, by_depth, log_slope, rows

PRESETS = {"quick": ("signal",), "thorough": ("signal/thorough",), "full": ("signal/full",)}
"""The grids of each preset: options of the config group `experiment`."""

# ── Claims ──────────────────────────────────────────────────────────────────────────────────────────────────────────


PERI = "Kim et al. 2025 (Peri-LN), arXiv:2502.02732"
XIONG, DEEPNET, ADMIN = "Xiong et al. 2020", "Wang et al. 2022 (DeepNet)", "Liu et al. 2020 (Admin)"
FIGURE_3 = f"{XIONG}, figure 3c, d"
KEDIA, NOCI = "Kedia et al. 2024 (DeepScaleLM)", "Noci et al. 2022"
M07 = "slope of ln‖g_l‖ in ln l over the blocks l ≥ max(4, L/16), 64 blocks"
M08 = "slope of ln‖∂ℓ/∂W_2‖ of the last FFN in ln L, 8 to 256 blocks"
M09 = "slope of the ln of the branch matrices' gradient norm in ln L, 8 to 128 blocks"
M11 = "slope of ln M11 of the last state in ln L, 8 to 128 blocks"
END = "mean cosine between tokens after 24 blocks"


def claim(name: str, source: str, sentence: str, statistic: str, measure, at_least=None, at_most=None) -> Claim:
    """A claim of this experiment; where `statistic` is empty, the measure's own words."""
    words = statistic or " ".join(measure.__doc__.split()).rstrip(".")
    return Claim(f"signal_{name}", source, sentence, words, measure, at_least, at_most)


def over_blocks_in(mask: str, tail: str = "") -> tuple[Claim, ...]:
    """The slopes over the blocks of one stack under a mask."""
    slope = {name: initial.layer_slope(name, mask) for name in ("pre", "sandwich", "deepnorm")}
    return (
        claim(f"pre_blocks{tail}", KEDIA, f"Pre-LN's gradient falls as 1/√l ({mask})", M07, slope["pre"], -0.70, -0.35),
        claim(f"sandwich_blocks{tail}", KEDIA, f"Sandwich-LN's falls as 1/√l ({mask})", M07, slope["sandwich"], -0.65, -0.33),
        claim(f"deepnorm_blocks{tail}", DEEPNET, f"DeepNorm's is level ({mask})", M07, slope["deepnorm"], -0.08, 0.08),
    )


LAST = {name: depth_slope(last_ffn, name, 256) for name in ("post", "pre", "sandwich", "deepnorm")}
TOTAL = {name: depth_slope(total, name, 128) for name in LAST}
NOISE = {name: depth_slope(amplified, name, 128) for name in LAST}
ALIKE = {name: initial.cosine_end(name) for name in LAST}

CLAIMS = (
    # The stream
    claim("pre_theory", XIONG, "Theory gives Pre-LN's second moments", "", initial.pre_theory_error, None, 0.25),
    claim("pre_growth", XIONG, "Pre-LN's stream grows linearly", "", initial.pre_slope, 0.9, 1.35),
    claim("sandwich_growth", PERI, "Sandwich-LN's stream gains 1 with every sublayer", "", initial.sandwich_end, 0.85, 1.10),
    claim("deepnorm_input", DEEPNET, "DeepNorm's norms read tokens of length alpha", "", initial.deepnorm_input, None, 0.05),
    # Gradients over blocks
    *over_blocks_in("causal"),
    *over_blocks_in("bidirectional", "_bidirectional"),
    claim("deepnorm_ends", DEEPNET, "DeepNorm's last block has its first one's gradient", "", initial.deepnorm_ends, 0.85, 1.18),
    claim("post_floor", "theory", "Post-LN's activation gradient falls to 1/√T of its top", "", initial.post_floor, 0.5, 3.0),
    claim("post_level", ADMIN, "Post-LN's gradients do not vanish at the bottom", "", initial.post_level, 0.1),
    # The last FFN over depth
    claim("post_last", FIGURE_3, "Post-LN's last gradient does not depend on depth", M08, LAST["post"], -0.25, 0.25),
    claim("pre_last", FIGURE_3, "Pre-LN's last gradient falls as 1/√L", M08, LAST["pre"], -0.70, -0.35),
    claim("sandwich_last", "theory", "Sandwich-LN's last gradient falls as 1/√L", M08, LAST["sandwich"], -0.65, -0.35),
    claim("deepnorm_last", "theory", "DeepNorm's last gradient falls as 1/√L", M08, LAST["deepnorm"], -0.60, -0.40),
    claim("pre_last_ratio", FIGURE_3, "Pre-LN's falls by 0.62 from 6 to 14 blocks", "", initial.square_ratio, 0.50, 0.75),
    # The whole gradient over depth
    claim("post_total", DEEPNET, "Post-LN's whole gradient grows as √L", M09, TOTAL["post"], 0.40, 0.78),
    claim("pre_total", "theory", "Pre-LN's whole gradient grows as √ln L", M09, TOTAL["pre"], 0.0, 0.22),
    claim("sandwich_total", "theory", "Sandwich-LN's whole gradient grows as √ln L", M09, TOTAL["sandwich"], 0.0, 0.22),
    claim("deepnorm_total", DEEPNET, "DeepNorm's whole gradient does not grow", M09, TOTAL["deepnorm"], -0.08, 0.08),
    # Weight noise
    claim("post_noise", ADMIN, "Post-LN adds up weight noise, O(L)", M11, NOISE["post"], 0.75),
    claim("pre_noise", ADMIN, "Pre-LN adds up weight noise as O(ln L)", M11, NOISE["pre"], None, 0.60),
    claim("sandwich_noise", ADMIN, "Sandwich-LN adds up weight noise as O(ln L)", M11, NOISE["sandwich"], None, 0.55),
    claim("deepnorm_noise", DEEPNET, "DeepNorm does not add up weight noise", M11, NOISE["deepnorm"], -0.15, 0.15),
    claim("post_over_pre", ADMIN, "Deep Post-LN moves several times as far as Pre-LN", "", initial.post_over_pre, 5.0),
    # Tokens
    claim("post_alike", NOCI, "Post-LN makes all tokens alike", END, ALIKE["post"], 0.98),
    claim("pre_alike", NOCI, "Pre-LN makes tokens alike slowly", END, ALIKE["pre"], 0.65, 0.92),
    claim("sandwich_alike", NOCI, "Sandwich-LN makes tokens alike slowly", END, ALIKE["sandwich"], 0.65, 0.92),
    claim("deepnorm_alike", "theory", "DeepNorm hardly mixes tokens", END, ALIKE["deepnorm"], None, 0.05),
    claim("post_rate", "theory", "Under Post-LN 1 - ρ halves with every block", "", initial.post_rate, 0.42, 0.60),
)


# ── Figures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def figures(runs: pd.DataFrame, layers: pd.DataFrame) -> dict:
    """Every figure of the experiment by file name, of those whose models were read."""
    drawn = {**growth(runs, layers), **gradients(runs, layers), **over_depths(runs, layers), **tokens(runs, layers)}
    trained = runs[(runs["train.steps"] > 0) & runs["run"].isin(layers.loc[layers["field"] == "mean_abs", "run"])]
    if len(trained):
        from normflax.figures.coordinates import coordinates

        drawn["coordinate_check"] = coordinates(layers, trained)
    if not drawn:
        raise ValueError("none of these runs is at initialisation in a setting that the figures show")
    return drawn


def growth(runs: pd.DataFrame, layers: pd.DataFrame) -> dict:
    """The stream over blocks, at every depth and width."""
    from normflax.figures.propagation import over_blocks

    found = arm(runs, model__init="lecun", model__width=tuple(sorted(set(runs["model.width"]))))
    q = rows(layers, found, "second_moment")
    if q.empty:
        return {}
    panels = {f"{size[0]} blocks of width {size[1]}": part for size, part in q.groupby(["model.depth", "model.width"])}
    return {"growth": over_blocks(panels, seen(runs, panels), "second moment of the stream", log_x=True, rms=False)}


def gradients(runs: pd.DataFrame, layers: pd.DataFrame) -> dict:
    """Gradients over the blocks of one stack, in every arm that was read."""
    from normflax.figures.propagation import over_blocks

    arms = {
        "causal, softmax": arm(runs, model__depth=DEPTH),
        "bidirectional, softmax": arm(runs, model__depth=DEPTH, model__mask="bidirectional"),
        "causal, W_Q = W_K = 0": arm(runs, model__depth=DEPTH, coef__qk_gain=0),
        "causal, real text": arm(runs, model__depth=DEPTH, data__name="stdlib"),
    }
    labels = {
        "gradient_by_block": ("grad_block", "gradient of a block's matrices"),
        "activation_gradient": ("grad_rms", "activation gradient (rms x valid targets)"),
    }
    drawn, note = {}, "Theory leaves q and k out."
    for name, (field, label) in labels.items():
        panels = {title: found for title, part in arms.items() if len(found := rows(layers, part, field))}
        if panels:
            drawn[name] = over_blocks(panels, seen(runs, panels), label, log_x=True, rms=True, note=note)
    expected = arm(runs, model__depth=6)
    means = {"one batch": "grad_matrix", "mean over 32 batches": "grad_expected"}
    panels = {f"{title}, 6 blocks": rows(layers, expected, field, site="down") for title, field in means.items()}
    if len(rows(layers, expected, "grad_expected", site="down")):
        drawn["expected_gradient"] = over_blocks(panels, expected, "gradient of W_2", log_x=False, rms=True)
    return drawn


LADDERS = {
    "last_ffn_gradient": (last_ffn, "gradient of the last W_2", 256),
    "total_gradient": (total, "gradient of all branch matrices", 128),
    "amplification": (amplified, "squared move of the last state", 128),
}
"""What is drawn against depth: the table, its label, and the last depth of the fit."""


def over_depths(runs: pd.DataFrame, layers: pd.DataFrame) -> dict:
    """What a whole model shows, over depth; and weight noise over the blocks of the deepest stack below 128 blocks."""
    from normflax.figures.propagation import over_blocks, over_depth

    drawn, plain, noise = {}, arm(runs), "Every entry of every branch matrix moves by 1e-4 up or down."
    for name, (table, label, most) in LADDERS.items():
        found = table(runs, layers)
        found = found[found.groupby("placement")["model.depth"].transform("nunique") > 2]  # no ladder of one rung
        if len(found):
            note = f"Fit: 8 to {most} blocks. {noise if name == 'amplification' else ''}".strip()
            panels, fits = {"causal": found}, {"causal": slopes(found, most)}
            drawn[name] = over_depth(panels, seen(runs, panels), label, fits, rms=table is not amplified, note=note)
    moved = rows(layers, plain, "amplification")
    moved = moved[moved["model.depth"] < 128]
    if len(moved):
        depth = moved["model.depth"].max()
        panels, label = {f"causal, {depth} blocks": moved[moved["model.depth"] == depth]}, "squared move of the state"
        drawn["amplification_by_block"] = over_blocks(panels, seen(runs, panels), label, log_x=True, rms=False, note=noise)
    return drawn


def tokens(runs: pd.DataFrame, layers: pd.DataFrame) -> dict:
    """How far apart the tokens of a sequence are, over blocks."""
    from normflax.figures.propagation import over_blocks

    arms = {mask: arm(runs, model__init="lecun", model__depth=24, model__mask=mask) for mask in ("causal", "bidirectional")}
    panels = {mask: rows(layers, part, "token_cosine") for mask, part in arms.items()}
    panels = {mask: part.assign(value=1 - part["value"], theory=1 - part["theory"]) for mask, part in panels.items() if len(part)}
    if not panels:
        return {}
    return {"tokens_apart": over_blocks(panels, seen(runs, panels), "1 - mean cosine between tokens", log_x=False, rms=False)}


def seen(runs: pd.DataFrame, panels: dict) -> pd.DataFrame:
    """The runs that these panels show."""
    return runs[runs["run"].isin(pd.concat(panels.values())["run"])]


def slopes(table: pd.DataFrame, most: float) -> dict[str, tuple[float, float]]:
    """The slope of every placement in ln L over 8 ≤ L ≤ `most`, and its standard error over seeds: NaN of one."""
    fitted = {}
    for placement in sorted(set(table["placement"])):
        depths, values = by_depth(table, placement)
        if ((depths >= 8) & (depths <= most)).sum() > 2:
            each = [log_slope(depths, values[i : i + 1], least=8, most=most) for i in range(len(values))]
            error = float(np.std(each, ddof=1) / np.sqrt(len(each))) if len(each) > 1 else float("nan")
            fitted[placement] = (float(np.mean(each)), error)
    return fitted


def tables(runs: pd.DataFrame, layers: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The slopes over depth by placement, with their standard errors."""
    from normflax.figures.propagation import fitted as said

    fitted = {label: slopes(table(runs, layers), most) for table, label, most in LADDERS.values()}
    found = sorted({placement for slopes in fitted.values() for placement in slopes})
    cells = [{label: said(*fitted[label][p]) if p in fitted[label] else "" for label in fitted} for p in found]
    return {"slopes_over_depth": pd.DataFrame(cells, columns=list(fitted)).assign(placement=found)[["placement", *fitted]]}


if __name__ == "__main__":
    from normflax.cli import draw

    sys.exit(draw("signal", Path(sys.argv[1])))
