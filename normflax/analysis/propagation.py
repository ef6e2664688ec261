"""What models at initialisation showed, as arrays over seeds; and the laws over blocks and depths that are fitted to it."""

from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

Seeds = Float[np.ndarray, "seeds points"]

PLAIN = {
    "train.steps": 0,
    "model.mask": "causal",
    "model.init": "xavier_normal",
    "model.ffn_ratio": 4.0,
    "coef.qk_gain": None,
    "data.name": "copy",
}
"""The settings of the plain arm of the experiment; a figure or a claim says in which it differs."""


def arm(runs: pd.DataFrame, **settings: Any) -> pd.DataFrame:
    """The finished runs with the settings of PLAIN but for these, by dotted key with `__` for the dot; None is an empty cell.

    Of the width, where it is not given, those of the commonest.
    """
    wanted = PLAIN | {key.replace("__", "."): value for key, value in settings.items()}
    found = runs[runs["state"] == "finished"]
    for key, value in wanted.items():
        cells = found[key]
        found = found[cells.isna()] if value is None else found[cells.isin(value) if isinstance(value, tuple) else cells == value]
    if "model.width" not in wanted and len(found):
        found = found[found["model.width"] == found["model.width"].mode().max()]
    return pd.DataFrame(found)


def rows(layers: pd.DataFrame, runs: pd.DataFrame, field: str, site: str | None = None) -> pd.DataFrame:
    """The rows of one field of these runs, in order, with placement and depth beside them.

    Of states, those at the ends of blocks; `block` is then 0 (the embedding) to L. Raises ValueError where two of the runs are
    the same model to these columns: a seed would count twice.
    """
    found = layers[(layers["field"] == field) & layers["run"].isin(runs["run"])]
    if site is not None:
        found = found[found["site"] == site]
    if found["sublayer"].notna().any() and site is None:
        found = found[found["sublayer"] % 2 == 0]
        found = found.assign(block=found["sublayer"] // 2)
    columns = ["run", "placement", "model.depth", "model.width", "model.mask"]
    found = found.merge(runs[columns], on="run").sort_values(["model.depth", "seed", "block", "sublayer"], ignore_index=True)
    once(found, [*columns[1:], "seed", "step", "block", "sublayer", "branch", "site"])
    return found


def once(found: pd.DataFrame, keys: list[str]) -> None:
    """Raises ValueError where two rows are the same to `keys`."""
    twice = found[found.duplicated(keys, keep=False)]
    if len(twice):
        one, *others = dict.fromkeys(twice.sort_values(keys)["run"].head(2))
        raise ValueError(f"{one} and {others[0] if others else one} would count as one model: select one")


def by_seed(found: pd.DataFrame, placement: str, depth: int | None = None, column: str = "value") -> tuple[np.ndarray, Seeds]:
    """The blocks and, as [seeds, blocks], the values of one placement at one depth (the only one where it is not given)."""
    part = found[found["placement"] == placement]
    part = part if depth is None else part[part["model.depth"] == depth]
    return _pivot(part, "block", column)


def by_depth(found: pd.DataFrame, placement: str, column: str = "value") -> tuple[np.ndarray, Seeds]:
    """The depths and, as [seeds, depths], the values of a table with one row a seed and depth."""
    return _pivot(found[found["placement"] == placement], "model.depth", column)


def _pivot(found: pd.DataFrame, over: str, column: str) -> tuple[np.ndarray, Seeds]:
    """Of the seeds that have a row everywhere; a value that is NaN is one."""
    there = found.assign(there=True).pivot(index="seed", columns=over, values="there").notna().all(axis=1)
    table = found.pivot(index="seed", columns=over, values=column)[there]
    return table.columns.to_numpy(int), table.to_numpy(float)


def last_block(found: pd.DataFrame) -> pd.DataFrame:
    """The rows of every run's last block."""
    return found[found["block"] == found["model.depth"]]


def totals(found: pd.DataFrame) -> pd.DataFrame:
    """√Σ over blocks of the squares of `value` and `theory`, one row a run and seed (M09 from M06b); NaN where a block's is."""
    keys = ["run", "placement", "model.depth", "model.width", "model.mask", "seed"]
    squared = found.assign(value=found["value"].astype(float) ** 2, theory=found["theory"].astype(float) ** 2)
    return squared.groupby(keys)[["value", "theory"]].sum(skipna=False).pow(0.5).reset_index()


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """The slope of the least-squares line through the points."""
    x = x - x.mean()
    return float(x @ (y - y.mean()) / (x @ x))


def log_slope(x: np.ndarray, values: Seeds, least: int | float = 1, most: int | float = np.inf) -> float:
    """Slope of the mean over seeds of ln(values) in ln x, over least ≤ x ≤ most (M07 over blocks, M08 over depths)."""
    kept = (x >= least) & (x <= most)
    return slope(np.log(x[kept]), np.log(values[:, kept]).mean(0))


def first_fitted(depth: int) -> float:
    """The first block of a fit over the blocks of a stack (M07): the bottom has not settled."""
    return max(4.0, depth / 16)
