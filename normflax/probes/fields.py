"""Every field a probed step records: symbol, definition, unit, axes and clock. Docs, records and figures read this table.

The clock is the same for all: step t reads the parameters after t updates, on the batch of update t, before that update.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from normflax.model.placements import KINDS

Axis = Literal["state", "sublayer", "norm", "matrix", "block", "attention", "model", "pair"]


@dataclass(frozen=True)
class Field:
    """One recorded quantity.

    `axis` says what it has a value for: state, the stream's S + 1 states · sublayer, its S sublayers · norm, every norm layer of
    the stream · matrix, every block and role · block, every block · attention, the attention of every block · model, one value ·
    pair, every two of the L + 1 block inputs. `parts` says how the values of a batch's parts make that of the batch. `cost` is
    what reading it alone adds to a step that reads it (`normflax bench --fields`, 24 blocks of width 64, 2 cores).
    Fields with `core` are recorded unless others are asked for.
    """

    metric: str
    symbol: str
    axis: Axis
    unit: str
    definition: str
    parts: Literal["mean", "max", "rms"] = "mean"
    cost: str = "in the noise"
    core: bool = True


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
    "peak": Field("M04", "max |x_s|", "state", "stream", "largest absolute value in x_s", parts="max"),
    "norm_input": Field(
        "M03",
        "‖u‖/√D",
        "norm",
        "stream",
        "mean over batch and tokens of the Euclidean length of a norm's input, not centred, divided by √D; "
        "one value for every norm of the stream: pre, out and post of each sublayer, embed, final",
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
    "grad_matrix_rms": Field(
        "M06d",
        "rms(g_W)",
        "matrix",
        "nats/weight",
        "‖g_W‖_F over the root of the number of entries of W; compares with Adam's eps, which acts once it is as large",
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
    "log_z": Field("M25", "⟨ln Z⟩", "model", "nats", "mean over batch and tokens of ln Z = logsumexp of the logits"),
    "log_z_rms": Field("M25", "rms(ln Z)", "model", "nats", "root mean square of ln Z over batch and tokens", parts="rms"),
    "mean_logit": Field("M25", "⟨logit⟩", "model", "nats", "mean over batch, tokens and vocabulary of the logits"),
    "attention_entropy": Field(
        "M23",
        "H(A)",
        "attention",
        "nats",
        "entropy -Σ A ln A of a query's attention weights over the keys it may see, mean over batch, heads and queries; before "
        "dropout",
        cost="6 %",
        core=False,
    ),
    "attention_entropy_share": Field(
        "M23",
        "H(A)/⟨ln n⟩",
        "attention",
        "1",
        "the entropy over the mean over queries of ln n, for n keys that the query may see: 1 for weights that are all alike",
        cost="8 %",
        core=False,
    ),
    "max_logit": Field(
        "M24",
        "max q·k/√K",
        "attention",
        "1",
        "largest attention score over batch, heads, queries and the keys they may see, after the division by √K",
        cost="3 %",
        parts="max",
        core=False,
    ),
    "model_update": Field(
        "M10",
        "‖F_t - F_0‖/√D",
        "model",
        "1",
        "on eight fixed held-out windows, mean over tokens of the length of the change since step 0 of what the head reads, after "
        "the final norm where there is one, over √D; without dropout",
        cost="12 %",
        core=False,
    ),
    "angle": Field(
        "M20",
        "∠(x_l, x_m)/π",
        "pair",
        "1",
        "on the same windows, at the first and the last step: arccos of the cosine between what two blocks are given, over π, mean "
        "over tokens; rows carry the lower block input l = 0 … L as `block` and the distance m - l as `site`; input L is the "
        "stream before the final norm",
        cost="13 %",
        core=False,
    ),
}

BESIDE = ("model_update", "angle")
"""Fields that are read on held-out windows by a program of their own, and not on a step's batch."""

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


def on_batch(names: Iterable[str]) -> tuple[str, ...]:
    """The fields that `names` chooses and that are read on a step's own batch."""
    return tuple(name for name in chosen(names) if name not in BESIDE)


def chosen(names: Iterable[str]) -> tuple[str, ...]:
    """The fields that `probe.fields` or `probe.every_step` names, in the table's order; `all` is every one, `core` the core."""
    names = set(names)
    return tuple(name for name, field in FIELDS.items() if name in names or "all" in names or ("core" in names and field.core))


def tidy(measured: Mapping[str, Any]) -> dict[str, list]:
    """What a probed step returned, as columns of tidy rows (see COLUMNS).

    `measured` maps fields to [S + 1] (state), [S] (sublayer), [L] (block, attention), [] (model), [L + 1, L + 1] (pair) or dicts of
    them: by site for norms ([S], or a number for `embed` and `final`), by role for matrices ([L]). Blocks count from 1; the
    embedding is block 0, sublayer 0.
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
        elif axis in ("block", "attention"):
            for block, value in enumerate(np.asarray(found), start=1):
                add(name, value, block, None, "attention" if axis == "attention" else None, None)
        elif axis == "model":
            add(name, found, None, None, None, None)
        elif axis == "pair":
            for lower, upper in zip(*np.triu_indices(len(found), 1), strict=True):
                add(name, found[lower, upper], int(lower), None, None, f"+{upper - lower}")
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
