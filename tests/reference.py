"""A plain float64 NumPy reference of the whole decoder-only Transformer, for any single-stream placement.

Written from the equations alone and sharing nothing with the package, so that agreement is evidence. It is slow on
purpose: a Python loop over sublayers, no compilation, no automatic differentiation.

One sublayer, with F the attention or the FFN of the block, attention first:

    u  = pre(x)                   norm or identity
    y  = out(F(u))                norm or identity
    z  = a * skip + b * y         skip is x, u or the input of the block
    x' = post(z)                  norm or identity

Letters: B batch, T tokens, D width, H heads, G heads of k and v, K = D / H head width, F FFN width, V vocabulary, L blocks, S = 2 L
sublayers. Parameters are a flat dictionary; those of blocks are stacked on a leading L axis; weights are [in, out]:

    embed.tokens [V, D] · embed.positions [T_max, D] (learned positions only) · head [D, V] (untied only)
    attention.q, .out [L, D, D], .k, .v [L, D, G K] · ffn.up, .gate [L, D, F] · ffn.down [L, F, D]   (gate: swiglu only)
    attention.q_bias, .out_bias, ffn.down_bias [L, D], attention.k_bias, .v_bias [L, G K]   (optional)
    ffn.up_bias, .gate_bias [L, F]   (optional)
    attention.norm_pre.scale, .bias [L, D], likewise norm_out, norm_post, and ffn.norm_*   (optional)
    attention.q_norm.scale, .bias, .k_norm.scale, .bias [L, K] (qk_norm only)
    final.scale, final.bias, embed.scale, embed.bias [D]   (optional: no scale is an effective gain of 1, no bias is 0)
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float, Int

Params = Mapping[str, np.ndarray]
Branches = Mapping[str, Callable[[Params, np.ndarray, "Spec"], np.ndarray]]
MaybeArray = np.ndarray | None
Stream = Float[np.ndarray, "B T D"]
Logits = Float[np.ndarray, "B T V"]
Tokens = Int[np.ndarray, "B T"]
Mask = Bool[np.ndarray, "B T"]

CHOICES = {
    "ffn": ("relu", "gelu", "swiglu"),
    "positions": ("learned", "sinusoidal", "rope", "none"),
    "norm": ("layer", "rms", "none"),
    "gain_form": ("w", "1+w"),
    "skip_from": ("x", "u", "block"),
}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The architecture: sizes, norm and placement. Scales `a` (skip), `b` (branch), `c` (what F reads) are a number or [S]."""

    depth: int
    width: int
    heads: int
    groups: int | None = None
    qk_norm: bool = False
    embed_scale: float = 1.0
    ffn: str = "gelu"
    positions: str = "learned"
    norm: str = "layer"
    eps: float = 1e-5
    gain_form: str = "w"
    pre: bool = False
    out: bool = False
    post: bool = False
    final: bool = False
    embed: bool = False
    a: float | np.ndarray = 1.0
    b: float | np.ndarray = 1.0
    c: float | np.ndarray = 1.0
    skip_from: str = "x"
    tied: bool = False
    causal: bool = True

    def __post_init__(self) -> None:
        for key, allowed in CHOICES.items():
            if getattr(self, key) not in allowed:
                raise ValueError(f"{key}={getattr(self, key)!r} is not one of {allowed}.")


@dataclass
class Trace:
    """What a forward pass saw. The stream has S + 1 states: entry 0 is the embedding output (after its norm, if any),
    entry s the stream after sublayer s; the last one is read before the final norm.

    norm_inputs: "attention.pre", "ffn.post", … -> one [B, T, D] a block; "embed" and "final" -> a list of one.
    branch: a (b * out(F(u)), a * skip) pair a sublayer. scores [B, H, T, T] of every attention, -inf where a key is not seen.
    """

    states: list[np.ndarray] = field(default_factory=list)
    norm_inputs: dict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    branch: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    scores: list[np.ndarray] = field(default_factory=list)
    readout: np.ndarray = field(default_factory=lambda: np.empty(0))
    logits: np.ndarray = field(default_factory=lambda: np.empty(0))


