"""Tables as `normflax.load_table` returns them, small and made by hand, and what a figure drew of them."""

from itertools import product

import matplotlib.text
import numpy as np
import pandas as pd

FOUR = ("post", "pre", "sandwich", "deepnorm")
UNIGRAM, BIGRAM = 3.147, 2.512
HEALTHY = {"post": 2.60, "pre": 2.35, "sandwich": 2.38, "deepnorm": 2.30}
SETTINGS = {
    "model.width": 48,
    "model.heads": 4,
    "model.init": None,
    "model.init_std": 0.02,
    "model.embed_std": 1.0,
    "model.position_std": 0.02,
    "norm.kind": "layer",
    "norm.eps": 1e-6,
    "optim.name": "adam",
    "optim.rate": 1e-3,
    "optim.beta2": 0.98,
    "optim.eps": 1e-8,
    "optim.decay": 0.0,
    "optim.clip": None,
    "schedule.name": "constant",
    "schedule.warmup_steps": 30,
    "train.steps": 300,
    "train.batch": 16,
    "train.tokens": 64,
    "data.name": "stdlib",
    "data.sha256": "1a2b3c4d5e6f",
    "base_init": "xavier_normal",
    "level_unigram": UNIGRAM,
    "level_bigram": BIGRAM,
}


def a_run(placement="pre", depth=6, seed=0, loss=None, verdict="OK", **settings):
    """A row of a runs table; Post-LN is stuck from 16 blocks on, as in life."""
    stuck = placement == "post" and depth >= 16 and loss is None
    loss = (3.13 if stuck else HEALTHY.get(placement, 2.5)) + 0.01 * seed if loss is None else loss
    return SETTINGS | {
        "run": f"{placement}-{depth}-{seed}" + "".join(f"-{value}" for key, value in settings.items() if "." in key),
        "placement": placement,
        "model.depth": depth,
        "seed": seed,
        "verdict": "STUCK" if stuck else verdict,
        "loss_final": loss,
        "loss_effective": min(loss, UNIGRAM) if loss == loss else UNIGRAM,
        **settings,
    }


def runs_of(placements=FOUR, depths=(6, 16), seeds=(0, 1, 2), **settings):
    return pd.DataFrame([a_run(*key, **settings) for key in product(placements, depths, seeds)])


def layers_of(runs, value=lambda run, step, block: 1.0, steps=(0, 1, 300), field="grad_block"):
    """A layers table with one field per block, `value` of the run's row, the step and the block."""
    rows = [
        (run["run"], step, block, None, None, None, field, value(run, step, block))
        for run in runs.to_dict("records")
        for step in steps
        for block in range(1, run["model.depth"] + 1)
    ]
    columns = ["run", "step", "block", "sublayer", "branch", "site", "field", "value"]
    kinds = {"step": "int32", "block": "Int32", "sublayer": "Int32", "value": "float32"}
    return pd.DataFrame(rows, columns=columns).astype(kinds)


def found(axes, gid):
    """The lines of a panel with this name, as one array of points [n, 2]."""
    lines = [line.get_xydata() for line in axes.get_lines() if line.get_gid() == gid]
    return np.concatenate([np.empty((0, 2)), *lines]).astype(float)


def words(plot):
    return [text.get_text() for text in plot.findobj(matplotlib.text.Text) if text.get_text()]
