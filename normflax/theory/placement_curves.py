"""The theory curve of any placement at initialisation, derived from its entry in the table.

`curves("sandwich", depth=1000)` answers for a name, an import path or an entry of one's own; `of_config` for the settings of a
run, and for the batch that it was measured on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Bool, Int

from normflax import coefficients
from normflax.checks import ConfigError
from normflax.config import Coef, Config, Data, Model, Norm, Train, check
from normflax.model.bases import DEVIATIONS
from normflax.model.placements import KINDS, Placement, find
from normflax.model.placements import Norm as Site
from normflax.nearest import unknown
from normflax.probes.tidy import tidy
from normflax.theory import branches, gram
from normflax.theory.gram import Normed, Sublayer
from normflax.theory.kernels import Gram, correlation

STREAM = ("pre", "out", "post", "embed", "final")
"""The sites that act on the stream. Norms of q and k don't act on uniform attention."""


class Uncovered(ValueError):
    """The theory has no curve for these settings; the message says why."""


class Inputs(NamedTuple):
    """The batch: token ids [B, T], targets [B, T] (None: independent and uniform), which of them count, and the vocabulary."""

    tokens: Int[np.ndarray, "B T"]
    targets: Int[np.ndarray, "B T"] | None
    valid: Bool[np.ndarray, "B T"]
    vocab: int


@dataclass(frozen=True)
class Curves:
    """What theory expects of a model that has made no update.

    `fields` holds, under the names and in the shapes of `normflax/probes/fields.py`: second_moment, token_cosine and
    rank_one_residual [S + 1], norm_input by site, branch_ratio [S], and with gradients grad_frobenius and grad_rms [S + 1],
    grad_matrix by role [L] and grad_block [L]. Gradients are root mean squares over draws of the weights.
    """

    placement: str
    depth: int
    fields: Mapping[str, Any]

    @property
    def grad_norm_matrices(self) -> float:
        """√Σ‖g_W‖_F² over the branch matrices of all blocks, but for q and k."""
        return float(np.sqrt(np.sum(np.square(self.fields["grad_block"]))))

    def table(self) -> pd.DataFrame:
        """The curves as tidy rows: block, sublayer, branch, site, field, value."""
        return pd.DataFrame(tidy(self.fields))

    def __str__(self) -> str:
        """A table of a few blocks: the stream after them, and their gradients."""
        shown = sorted({0, min(1, self.depth), *(int(self.depth * share) for share in (0.01, 0.1, 0.25, 0.5, 0.75, 1))})
        states = ("second_moment", "token_cosine", "grad_frobenius")
        found = {name: self.fields[name][::2] for name in states if name in self.fields}
        if "grad_block" in self.fields:
            found["grad_block"] = np.concatenate([[np.nan], self.fields["grad_block"]])
        table = pd.DataFrame({name: values[shown] for name, values in found.items()}, index=pd.Index(shown, name="block"))
        return f"{self.placement}, {self.depth} blocks\n{table.to_string(float_format=lambda v: f'{v:.4g}', na_rep='')}"


def curves(
    placement: str | Placement,
    depth: int,
    *,
    tokens: int = 32,
    vocab: int = 64,
    norm: str = "layer",
    coef: Coef | None = None,
    gradients: bool = True,
    **model: Any,
) -> Curves:
    """The curves of one sequence of `tokens` different tokens with independent targets, drawn from `vocab`.

    `model` are settings of `model.*`: width, ffn, ffn_ratio, init, init_std, mask, embed_std, … (docs/settings.md), `norm` is
    norm.kind, `coef` replaces what the entry declares. Assumptions and equations: `theory/gram.py`, `theory/branches.py`.

    Raises ConfigError for settings that can't be, and Uncovered where there is no theory.
    """
    if misspelt := [name for name in model if name not in {f.name for f in fields(Model)}]:
        raise ConfigError(unknown("setting of model", misspelt[0], [f.name for f in fields(Model)]))
    config = check(
        Config(
            placement="pre" if isinstance(placement, Placement) else placement,  # an entry has no name of its own
            model=Model(depth=depth, **model),
            norm=Norm(kind=norm),
            coef=coef or Coef(),
            data=Data(name="copy", vocab=vocab),
            train=Train(tokens=tokens, batch=1),
        )
    )
    inputs = Inputs(np.arange(tokens)[None], None, np.ones((1, tokens), bool), vocab)
    if isinstance(placement, Placement):
        return propagate(config, placement, placement.label or "a placement of your own", inputs, gradients)
    return propagate(config, find(placement), find(placement).label or placement, inputs, gradients)