def normalize(
    x: np.ndarray, kind: str, eps: float, scale: MaybeArray = None, bias: MaybeArray = None, gain_form: str = "w"
) -> np.ndarray:
    """gain * (x - mean) / sqrt(mean((x - mean)^2) + eps) + bias over the last axis; "rms" puts 0 for the mean.

    The variance is biased (divisor D). "none" is the identity and has no parameters. The gain is scale or 1 + scale.
    Sources: Ba et al. 2016, section 3; Zhang and Sennrich 2019, section 4.
    """
    if kind == "none":
        return x
    centred = x - x.mean(-1, keepdims=True) if kind == "layer" else x
    y = centred / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + eps)
    if scale is not None:
        y = y * (1 + scale if gain_form == "1+w" else scale)
    return y if bias is None else y + bias


def rotate(x: Float[np.ndarray, "B T H K"]) -> Float[np.ndarray, "B T H K"]:
    """Rotary positions: features i and i + K/2 of a head at position t turn by t * 10000^(-2 i / K), t from 0.

    Source: Su et al. 2021, section 3.2, with the pairs (first half, second half) of the "rotate half" convention.
    """
    tokens, half = x.shape[1], x.shape[-1] // 2
    angles = np.arange(tokens)[:, None] * 10_000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def sinusoids(tokens: int, width: int) -> Float[np.ndarray, "T D"]:
    """PE(t, 2i) = sin(t / 10000^(2i/D)), PE(t, 2i + 1) = cos(t / 10000^(2i/D)). Source: Vaswani et al. 2017, section 3.5."""
    table = np.empty((tokens, width))
    for t in range(tokens):
        for j in range(width):
            angle = t / 10_000.0 ** ((j - j % 2) / width)
            table[t, j] = np.cos(angle) if j % 2 else np.sin(angle)
    return table


