"""From the rows of a `layers` table to what a figure draws: one field, gathered over seeds, nothing lost."""

import numpy as np
import pandas as pd

from normflax.figures.captions import differing, listing, say
from normflax.figures.style import display_name, order
from normflax.nearest import unknown
from normflax.probes.fields import FIELDS

BAD = {"zeros": "zero", "negative": "negative", "nan": "NaN", "infinite": "infinite"}
"""Columns that count the values a log axis can't show, and the words for them."""


def of_states(field: str) -> bool:
    """Whether a field belongs to the stream's states 0..S: it is drawn at the ends of blocks, from 0, the embedding."""
    return field in FIELDS and FIELDS[field].axis == "state"


def select(layers: pd.DataFrame, runs: pd.DataFrame, field: str) -> pd.DataFrame:
    """The rows of a field, one for each run, step and block, with the run's placement and depth beside them.

    Of a field of states, the state at the end of each block: sublayer 2·block.
    Raises ValueError for a field without rows, for runs of one depth that differ in more than placement and seed, and for
    a field with several rows a block.
    """
    if runs.empty:
        raise ValueError("there are no runs to draw: the table is empty")
    if layers.empty:
        raise ValueError("there is nothing to draw: the layers table is empty, no probe was recorded")
    if field not in set(layers["field"]):
        raise ValueError(unknown("field", field, sorted(set(layers["field"]))))
    for _, part in runs.groupby("model.depth"):
        if mixed := differing(part):
            found = listing(say(part, key) for key in mixed)
            raise ValueError(f"runs of one depth differ in {found}: select one setting, only seeds are averaged")
    rows = layers[(layers["field"] == field) & layers["run"].isin(runs["run"])]
    if of_states(field):
        rows = rows[rows["sublayer"] % 2 == 0]
        rows = rows.assign(block=rows["sublayer"] // 2)
    rows = rows[rows["block"].notna()].astype({"block": int})
    if rows.duplicated(["run", "step", "block"]).any():
        kinds = {key: sorted(set(rows[key].dropna())) for key in ("branch", "site")}
        found = listing(f"{key} {', '.join(kind)}" for key, kind in kinds.items() if len(kind) > 1)
        raise ValueError(f"'{field}' has several rows a block: select one of {found} in the layers table first")
    return rows.merge(runs[["run", "placement", "model.depth"]], on="run", validate="many_to_one")


def good(values: pd.Series) -> np.ndarray:
    """Which values a log axis can show: the finite positive ones."""
    v = values.to_numpy(float)
    return np.isfinite(v) & (v > 0)


def over_seeds(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """One row for each combination of `keys`: geometric mean, low and high of its good values, their number (`seeds`),
    and how many were zero, negative, NaN or infinite."""
    v, shown = rows["value"].to_numpy(float), good(rows["value"])
    value = np.where(shown, v, np.nan)
    bad = {"zeros": v == 0, "negative": np.isfinite(v) & (v < 0), "nan": np.isnan(v), "infinite": np.isinf(v)}
    flags = rows[keys].assign(log=np.log(value), value=value, seeds=shown, **bad)
    table = flags.groupby(keys, as_index=False).agg(
        mean=("log", "mean"),
        low=("value", "min"),
        high=("value", "max"),
        **{name: (name, "sum") for name in ("seeds", *BAD)},
    )
    return table.assign(mean=np.exp(table["mean"]))


def off_scale(table: pd.DataFrame) -> str:
    """A sentence that counts the values which no log axis shows, for each placement; empty where there are none."""
    sums = table.groupby("placement")[list(BAD)].sum()
    parts = []
    for name in order(table["placement"]):
        found = [f"{sums.at[name, column]} {word}" for column, word in BAD.items() if sums.at[name, column]]
        if found:
            parts.append(f"{display_name(name)} {', '.join(found)}")
    return f"Values off the log scale: {'; '.join(parts)}." if parts else ""


def without_data(rows: pd.DataFrame, runs: pd.DataFrame) -> set[str]:
    """The runs of which these rows hold no finite positive value."""
    return set(runs["run"]) - set(rows["run"][good(rows["value"])])
