"""The exact recursion of Gram matrices through a stack of any placement, at initialisation.

The stream's Gram matrix K_ts = ⟨x_t, x_s⟩/D goes forward, that of the gradient M_ts = ⟨δ_t, δ_s⟩ comes back. One sublayer

    u = pre(x)    y = out(F(c·u))    z = a·skip + b·y    x' = post(z)

takes K to K' by the same equations, read for Gram matrices: a norm divides K_ts by the norms of tokens t and s, a sum adds
a²K_skip + b²B, since a branch with fresh weights is independent of its skip. Assumptions: width to infinity, norms' means and
their projection off the stream dropped (both O(1/D)), and those of `branches`.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from normflax.theory.branches import Branch, Squares
from normflax.theory.kernels import Gram


@dataclass(frozen=True)
class Normed:
    """A norm of the given initial gain: K_ts -> g²·K_ts/√((K_tt + eps)(K_ss + eps)), LayerNorm's and RMSNorm's alike."""

    gain: float = 1.0
    eps: float = 0.0

    def lengths(self, K: Gram) -> np.ndarray:
        """What each token is divided by."""
        return np.sqrt(np.diagonal(K) + self.eps) / self.gain

    def forward(self, K: Gram) -> Gram:
        """The Gram matrix of the normalised tokens."""
        return _over(K, self.lengths(K))

    def backward(self, M: Gram, K: Gram) -> Gram:
        """The gradient at what the norm read, which had the Gram matrix K."""
        return _over(M, self.lengths(K))


@dataclass(frozen=True)
class Sublayer:
    """The numbers and norms of one sublayer."""

    branch: Branch
    a: float = 1.0
    b: float = 1.0
    c: float = 1.0
    pre: Normed | None = None
    out: Normed | None = None
    post: Normed | None = None
    skip_from: Literal["x", "u", "block"] = "x"


@dataclass(frozen=True)
class Tape:
    """Gram matrices on the way through a sublayer: x and z are read by norms, f by `out`, skip and written are added."""

    x: Gram
    f: Gram
    z: Gram
    skip: Gram
    written: Gram
    kept: Any


def forward(layer: Sublayer, K: Gram, entry: Gram) -> tuple[Gram, Tape]:
    """The next state and the way to it; `entry` is what the block was given."""
    u = layer.pre.forward(K) if layer.pre else K
    f, kept = layer.branch.forward(layer.c**2 * u)
    y = layer.out.forward(f) if layer.out else f
    skip, written = layer.a**2 * {"x": K, "u": u, "block": entry}[layer.skip_from], layer.b**2 * y
    z = skip + written
    return layer.post.forward(z) if layer.post else z, Tape(K, f, z, skip, written, kept)


def backward(layer: Sublayer, M: Gram, tape: Tape) -> tuple[Gram, Gram, Squares]:
    """From the gradient at the next state to that at x, what goes to the block's input beside it, and squared gradients."""
    z = layer.post.backward(M, tape.z) if layer.post else M
    y = layer.b**2 * z
    read, squares = layer.branch.backward(layer.out.backward(y, tape.f) if layer.out else y, tape.kept)
    skip, nothing = layer.a**2 * z, np.zeros_like(M)
    u = layer.c**2 * read + (skip if layer.skip_from == "u" else nothing)
    x = (layer.pre.backward(u, tape.x) if layer.pre else u) + (skip if layer.skip_from == "x" else nothing)
    return x, skip if layer.skip_from == "block" else nothing, squares


def loss_gradient(K: Gram, targets: np.ndarray | None, valid: np.ndarray, vocab: int) -> Gram:
    """M at what the head reads, for the mean cross-entropy over the n valid targets and a head of variance 1/D:

        M_ts = [⟨p_t, p_s⟩ - 2/V + [y_t = y_s]] / n²

    K is the Gram matrix of what the head reads, so of the logits, and p the softmax's probabilities. At another's target p is 1/V
    in the mean, as p and targets are independent. [y_t = y_s] is known where `targets` are; else 1/V for two tokens.
    """
    same = np.where(np.eye(len(K), dtype=bool), 1.0, 1 / vocab) if targets is None else targets[:, None] == targets[None, :]
    M = (overlap(K, vocab) - 2 / vocab + same) / max(valid.sum(), 1) ** 2
    return M * valid[:, None] * valid[None, :]


def overlap(K: Gram, vocab: int) -> Gram:
    """E⟨p_t, p_s⟩ of softmaxes over V logits with covariance K:

        (e^K_ts / V) / (1 + [1 + e^(K_tt + K_ts) + e^(K_ss + K_ts) - e^K_tt - e^K_ss - e^K_ts] / V)

    The denominator is what the two sums over V fluctuate by, to first order; it keeps the value positive. At V = 64 and for two
    tokens alike it is 1.12, which takes a tenth from the amplitude of what aligned tokens' gradients have in common.
    """
    k = np.diagonal(K)
    own, both = np.exp(k), np.exp(K)
    fluctuation = 1 + own[:, None] * both + own[None, :] * both - own[:, None] - own[None, :] - both
    return both / vocab / (1 + fluctuation / vocab)


def _over(K: Gram, lengths: np.ndarray) -> Gram:
    return K / (lengths[:, None] * lengths[None, :])
