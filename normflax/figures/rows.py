"""From the rows of a `layers` table to what a figure draws: one field, gathered over seeds, nothing lost."""

import numpy as np
import pandas as pd

from normflax.figures.captions import differing, listing, say
from normflax.figures.frames import column, floats, numbers, only
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
    Raises ValueError for a field without rows, for runs of one depth that differ in more than placement and seed, and
    for a field with several rows a block.
    """
    if runs["run"].duplicated().any():
        twice = ", ".join(sorted(set(column(only(runs, runs["run"].duplicated()), "run"))))
        raise ValueError(f"the runs table holds {twice} more than once: read one folder of runs")
    if layers.empty:
        raise ValueError("there is nothing to draw: the layers table is empty, no probe was recorded")
    if field not in set(layers["field"]):
        raise ValueError(unknown("field", field, sorted(set(layers["field"]))))
    for depth in numbers(runs, "model.depth"):
        part = only(runs, runs["model.depth"] == depth)
        if mixed := differing(part):
            found = listing(say(part, key) for key in mixed)
            raise ValueError(f"runs of {depth} blocks differ in {found}: select one setting, only seeds are averaged")
    rows = only(layers, (layers["field"] == field) & layers["run"].isin(column(runs, "run")))
    if of_states(field):
        rows = only(rows, rows["sublayer"] % 2 == 0)
        rows = rows.assign(block=column(rows, "sublayer") // 2)
    rows = only(rows, rows["block"].notna())
    if rows.empty:
        raise ValueError(f"'{field}' has no row with a block in any of these runs")
    rows = rows.assign(block=column(rows, "block").astype(int))
    if rows[["run", "step", "block"]].duplicated().any():
        kinds = {key: sorted(set(column(rows, key).dropna())) for key in ("branch", "site")}
        found = listing(f"{key} {', '.join(kind)}" for key, kind in kinds.items() if len(kind) > 1)
        raise ValueError(f"'{field}' has several rows a block: select one of {found} in the layers table first")
    return rows.merge(runs[["run", "placement", "model.depth"]], on="run", validate="many_to_one")


def chosen(rows: pd.DataFrame) -> str:
    """` (ffn, down)`: the branch and the site of the rows of one field, where they are one part of what it covers."""
    field = FIELDS.get(rows["field"].iloc[0])
    if field is None or field.axis in ("state", "block"):
        return ""
    parts = [set(column(rows, key).dropna()) for key in ("branch", "site")]
    named = [word for part in parts if len(part) == 1 for word in part]
    return f" ({', '.join(named)})" if named else ""


def good(rows: pd.DataFrame) -> np.ndarray:
    """Which values a log axis can show: the finite positive ones."""
    value = floats(rows, "value")
    return np.isfinite(value) & (value > 0)


def over_seeds(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """One row for each combination of `keys`: `mean` (geometric), `low` and `high` of the good values, their number
    (`seeds`), and how many were zero, negative, NaN or infinite."""
    v, shown = floats(rows, "value"), good(rows)
    value = np.where(shown, v, np.nan)
    bad = {"zeros": v == 0, "negative": np.isfinite(v) & (v < 0), "nan": np.isnan(v), "infinite": np.isinf(v)}
    table = pd.DataFrame(rows[keys]).assign(mean=np.log(value), low=value, high=value, seeds=shown, **bad)
    sums = dict.fromkeys(("seeds", *BAD), "sum")
    table = table.groupby(keys, as_index=False).agg({"mean": "mean", "low": "min", "high": "max", **sums})
    return table.assign(mean=np.exp(table["mean"]))


def off_scale(table: pd.DataFrame) -> list[str]:
    """A sentence that counts the values which no log axis shows, for each placement, where there are any."""
    parts = []
    for name in order(table["placement"]):
        sums = {word: int(floats(only(table, table["placement"] == name), key).sum()) for key, word in BAD.items()}
        found = [f"{n} {word}" for word, n in sums.items() if n]
        parts += [f"{display_name(name)} {', '.join(found)}"] if found else []
    return [f"Values off the log scale: {'; '.join(parts)}."] if parts else []


def without_data(rows: pd.DataFrame, runs: pd.DataFrame) -> set[str]:
    """The runs of which these rows hold no finite positive value."""
    return set(runs["run"]) - set(only(rows, good(rows))["run"])
