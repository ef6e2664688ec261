"""Every field a probed step records: symbol, definition, unit, axes and clock. Docs, records and figures read this table.

The clock is the same for all: step t reads the parameters after t updates, on the batch of update t, before that update.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Axis = Literal["state", "sublayer", "norm", "matrix", "block", "attention", "model", "pair", "part"]
When = Literal["step", "update", "beside", "initial"]


@dataclass(frozen=True)
class Field:
    """One recorded quantity.

    `axis` says what it has a value for: state, the stream's S + 1 states · sublayer, its S sublayers · norm, every norm layer of
    the stream · matrix, every block and role · block, every block · attention, the attention of every block · model, one value ·
    pair, every two of the L + 1 block inputs · part, every sublayer and each part of the state after it.
    `when` says where it is read: step, on a step's batch · update, on the update made of it · beside, on held-out windows at the
    probed steps · initial, on a model that has made no update (train.steps=0).
    `parts` says how the values of a batch's parts make that of the batch. `cost` is what reading it alone adds to a step that
    reads it (`normflax bench --fields`, 24 blocks of width 64, 2 cores).
    Fields with `core` are recorded unless others are asked for.
    """

    metric: str
    symbol: str
    axis: Axis
    unit: str
    definition: str
    parts: Literal["mean", "max", "rms"] = "mean"
    cost: str = "at most 2 %"
    core: bool = True
    when: When = "step"


UNTIMED = "not measured"
"""The cost of fields that came after the last `normflax bench --fields`."""

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
        when="update",
    ),
    "update_rms": Field("M26", "rms(ΔW)", "matrix", "weight", "root mean square of this step's update of a matrix", when="update"),
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
        cost="9 %",
        core=False,
    ),
    "attention_entropy_share": Field(
        "M23",
        "H(A)/⟨ln n⟩",
        "attention",
        "1",
        "the entropy over the mean over queries of ln n, for n keys that the query may see: 1 for weights that are all alike",
        cost="10 %",
        core=False,
    ),
    "max_logit": Field(
        "M24",
        "max q·k/√K",
        "attention",
        "1",
        "largest attention score over batch, heads, queries and the keys they may see, after the division by √K",
        cost="2.5 %",
        parts="max",
        core=False,
    ),
    "token_cosine": Field(
        "M18",
        "ρ_s",
        "state",
        "1",
        "mean over batch and pairs of different tokens of one sequence of the cosine between their x_s",
        core=False,
    ),
    "rank_one_residual": Field(
        "M19",
        "‖X - 1x̄ᵀ‖/‖X‖",
        "state",
        "1",
        "of each sequence's x_s as a matrix X [T, D]: what is left without the mean over tokens, as a share of its Frobenius norm; "
        "mean over batch",
        core=False,
    ),
    "stable_rank": Field(
        "M19", "‖X‖_F²/σ₁²", "state", "1", "of the same matrix, with σ₁ its largest singular value", cost="60 %", core=False
    ),
    "effective_rank": Field(
        "M19",
        "exp(-Σ p ln p)",
        "state",
        "1",
        "of the same matrix, with p its singular values over their sum",
        cost="60 %",
        core=False,
    ),
    "model_update": Field(
        "M10",
        "‖F_t - F_0‖/√D",
        "model",
        "1",
        "on eight fixed held-out windows, mean over tokens of the length of the change since step 0 of what the head reads, after "
        "the final norm where there is one, over √D; without dropout",
        cost="11 %",
        core=False,
        when="beside",
    ),
    "angle": Field(
        "M20",
        "∠(x_l, x_m)/π",
        "pair",
        "1",
        "on the same windows, at the first and the last step: arccos of the cosine between what two blocks are given, over π, mean "
        "over tokens; rows carry the lower block input l = 0 … L as `block` and the distance m - l as `site`; input L is the "
        "stream before the final norm",
        cost="14 %",
        core=False,
        when="beside",
    ),
    "mean_abs": Field(
        "M29",
        "⟨|x_l|⟩",
        "block",
        "stream",
        "on the same windows: mean over batch, tokens and width of the absolute value of what block l leaves in the stream",
        cost=UNTIMED,
        core=False,
        when="beside",
    ),
    "mean_abs_change": Field(
        "M29",
        "⟨|x_l(t) - x_l(0)|⟩",
        "block",
        "stream",
        "on the same windows: the same of its change since step 0",
        cost=UNTIMED,
        core=False,
        when="beside",
    ),
    "grad_expected": Field(
        "M06c",
        "‖⟨g_W⟩‖_F",
        "matrix",
        "nats/weight",
        "Euclidean length of the mean of a matrix's gradients over the first 32 batches",
        core=False,
        when="initial",
    ),
    "amplification": Field(
        "M11",
        "Σ|Δx̂_s|²",
        "sublayer",
        "1",
        "sum over batch, tokens and width of the squared change of x_s/std(x_s) when every entry of every branch matrix moves by "
        "±1e-4, with signs drawn at random; to first order",
        core=False,
        when="initial",
    ),
    "amplification_gradient": Field(
        "M11",
        "Σ|Δx̂_s|²",
        "sublayer",
        "1",
        "the same for a move of 1e-6 against the sign of each entry's gradient",
        core=False,
        when="initial",
    ),
    "dependency": Field(
        "M12",
        "β_sj",
        "part",
        "1",
        "standard deviation over the width of the part of x_s that sublayer j wrote, over that of x_s; mean over batch and tokens; "
        "rows carry j as `site`, 0 for the embedding",
        core=False,
        when="initial",
    ),
}


def on_batch(names: Iterable[str]) -> tuple[str, ...]:
    """The fields that `names` chooses and that are read on a step's own batch."""
    return tuple(name for name in chosen(names) if FIELDS[name].when in ("step", "update"))


def besides(names: Iterable[str]) -> tuple[str, ...]:
    """The fields that `names` chooses and that are read on held-out windows, by a program of their own."""
    return tuple(name for name in chosen(names) if FIELDS[name].when == "beside")


def at_start(names: Iterable[str]) -> tuple[str, ...]:
    """The fields that `names` chooses and that a model without an update has; angles are then read on the batch itself."""
    return tuple(name for name in chosen(names) if FIELDS[name].when in ("step", "initial") or name == "angle")


def chosen(names: Iterable[str]) -> tuple[str, ...]:
    """The fields that `probe.fields` or `probe.every_step` names, in the table's order; `all` is every one, `core` the core."""
    names = set(names)
    return tuple(name for name, field in FIELDS.items() if name in names or "all" in names or ("core" in names and field.core))
