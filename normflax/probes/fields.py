"""Every field a probed step records: symbol, definition, unit, axes and clock. Docs, records and figures read this table.

The clock is the same for all: step t reads the parameters after t updates, on the batch of update t, before that update.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from normflax.model.placements import KINDS

Axis = Literal["state", "sublayer", "norm", "matrix", "block"]


@dataclass(frozen=True)
class Field:
    """One recorded quantity.

    `axis` says what it has a value for: state, the stream's S + 1 states · sublayer, its S sublayers · norm, every norm layer ·
    matrix, every block and role · block, every block.
    """

    metric: str
    symbol: str
    axis: Axis
    unit: str
    definition: str


FIELDS: dict[str, Field] = {
    "second_moment": Field(
        "M01",
        "q_s",
        "state",
        "stream²",
        "mean over batch, tokens and width of x_s² (not centred), for the stream x_s after sublayer s",
    ),
    "variance": Field(
        "M02",
        "v_s",
        "state",
        "stream²",
        "variance over the width (divisor D) of each token's x_s, then the mean over batch and tokens",
    ),
    "peak": Field("M04", "max |x_s|", "state", "stream", "largest absolute value in x_s"),
    "norm_input": Field(
        "M03",
        "‖u‖/√D",
        "norm",
        "stream",
        "mean over batch and tokens of the Euclidean length of a norm's input, not centred, divided by √D; "
        "one value for every norm: pre, out and post of each sublayer, embed, final",
    ),
    "branch_ratio": Field(
        "M22",
        "‖b·y‖/‖a·skip‖",
        "sublayer",
        "1",
        "mean over batch and tokens of ‖b·out(F(u))‖₂ / ‖a·skip‖₂, what a sublayer adds against what it keeps",
    ),
    "grad_rms": Field(
        "M05",
        "n·rms(∂ℓ/∂x_s)",
        "state",
        "nats/stream",
        "root mean square over batch, tokens and width of the gradient of the mean loss in x_s, times the number n of valid "
        "targets (so that batch sizes compare); x_s is read after the sublayer's post norm where it has one",
    ),
    "grad_frobenius": Field(
        "M05", "‖∂ℓ/∂x_s‖_F", "state", "nats/stream", "Euclidean length of the whole gradient of the mean loss in x_s"
    ),
    "grad_matrix": Field(
        "M06",
        "‖g_W‖_F",
        "matrix",
        "nats/weight",
        "Euclidean length of the gradient of the mean loss in one matrix, before clipping; q, k and v apart even when stored fused",
    ),
    "grad_block": Field(
        "M06b", "‖g_l‖", "block", "nats/weight", "√Σ‖g_W‖_F² over the matrices of block l, before clipping; no biases, no norms"
    ),
    "update_ratio": Field(
        "M26",
        "‖ΔW‖_F/‖W‖_F",
        "matrix",
        "1",
        "length of this step's update of a matrix (rate and decay included) over the length of the matrix before it",
    ),
    "update_rms": Field("M26", "rms(ΔW)", "matrix", "weight", "root mean square of this step's update of a matrix"),
}

ROLE_BRANCH = {
    "q": "attention",
    "k": "attention",
    "v": "attention",
    "out": "attention",
    "up": "ffn",
    "gate": "ffn",
    "down": "ffn",
}

COLUMNS = ("block", "sublayer", "branch", "site", "field", "value")


def chosen(names: tuple[str, ...]) -> tuple[str, ...]:
    """The fields that `probe.fields` or `probe.every_step` names, in the table's order; `all` is every one."""
    return tuple(FIELDS) if "all" in names else tuple(name for name in FIELDS if name in names)


def tidy(measured: Mapping[str, Any]) -> dict[str, list]:
    """What a probed step returned, as columns of tidy rows (see COLUMNS).

    `measured` maps fields to [S + 1] (state), [S] (sublayer), [L] (block) or dicts of them: by site for norms ([S], or a number
    for `embed` and `final`), by role for matrices ([L]). Blocks count from 1; the embedding is block 0, sublayer 0.
    """
    columns: dict[str, list] = {name: [] for name in COLUMNS}

    def add(field, value, block, sublayer, branch, site):
        for name, cell in zip(COLUMNS, (block, sublayer, branch, site, field, float(value)), strict=True):
            columns[name].append(cell)

    def along_sublayers(field, values, first, site=None):
        for sublayer, value in enumerate(np.asarray(values), start=first):
            block, branch = (0, "embed") if sublayer == 0 else ((sublayer + 1) // 2, KINDS[(sublayer - 1) % 2])
            add(field, value, block, sublayer, branch, site)

    for name, found in measured.items():
        axis = FIELDS[name].axis
        if axis in ("state", "sublayer"):
            along_sublayers(name, found, 0 if axis == "state" else 1)
        elif axis == "block":
            for block, value in enumerate(np.asarray(found), start=1):
                add(name, value, block, None, None, None)
        elif axis == "matrix":
            for role, values in found.items():
                for block, value in enumerate(np.asarray(values), start=1):
                    add(name, value, block, None, ROLE_BRANCH[role], role)
        else:
            for site, values in found.items():
                if site == "embed":
                    add(name, values, 0, 0, "embed", site)
                elif site == "final":
                    add(name, values, None, None, "final", site)
                else:
                    along_sublayers(name, values, 1, site)
    return columns
