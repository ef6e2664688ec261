"""The words under a figure: what failed, what has no data, and every setting that a reader needs to judge it."""

from collections.abc import Iterable

import numpy as np
import pandas as pd

from normflax.figures.style import display_name, order
from normflax.records.stability import FAILED, Verdict

SETTINGS = {
    "optim.rate": "rate {}",
    "schedule.warmup_steps": "warm-up {} steps",
    "schedule.name": "{} schedule",
    "train.steps": "{} steps",
    "train.batch": "{} windows a batch",
    "train.tokens": "{} tokens a window",
    "model.embed_std": "embedding std {}",
    "model.position_std": "position std {}",
    "model.width": "width {}",
    "model.heads": "{} heads",
    "norm.kind": "{} norm",
    "norm.eps": "norm eps {}",
    "optim.name": "{}",
    "optim.beta2": "beta2 {}",
    "optim.eps": "eps {}",
    "optim.decay": "weight decay {}",
    "optim.clip": "clip {}",
    "data.name": "data {}",
}
"""What every caption names, and how it is said."""

_GROUPS = ("norm", "coef", "model", "data", "optim", "schedule", "train")
_APART = ("model.depth", "model.init", "model.init_std", "model.fused_qkv", "model.remat", "data.seed", "data.sha256")


def text(value: object) -> str:
    """A setting as one would type it: 0.001, 300, off."""
    if pd.isna(value):
        return "off"
    if isinstance(value, (bool, np.bool_)):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, (int, float, np.number)) else str(value)


def values(cells: Iterable) -> list:
    """The different values of a column in order, a null last."""
    column = pd.Series(list(cells), dtype=object)
    filled = set(column.dropna())
    return sorted(filled, key=lambda v: (isinstance(v, str), v)) + ([None] if column.isna().any() else [])


def say(runs: pd.DataFrame, column: str) -> str:
    """`rate 0.001 or 0.003`: a setting with every value that it takes in these runs."""
    if column not in runs:
        return f"{column} not recorded"
    return SETTINGS.get(column, f"{column} {{}}").format(" or ".join(text(v) for v in values(runs[column])))


def differing(runs: pd.DataFrame) -> list[str]:
    """The config keys in which these runs differ beside placement, depth and seed; the runs of one curve differ in none.

    Left out are what a placement may bring along (its base initialiser) and what changes speed only (remat, fused q, k, v).
    """
    keys = [*SETTINGS, *(c for c in runs if c not in SETTINGS and str(c).split(".")[0] in _GROUPS and "." in str(c))]
    return [key for key in keys if key in runs and key not in _APART and len(values(runs[key])) > 1]


def listing(words: Iterable[str]) -> str:
    """`a, b and c`."""
    words = list(words)
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def count_failures(runs: pd.DataFrame) -> str:
    """The runs of each placement that failed (diverged or stuck), counted by verdict; the slow and the unjudged apart."""
    verdicts = runs["verdict"].astype(object).fillna("without a verdict").astype(str)
    failed, apart = [], []
    for name in order(runs["placement"]):
        found = verdicts[runs["placement"] == name].value_counts().sort_index()
        bad = found[found.index.isin([str(verdict) for verdict in FAILED])]
        kinds = ", ".join(f"{n} {kind}" for kind, n in bad.items())
        failed.append(f"{display_name(name)} {bad.sum()} of {found.sum()}" + (f" ({kinds})" if kinds else ""))
        others = [f"{found[kind]} {kind}" for kind in (str(Verdict.SLOW), "without a verdict") if kind in found]
        apart += [f"{display_name(name)} {', '.join(others)}"] if others else []
    return f"Failed runs: {'; '.join(failed)}." + (f" Not counted as failed: {'; '.join(apart)}." if apart else "")


def no_finite_data(names: Iterable[str]) -> str:
    """A sentence that names the runs of which there is nothing to draw; empty where there are none."""
    names = sorted(set(names))
    return f"No finite data: {', '.join(names)}." if names else ""


def base_init(runs: pd.DataFrame) -> str:
    """`base init xavier_normal`, by placement where they differ: the config's choice, else the placement's own."""
    blank = pd.Series(None, index=runs.index, dtype=object)
    chosen = runs.get("model.init", blank).astype(object).where(lambda c: c.notna(), runs.get("base_init", blank))
    std = runs.get("model.init_std", blank)
    named = [f"normal({text(s)})" if c == "normal" else text(c) for c, s in zip(chosen, std, strict=True)]
    by_name = runs.assign(base=named).groupby("base")["placement"].unique()
    if len(by_name) == 1:
        return f"base init {by_name.index[0]}"
    return "base init " + listing(
        f"{base} ({', '.join(map(display_name, order(names)))})" for base, names in by_name.items()
    )


def seeds(runs: pd.DataFrame) -> str:
    """`seeds 0, 1, 2`, or their number and range where there are many."""
    found = values(runs["seed"])
    if len(found) > 5:
        return f"{len(found)} seeds from {found[0]} to {found[-1]}"
    return f"seed{'s' * (len(found) > 1)} {', '.join(map(text, found))}"


def caption_settings(runs: pd.DataFrame) -> str:
    """One sentence with every setting behind these runs; a setting with several values names them all."""
    momentum_only = "optim.name" in runs and set(runs["optim.name"]) == {"sgd"}
    hidden = {"data.name"} | ({"optim.beta2", "optim.eps"} if momentum_only else set())
    hashes = [str(h)[:8] for h in values(runs.get("data.sha256", []))]
    source = say(runs, "data.name") + f" (sha256 {' or '.join(hashes) or 'not recorded'})"
    parts = [base_init(runs), *(say(runs, column) for column in SETTINGS if column not in hidden), seeds(runs), source]
    return f"Settings: {', '.join(parts)}."
