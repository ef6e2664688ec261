"""The words under a figure: what failed, what has no data, and every setting that a reader needs to judge it."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from normflax.figures.frames import column, only
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
_APART = ("model.depth", "model.init", "model.init_std", "model.fused_qkv", "model.remat", "data.seed")
_SHA = "data.sha256"  # known once a run has read its data: one that was killed before has none


def absent(value: Any) -> bool:
    """Whether a cell holds nothing: None, NA or NaN."""
    return value is None or value is pd.NA or value != value


def text(value: Any) -> str:
    """A setting as one would type it: 0.001, 300, off."""
    if absent(value):
        return "off"
    if isinstance(value, (bool, np.bool_)):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, (float, np.floating)) else str(value)


def values(cells: Iterable) -> list:
    """The different values of a column in order, None for its empty cells last."""
    cells = list(cells)
    filled = {cell for cell in cells if not absent(cell)}
    return sorted(filled, key=lambda cell: (isinstance(cell, str), cell)) + [None] * any(map(absent, cells))


def say(runs: pd.DataFrame, key: str) -> str:
    """`rate 0.001 or 0.003`: a setting with every value that it takes in these runs."""
    if key not in runs:
        return f"{key} not recorded"
    words = [text(value)[:8] if key == _SHA else text(value) for value in values(runs[key])]
    return SETTINGS.get(key, f"{key} {{}}").format(" or ".join(words))


def placed(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs whose placement and depth are known; one whose config can't be read has no place in a figure.

    Raises ValueError where there are none.
    """
    some = only(runs, runs.reindex(columns=["placement", "model.depth"]).notna().all(axis=1))
    if some.empty:
        raise ValueError("there are no runs to draw: the table holds none with a placement and a depth")
    return some


def differing(runs: pd.DataFrame) -> list[str]:
    """The config keys in which these runs differ, beside placement, depth and seed; the runs of one curve have none.

    Left out are what a placement may bring along (its base initialiser) and what changes speed only (remat, fused q,
    k, v).
    """
    runs = placed(runs)
    keys = [*SETTINGS, *(str(key) for key in runs if key not in SETTINGS)]
    keys = [key for key in keys if key in runs and key not in _APART and key.split(".")[0] in _GROUPS]
    found = {key: [value for value in values(runs[key]) if value is not None or key != _SHA] for key in keys}
    return [key for key, different in found.items() if len(different) > 1]


def listing(words: Iterable[str]) -> str:
    """`a, b and c`."""
    words = list(words)
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def count_failures(runs: pd.DataFrame) -> str:
    """The failed runs (diverged or stuck) of each placement by verdict; the slow and the unjudged apart from them."""
    unjudged = "without a verdict"
    failed, apart = [], []
    for name in order(runs["placement"]):
        verdicts = column(only(runs, runs["placement"] == name), "verdict").astype(object).fillna(unjudged)
        found = {str(verdict): (verdicts == verdict).sum() for verdict in sorted(set(verdicts))}
        bad = {verdict: n for verdict, n in found.items() if verdict in FAILED}
        kinds = ", ".join(f"{n} {verdict}" for verdict, n in bad.items())
        failed.append(f"{display_name(name)} {sum(bad.values())} of {len(verdicts)}" + (f" ({kinds})" if bad else ""))
        others = [f"{found[kind]} {kind}" for kind in (str(Verdict.SLOW), unjudged) if kind in found]
        apart += [f"{display_name(name)} {', '.join(others)}"] if others else []
    return f"Failed runs: {'; '.join(failed)}." + (f" Not counted as failed: {'; '.join(apart)}." if apart else "")


def about(drawn: pd.DataFrame, runs: pd.DataFrame, silent: Iterable[str]) -> list[str]:
    """The last sentences of a caption: which of the runs `drawn` failed or are `silent`, which of all `runs` have no
    place, and every setting."""
    lost = sorted(set(runs["run"]) - set(placed(runs)["run"]))
    sentences = [f"Not drawn, without a readable config: {', '.join(lost)}."] if lost else []
    names = sorted(set(silent))
    sentences += [f"No finite data: {', '.join(names)}."] if names else []
    return [count_failures(drawn), *sentences, caption_settings(drawn)]


def base_init(runs: pd.DataFrame) -> str:
    """`base init xavier_normal`, by placement where they differ: the config's choice, else the placement's own."""
    placements: dict[str, set[str]] = {}
    for run in runs.to_dict("records"):
        chosen = text(run.get("model.init"))
        base = text(run.get("base_init")) if chosen == "off" else chosen
        base = f"normal({text(run.get('model.init_std'))})" if base == "normal" else base
        placements.setdefault("not recorded" if base == "off" else base, set()).add(run["placement"])
    if len(placements) == 1:
        return f"base init {next(iter(placements))}"
    parts = (f"{base} ({', '.join(map(display_name, order(names)))})" for base, names in sorted(placements.items()))
    return f"base init {listing(parts)}"


def seeds(runs: pd.DataFrame) -> str:
    """`seeds 0, 1, 2`, or their number and range where there are many."""
    found = values(runs["seed"])
    if len(found) > 5:
        return f"{len(found)} seeds from {found[0]} to {found[-1]}"
    return f"seed{'s' * (len(found) > 1)} {', '.join(map(text, found))}"


def caption_settings(runs: pd.DataFrame) -> str:
    """One sentence with every setting behind these runs; a setting with several values names them all."""
    sgd = "optim.name" in runs and set(runs["optim.name"]) == {"sgd"}
    hidden = {"data.name", *(("optim.beta2", "optim.eps") if sgd else ())}
    hashes = [value[:8] for value in values(runs[_SHA]) if value is not None] if _SHA in runs else []
    source = f"{say(runs, 'data.name')} (sha256 {' or '.join(hashes) or 'not recorded'})"
    parts = [base_init(runs), *(say(runs, key) for key in SETTINGS if key not in hidden), seeds(runs), source]
    return f"Settings: {', '.join(parts)}."