def of_config(config: Config, inputs: Inputs, *, gradients: bool = True) -> Curves:
    """The curves of a run's settings on a batch. Raises as `curves`."""
    return propagate(config, find(config.placement), find(config.placement).label or config.placement, inputs, gradients)


def propagate(config: Config, entry: Placement, label: str, inputs: Inputs, gradients: bool) -> Curves:
    """The curves of `entry` under the other settings of `config`, named `label`."""
    refuse(config, inputs)
    m = config.model
    entry = coefficients.fitted_entry(config, entry)
    if m.positions == "sinusoidal" and any(site and (site.kind or config.norm.kind) == "layer" for site in sites_of(entry)):
        raise Uncovered(
            "no theory for model.positions=sinusoidal under norm 'layer': these positions have a mean over the features, which"
            " LayerNorm takes away; norm 'rms' is covered"
        )
    norms = {site: normed(getattr(entry, site), config.norm) for site in STREAM}
    blocks = stack(config, entry, norms, inputs.tokens.shape[1])
    embedded = embedding(config, inputs.tokens)
    K0 = norms["embed"].forward(embedded) if norms["embed"] else embedded

    entries, seen, K = [], [states(K0, inputs)], K0
    sublayers: list[dict[str, float]] = []
    for pair in blocks:
        entries.append(K if gradients else None)
        for layer, (after, tape) in zip(pair, through(pair, K), strict=True):
            seen.append(states(after, inputs))
            sublayers.append(ways(layer, tape))
            K = after
    found: dict[str, Any] = {name: np.array([state[name] for state in seen]) for name in seen[0]}
    found["branch_ratio"] = np.array([way["branch_ratio"] for way in sublayers])
    found["norm_input"] = {site: np.array([way[site] for way in sublayers]) for site in ("pre", "out", "post") if norms[site]}
    found["norm_input"] |= {"embed": length(embedded)} if norms["embed"] else {}
    found["norm_input"] |= {"final": length(K)} if norms["final"] else {}
    if gradients:
        head = norms["final"].forward(K) if norms["final"] else K
        refuse_logits(head)
        targets = None if inputs.targets is None else inputs.targets.ravel()
        M = gram.loss_gradient(head, targets, inputs.valid.ravel(), inputs.vocab)
        M = norms["final"].backward(M, K) if norms["final"] else M
        found |= returned(blocks, entries, M, int(inputs.valid.sum()), m.width)
    return Curves(label, m.depth, found)


def refuse(config: Config, inputs: Inputs) -> None:
    """Raises Uncovered for settings without a theory, ConfigError for a batch it can't say anything about."""
    m, t = config.model, config.train
    if inputs.tokens.shape[1] < 2:
        raise ConfigError("train.tokens=1 is a sequence without a second token: token cosines and mixing need two")
    reasons = {
        "model.tied=true: the head is the embedding, and no longer independent of the stream": m.tied,
        "model.dropout>0: the curves are those of the model without dropout": m.dropout > 0,
        "train.label_smoothing>0 and train.z_loss>0 change the gradient at the logits": t.label_smoothing > 0 or t.z_loss > 0,
    }
    for reason, holds in reasons.items():
        if holds:
            raise Uncovered(f"no theory for {reason}")


def refuse_logits(K: Gram) -> None:
    """Raises Uncovered for logits with the Gram matrix K whose softmax is not near a uniform one."""
    if (largest := float(np.max(np.diagonal(K)))) > 2:
        raise Uncovered(
            f"no theory for gradients of logits of variance {largest:.3g}: the softmax is expanded around unit variance"
        )


def sites_of(entry: Placement) -> list[Site | None]:
    """The sites of the stream."""
    return [getattr(entry, site) for site in STREAM]


def normed(site: Site | None, norm: Norm) -> Normed | None:
    """The norm at a site, or nothing. Raises Uncovered for a kind that the theory does not know."""
    if site is None:
        return None
    kind = site.kind or norm.kind
    if kind not in ("layer", "rms"):
        raise Uncovered(f"no theory for norm '{kind}': it covers layer and rms, which divide a token by its length")
    return Normed(norm.gain, norm.eps)


