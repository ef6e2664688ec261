"""Expectations over two correlated Gaussians of any mean, by quadrature, and activations averaged over one of them."""

from collections.abc import Callable
from functools import lru_cache
from math import pi, sqrt

import numpy as np
from scipy.special import ndtr

Smoothed = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""E f(y) of an f, over y of mean m and variance v: [n], [n] -> [n]. At v = 0 it is f(m)."""

NODES, REACH = 96, 12.0
"""Points of the Gauss-Legendre rule on one piece, and the standard deviations from the mean at which integrals end."""


def pair(f: Smoothed, mean: float, variance: float, r: float) -> float:
    """E f(x) f(y) of two Gaussians of one mean and variance with correlation r: the integral over x of f(x) E[f(y) | x]."""
    s = sqrt(variance)
    # The ends of the pieces are where x and where E[y | x] change sign: a kink between pieces costs no digits.
    signs = [-mean / s if s else 0.0, -mean / (r * s) if r * s else 0.0]
    ends = np.unique(np.clip([-REACH, *signs, REACH], -REACH, REACH))
    points, weights = _rule()
    half = np.diff(ends)[:, None] / 2
    z = (ends[:-1, None] + half * (1 + points)).ravel()
    here, there = f(mean + s * z, np.zeros_like(z)), f(mean + r * s * z, np.full_like(z, (1 - r**2) * variance))
    return float(np.sum((half * weights).ravel() * _density(z) * here * there))


@lru_cache(maxsize=1)
def _rule() -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.legendre.leggauss(NODES)


def relu(m: np.ndarray, v: np.ndarray) -> np.ndarray:
    """E max(y, 0)."""
    s = np.sqrt(np.maximum(v, 1e-300))
    return m * ndtr(m / s) + s * _density(m / s)


def relu_slope(m: np.ndarray, v: np.ndarray) -> np.ndarray:
    """E 1[y > 0]."""
    return ndtr(m / np.sqrt(np.maximum(v, 1e-300)))


def gelu(m: np.ndarray, v: np.ndarray) -> np.ndarray:
    """E y·Φ(y)."""
    s = np.sqrt(1 + v)
    return m * ndtr(m / s) + v / s * _density(m / s)


def gelu_slope(m: np.ndarray, v: np.ndarray) -> np.ndarray:
    """E [Φ(y) + y φ(y)]."""
    u = m / np.sqrt(1 + v)
    return ndtr(u) + u / (1 + v) * _density(u)


def _density(u: np.ndarray) -> np.ndarray:
    return np.exp(-(np.minimum(np.abs(u), 40.0) ** 2) / 2) / sqrt(2 * pi)  # beyond 40 it is 0, and its square may overflow