def softmax(x: np.ndarray) -> np.ndarray:
    """exp(x) / sum(exp(x)) over the last axis; entries of -inf get exactly 0."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def linear(p: Params, name: str, x: np.ndarray) -> np.ndarray:
    """x W, plus the bias where there is one."""
    return x @ p[name] + p.get(f"{name}_bias", 0.0)


def scores_and_values(p: Params, u: Stream, spec: Spec) -> tuple[np.ndarray, np.ndarray]:
    """q k^T / sqrt(K) [B, H, T, T], -inf where a key is not seen, and v [B, T, H, K]; head h owns the features h K … (h + 1) K - 1.

    With G heads of k and v, head h of q meets head h G // H of them.
    """
    B, T, D = u.shape
    q, k, v = (linear(p, role, u).reshape(B, T, -1, D // spec.heads) for role in "qkv")
    if spec.qk_norm:
        q, k = _norm(p, "q_norm", q, spec), _norm(p, "k_norm", k, spec)
    mine = [h * (spec.groups or spec.heads) // spec.heads for h in range(spec.heads)]
    k, v = k[:, :, mine], v[:, :, mine]
    if spec.positions == "rope":
        q, k = rotate(q), rotate(k)
    scores = np.einsum("bthk,bshk->bhts", q, k) / np.sqrt(D // spec.heads)
    if spec.causal:
        scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
    return scores, v


def attention(p: Params, u: Stream, spec: Spec) -> Stream:
    """softmax(q k^T / sqrt(K)) v per head, then the output matrix."""
    scores, v = scores_and_values(p, u, spec)
    return linear(p, "out", np.einsum("bhts,bshk->bthk", softmax(scores), v).reshape(u.shape))


def gelu(x: np.ndarray) -> np.ndarray:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), the tanh approximation of Hendrycks and Gimpel 2016."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def silu(x: np.ndarray) -> np.ndarray:
    """x / (1 + exp(-x))."""
    return x / (1 + np.exp(-x))


def feedforward(p: Params, u: Stream, spec: Spec) -> Stream:
    """gelu(u W_up) W_down, relu(u W_up) W_down, or (silu(u W_gate) * u W_up) W_down (Shazeer 2020), with the biases there are."""
    if spec.ffn in ("relu", "gelu"):
        up = linear(p, "up", u)
        return linear(p, "down", gelu(up) if spec.ffn == "gelu" else np.where(up > 0, up, 0.0))
    return linear(p, "down", silu(linear(p, "gate", u)) * linear(p, "up", u))


BRANCHES: Branches = {"attention": attention, "ffn": feedforward}


def _norm(p: Params, prefix: str, x: np.ndarray, spec: Spec) -> np.ndarray:
    return normalize(x, spec.norm, spec.eps, p.get(f"{prefix}.scale"), p.get(f"{prefix}.bias"), spec.gain_form)


def stack(
    params: Params, spec: Spec, x: Stream, first: int = 0, block_input: MaybeArray = None, branches: Branches = BRANCHES
) -> Trace:
    """Run sublayers first + 1 … S on the stream x, then the final norm; fills everything of the trace but the logits.

    `branches` replaces F: "attention" and "ffn" -> f(parameters of the block, u, spec). `block_input` is needed where
    the run starts inside a block whose skip comes from there; raises ValueError when it is missing.
    """
    if first % 2 and spec.skip_from == "block" and block_input is None:
        raise ValueError(f"first={first} starts inside a block and skip_from='block': block_input is needed.")
    trace = Trace(states=[x])
    a, b, c = (np.broadcast_to(scale, 2 * spec.depth) for scale in (spec.a, spec.b, spec.c))

    def norm(site: str, value: np.ndarray) -> np.ndarray:
        trace.norm_inputs[f"{kind}.{site}"].append(value)
        return _norm(p, f"norm_{site}", value, spec)

    for s in range(first, 2 * spec.depth):
        block, kind = s // 2, ("attention", "ffn")[s % 2]
        p = {name.removeprefix(f"{kind}."): w[block] for name, w in params.items() if name.startswith(f"{kind}.")}
        block_input = x if kind == "attention" else block_input
        u = norm("pre", x) if spec.pre else x
        y = branches[kind](p, c[s] * u, spec)
        if branches[kind] is attention:
            trace.scores.append(scores_and_values(p, c[s] * u, spec)[0])
        y = norm("out", y) if spec.out else y
        skip = {"x": x, "u": u, "block": block_input}[spec.skip_from]
        written, kept = b[s] * y, a[s] * skip
        x = norm("post", kept + written) if spec.post else kept + written
        trace.branch.append((written, kept))
        trace.states.append(x)

    if spec.final:
        trace.norm_inputs["final"].append(x)
    trace.readout = _norm(params, "final", x, spec) if spec.final else x
    return trace


def head(params: Params, h: Stream, spec: Spec) -> Logits:
    """h W_head, or h E^T / sqrt(D) when the head is tied to the token embedding E."""
    return h @ params["embed.tokens"].T / np.sqrt(spec.width) if spec.tied else h @ params["head"]


def _float64(params: Params) -> Params:
    return {name: np.asarray(value, np.float64) for name, value in params.items()}


def forward(params: Params, tokens: Tokens, spec: Spec, branches: Branches = BRANCHES) -> Trace:
    """The whole model, in float64 whatever the dtype of the parameters."""
    p = _float64(params)
    embedded = spec.embed_scale * p["embed.tokens"][tokens]
    if spec.positions == "learned":
        embedded = embedded + p["embed.positions"][: tokens.shape[1]]
    if spec.positions == "sinusoidal":
        embedded = embedded + sinusoids(tokens.shape[1], spec.width)
    trace = stack(p, spec, _norm(p, "embed", embedded, spec) if spec.embed else embedded, branches=branches)
    if spec.embed:
        trace.norm_inputs["embed"].append(embedded)
    trace.logits = head(p, trace.readout, spec)
    return trace


def resume(params: Params, spec: Spec, l: int, x_l: Stream, block_input: MaybeArray = None) -> Logits:
    """Logits as a function of the stream x_l after sublayer l = 0 … S; `block_input` as in `stack`."""
    p = _float64(params)
    return head(p, stack(p, spec, np.asarray(x_l, np.float64), l, block_input).readout, spec)


def cross_entropy(logits: Logits, targets: Tokens, mask: Mask) -> float:
    """Mean of -ln softmax(logits)[target] over the valid targets, in nats; 0 when there is none."""
    valid, chosen = logits[mask], targets[mask]
    if not len(valid):
        return 0.0
    shifted = valid - valid.max(-1, keepdims=True)
    return float(np.mean(np.log(np.exp(shifted).sum(-1)) - shifted[np.arange(len(valid)), chosen]))


def loss(trace: Trace, targets: Tokens, mask: Mask) -> float:
    """Mean cross-entropy of a forward pass over its valid targets, in nats per token."""
    return cross_entropy(trace.logits, targets, mask)