def stack(config: Config, entry: Placement, norms: Mapping[str, Normed | None], tokens: int) -> list[tuple[Sublayer, Sublayer]]:
    """The two sublayers of every block, as numbers."""
    m = config.model
    scales, gains = coefficients.scales_of(config, entry), coefficients.gains_of(config, entry)
    deviation, square = DEVIATIONS[coefficients.base_of(config, entry)], (m.width, m.width)
    shapes = {**dict.fromkeys(("q", "k", "v", "out"), square), "up": (m.width, m.hidden), "gate": (m.width, m.hidden)}
    shapes["down"] = (m.hidden, m.width)
    weights, sites = branches.MASKS[m.mask](tokens), {site: norms[site] for site in ("pre", "out", "post")}
    blocks = []
    for i in range(m.depth):
        w = {role: (gain[i] * deviation(*shapes[role], m.init_std)) ** 2 for role, gain in gains.items()}
        attention = branches.Attention(weights, m.width, w["v"], w["out"])
        ffn = branches.FeedForward(m.ffn, m.width, m.hidden, w["up"], w["down"], w.get("gate", 0.0))
        numbers = [[scale[i][kind] for scale in scales] for kind in range(len(KINDS))]
        blocks.append(
            (
                Sublayer(attention, *numbers[0], skip_from=entry.skip_from, **sites),
                Sublayer(ffn, *numbers[1], skip_from=entry.skip_from, **sites),
            )
        )
    return blocks


def through(pair, K: Gram) -> list[tuple[Gram, gram.Tape]]:
    """The state after each sublayer of a block that is given K, and the way to it."""
    entry, passed = K, []
    for layer in pair:
        K, tape = gram.forward(layer, K, entry)
        passed.append((K, tape))
    return passed


def returned(blocks, entries: list[Gram], M: Gram, valid: int, width: int) -> dict[str, Any]:
    """Gradients of states and matrices, from that at the last state. Each block's forward pass is made again, so that memory
    is one Gram matrix a block."""
    squares, by_role = [float(np.trace(M))], []
    for pair, K in zip(reversed(blocks), reversed(entries), strict=True):
        to_entry, matrices = np.zeros_like(M), {}
        for layer, (_, tape) in zip(reversed(pair), reversed(through(pair, K)), strict=True):
            M, skipped, got = gram.backward(layer, M, tape)
            to_entry, matrices = to_entry + skipped, matrices | got
            squares.append(float(np.trace(M)))
        M = M + to_entry
        squares[-1] = float(np.trace(M))
        by_role.append(matrices)
    by_role.reverse()
    frobenius = np.sqrt(squares[::-1])
    roles = {role: np.sqrt([matrices[role] for matrices in by_role]) for role in by_role[0]}
    return {
        "grad_frobenius": frobenius,
        "grad_rms": valid * frobenius / np.sqrt(len(M) * width),
        "grad_matrix": roles,
        "grad_block": np.sqrt(sum(np.square(values) for values in roles.values())),
    }


def embedding(config: Config, tokens: Int[np.ndarray, "B T"]) -> Gram:
    """⟨x_t, x_s⟩/D of the embedding's output: equal tokens share a vector, and equal places one."""
    m, ids, place = config.model, tokens.ravel(), np.tile(np.arange(tokens.shape[1]), len(tokens))
    K = (m.embed_scale * m.embed_std) ** 2 * (ids[:, None] == ids[None, :])
    if m.positions == "learned":
        K = K + m.position_std**2 * (place[:, None] == place[None, :])
    if m.positions == "sinusoidal":
        angle = place[:, None] * 10000.0 ** (-np.arange(0, m.width, 2) / m.width)[None, :]
        waves = np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(len(place), -1)[:, : m.width]
        K = K + waves @ waves.T / m.width
    return K


def length(K: Gram) -> float:
    """Mean over tokens of ‖x‖/√D."""
    return float(np.mean(np.sqrt(np.diagonal(K))))


def states(K: Gram, inputs: Inputs) -> dict[str, float]:
    """M01, M18 and the rank-one residual of M19 of one state."""
    B, T = inputs.tokens.shape
    own = np.stack([K[b * T : (b + 1) * T, b * T : (b + 1) * T] for b in range(B)])
    r = np.stack([correlation(k)[1] for k in own])
    share = own.sum((1, 2)) / (T * np.trace(own, axis1=1, axis2=2))
    return {
        "second_moment": float(np.mean(np.diagonal(K))),
        "token_cosine": float((r.sum() - np.trace(r, axis1=1, axis2=2).sum()) / (B * T * (T - 1))),
        "rank_one_residual": float(np.mean(np.sqrt(np.maximum(1 - share, 0.0)))),
    }


def ways(layer: Sublayer, tape: gram.Tape) -> dict[str, float]:
    """M22 of one sublayer, and M03 of its norms."""
    written, skip = (np.sqrt(np.diagonal(K)) for K in (tape.written, tape.skip))
    read = {"pre": tape.x, "out": tape.f, "post": tape.z}
    return {"branch_ratio": float(np.mean(written / skip)), **{site: length(K) for site, K in read.items() if getattr(layer, site)}}
