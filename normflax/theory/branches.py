"""The branches at initialisation: what they do to the Gram matrix of what they read, and to that of a gradient.

With tokens t, s over a whole batch, U_ts = ⟨u_t, u_s⟩/D of what a branch reads, and M_ts = ⟨δ_t, δ_s⟩ of the gradient at what it
writes; weights are independent, of mean 0, and given by their variances. Backwards the weights are taken for drawn afresh
(gradient independence), and the width for infinite.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from normflax.theory import kernels
from normflax.theory.kernels import Gram

Squares = dict[str, float]
"""‖∂ℓ/∂W‖_F² by role."""


@dataclass(frozen=True)
class Attention:
    """Self-attention whose weights A [T, T] are fixed and uniform over what a query sees (W_Q = W_K = 0):

        B = D w_V² · D w_O² · A U Aᵀ        back: D w_O² · D w_V² · Aᵀ M A

    Grouped heads change neither. No gradient passes through the softmax, and q and k have none.
    """

    weights: Float[np.ndarray, "T T"]
    width: int
    v: float
    out: float

    def forward(self, U: Gram) -> tuple[Gram, Any]:
        mean = mixed(self.weights, U)
        return self.width * self.v * self.width * self.out * mean, (U, mean)

    def backward(self, M: Gram, kept: Any) -> tuple[Gram, Squares]:
        U, mean = kept
        value = self.width * self.out * mixed(self.weights.T, M)  # Gram of the gradient at the values
        squares = {
            "v": self.width * float(np.vdot(U, value)),
            "out": self.width * self.width * self.v * float(np.vdot(mean, M)),
        }
        return self.width * self.v * value, squares


@dataclass(frozen=True)
class FeedForward:
    """down(φ(up(x))), or down(silu(gate(x)) · up(x)), with F hidden units. With P = D w² U the Gram matrix of a pre-activation:

    relu, gelu   B = F w_down² · H(P_up)               back: D w_up² · F w_down² · M ∘ Ḣ(P_up)
    swiglu       B = F w_down² · H(P_gate) ∘ P_up      back: F w_down² · M ∘ (D w_up² H(P_gate) + D w_gate² Ḣ(P_gate) ∘ P_up)
    """

    form: str
    width: int
    hidden: int
    up: float
    down: float
    gate: float = 0.0

    def forward(self, U: Gram) -> tuple[Gram, Any]:
        P = self.width * self.up * U
        H, slope = KERNELS[self.form](self.width * self.gate * U if self.form == "swiglu" else P)
        hidden = H * P if self.form == "swiglu" else H
        return self.hidden * self.down * hidden, (U, P, H, slope, hidden)

    def backward(self, M: Gram, kept: Any) -> tuple[Gram, Squares]:
        U, P, H, slope, hidden = kept
        unit = self.down * M  # Gram of the gradient at one hidden unit
        squares = {"down": self.hidden * float(np.vdot(hidden, M))}
        # Gram of the gradient at a pre-activation of one hidden unit, by the matrix that makes it.
        before = {"up": unit * H, "gate": unit * P * slope} if self.form == "swiglu" else {"up": unit * slope}
        squares |= {role: self.width * self.hidden * float(np.vdot(U, inner)) for role, inner in before.items()}
        back = self.up * before["up"] + (self.gate * before["gate"] if "gate" in before else 0.0)
        return self.width * self.hidden * back, squares


Branch = Attention | FeedForward
"""`forward` gives the Gram matrix of what a branch writes and what the way back needs; `backward` the Gram matrix of the gradient
at what it reads and the squared gradients of its matrices."""

KERNELS = {"relu": kernels.relu, "gelu": kernels.gelu, "swiglu": kernels.silu}
"""The pair of kernels behind each form of `model.ffn`."""


def mixed(weights: Float[np.ndarray, "T T"], K: Gram) -> Gram:
    """A K Aᵀ of a batch: the same weights for the T tokens of every sequence, none across sequences."""
    n, T = len(K), len(weights)
    rows = (weights @ K.reshape(n // T, T, n)).reshape(n, n // T, T)
    return (rows @ weights.T).reshape(n, n)


def causal(tokens: int) -> Float[np.ndarray, "T T"]:
    """Token t is the mean of tokens 0 … t."""
    seen = np.tril(np.ones((tokens, tokens)))
    return seen / seen.sum(-1, keepdims=True)


def bidirectional(tokens: int) -> Float[np.ndarray, "T T"]:
    """Every token is the mean of all."""
    return np.full((tokens, tokens), 1 / tokens)


MASKS = {"causal": causal, "bidirectional": bidirectional}
"""Uniform attention under each `model.mask`."""
