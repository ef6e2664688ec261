"""Tables of models at initialisation as `normflax.load_table` returns them, made by hand: runs, and layers that follow a law."""

from collections.abc import Callable
from itertools import count

import numpy as np
import pandas as pd

SETTINGS = {
    "state": "finished",
    "seed": 0,
    "placement": "pre",
    "norm.kind": "layer",
    "norm.eps": 1e-8,
    "coef.qk_gain": None,
    "model.depth": 8,
    "model.width": 64,
    "model.heads": 4,
    "model.mask": "causal",
    "model.ffn": "relu",
    "model.ffn_ratio": 4.0,
    "model.init": "xavier_normal",
    "model.init_std": 0.02,
    "model.embed_std": 1.0,
    "model.position_std": 0.02,
    "base_init": "xavier_normal",
    "data.name": "copy",
    "optim.name": "adam",
    "optim.rate": 1e-3,
    "train.steps": 0,
    "train.batch": 4,
    "train.tokens": 32,
    "probe.seeds": 8,
}
COLUMNS = ["run", "step", "seed", "block", "sublayer", "branch", "site", "field", "value", "theory"]
KINDS = {"step": "int32", "seed": "Int32", "block": "Int32", "sublayer": "Int32", "value": "float32", "theory": "float32"}
NUMBER = count()

Law = Callable[[float, int], float]
"""The value at a block (a half behind attention) of the model of one seed."""


def models(*settings: dict) -> pd.DataFrame:
    """A runs table: SETTINGS with those of each model over them."""
    rows = [SETTINGS | chosen for chosen in settings]
    named = [row | {"run": f"{row['placement']}-{row['model.depth']}-{next(NUMBER)}"} for row in rows]
    return pd.DataFrame(named, columns=["run", *SETTINGS]).astype({"coef.qk_gain": "float64"})


def ladder(placements: tuple[str, ...], depths: tuple[int, ...], **settings) -> pd.DataFrame:
    """Models of every placement at every depth."""
    return models(*({"placement": p, "model.depth": depth} | settings for p in placements for depth in depths))


def field(runs: pd.DataFrame, name: str, value: Law, theory: Law | None = None, seeds=(0, 1), site=None, step=0) -> pd.DataFrame:
    """The layer rows of one field of every model, `value` and `theory` of the block and seed.

    Gradients of matrices have a row a block, amplification one behind every sublayer, states one for the embedding too.
    """
    rows = []
    for run, depth in zip(runs["run"], runs["model.depth"], strict=True):
        halves = (
            [] if name in ("grad_block", "grad_matrix", "grad_expected", "mean_abs", "mean_abs_change") else range(2 * depth + 1)
        )
        places = [(sub / 2, (sub + 1) // 2, sub) for sub in halves] or [(float(b), b, None) for b in range(1, depth + 1)]
        if name in ("amplification", "norm_input"):
            places = places[1:]
        for seed in seeds:
            for at, block, sublayer in places:
                expected = theory(at, seed) if theory else np.nan
                rows.append((run, step, seed, block, sublayer, None, site, name, value(at, seed), expected))
    return table(pd.DataFrame(rows, columns=COLUMNS))


def table(*parts: pd.DataFrame) -> pd.DataFrame:
    """One layers table of these parts; of none an empty one."""
    return pd.concat(parts or [pd.DataFrame(columns=COLUMNS)], ignore_index=True).astype(KINDS)


def scale(seed: int) -> float:
    """Seeds that scatter about 1 in logs: 1/e, e."""
    return float(np.exp(2 * seed - 1))
