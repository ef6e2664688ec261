"""Expectations of activations over pairs of Gaussians: from the Gram matrix of pre-activations to that of activations.

For jointly Gaussian x_t of mean 0 with covariance P,

    H_ts = E φ(x_t) φ(x_s)        Ḣ_ts = E φ'(x_t) φ'(x_s)

Forward passes carry H, backward passes Ḣ.
"""

from collections.abc import Callable
from functools import lru_cache
from math import pi

import numpy as np
from jaxtyping import Float

Gram = Float[np.ndarray, "n n"]
Function = Callable[[np.ndarray], np.ndarray]

NODES, TERMS = 160, 48
"""Points of the Gauss-Hermite rule, and Hermite polynomials that a smooth activation is expanded in."""


def correlation(P: Gram) -> tuple[Float[np.ndarray, " n"], Gram]:
    """Standard deviations of a covariance, and its correlations; a variable that is always 0 correlates with none."""
    s = np.sqrt(np.diagonal(P))
    safe = np.where(s > 0, s, 1.0)
    return s, np.clip(P / (safe[:, None] * safe[None, :]), -1.0, 1.0)


def relu(P: Gram) -> tuple[Gram, Gram]:
    """H and Ḣ of ReLU, in closed form. Cho and Saul 2009, equations 3 to 7, degrees 1 and 0."""
    s, r = correlation(P)
    angle = np.arccos(r)
    hidden = (np.sqrt(np.maximum(1 - r**2, 0.0)) + r * (pi - angle)) / (2 * pi)
    return s[:, None] * s[None, :] * hidden, (pi - angle) / (2 * pi)


def gelu(P: Gram) -> tuple[Gram, Gram]:
    """H and Ḣ of GELU in its tanh form, which the model has."""
    return expanded(_gelu, P), expanded(_gelu_slope, P)


def silu(P: Gram) -> tuple[Gram, Gram]:
    """H and Ḣ of SiLU, x·sigmoid(x)."""
    return expanded(_silu, P), expanded(_silu_slope, P)


def expanded(f: Function, P: Gram) -> Gram:
    """E f(x_t) f(x_s) of a smooth f, by its expansion in normalised Hermite polynomials h_k:

        f(s·z) = Σ_k c_k(s) h_k(z)        E f(x_t) f(x_s) = Σ_k c_k(s_t) c_k(s_s) r_ts^k

    What the polynomials beyond the last leave out of E f² is added to the last, so that the diagonal is exact.
    Daniely, Frostig and Singer 2016, arXiv:1602.05897, section 4.2.
    """
    s, r = correlation(P)
    levels, index = np.unique(np.round(s, 12), return_inverse=True)
    c = coefficients(f, levels)
    total = np.zeros_like(r)
    for row in c[::-1]:  # Horner's rule; with one level of variance the products are numbers
        pair = row[0] ** 2 if len(levels) == 1 else row[index][:, None] * row[index][None, :]
        total = total * r + pair
    return total


def coefficients(f: Function, deviations: Float[np.ndarray, " m"]) -> Float[np.ndarray, "k m"]:
    """c_k(s) for every standard deviation s."""
    z, weights, polynomials = rule()
    values = f(z[:, None] * deviations[None, :])
    c = (polynomials * weights) @ values
    c[-1] = np.sqrt(np.maximum(weights @ values**2 - np.sum(c[:-1] ** 2, axis=0), 0.0)) * np.where(c[-1] < 0, -1.0, 1.0)
    return c


@lru_cache(maxsize=1)
def rule() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Points and weights of E over a standard normal, and h_0 … h_{TERMS-1} at the points [TERMS, NODES]."""
    z, weights = np.polynomial.hermite_e.hermegauss(NODES)
    h = [np.ones_like(z), z]
    for k in range(1, TERMS - 1):
        h.append((z * h[k] - np.sqrt(k) * h[k - 1]) / np.sqrt(k + 1))
    return z, weights / np.sqrt(2 * pi), np.stack(h)


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / pi) * (x + 0.044715 * x**3)))


def _gelu_slope(x: np.ndarray) -> np.ndarray:
    t = np.tanh(np.sqrt(2 / pi) * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * np.sqrt(2 / pi) * (1 + 3 * 0.044715 * x**2)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(x / 2))


def _silu(x: np.ndarray) -> np.ndarray:
    return x * _sigmoid(x)


def _silu_slope(x: np.ndarray) -> np.ndarray:
    return _sigmoid(x) * (1 + x * (1 - _sigmoid(x)))
