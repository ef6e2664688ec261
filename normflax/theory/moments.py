"""Moments of a Transformer's parts at initialisation: from those of a part's input to those of its output, and back.

    forward     mean E x, variance E(x - E x)², correlation of x - E x between two tokens in the same feature
    backward    variance E g² and correlation between two tokens of a gradient g = ∂ℓ/∂x of mean 0

Expectations are over tokens, features and draws of the weights, so that every feature has the same mean. A part is a function
from `Moments` to `Moments`; its `_backward` takes the `Gradient` at its output to that at its input. One's result is the next
one's argument. Assumptions, beside each function's own: a width so large that sums over features equal their expectations, and
gradients independent of the values and weights that they meet.

Kedia et al. 2024, "Transformers Get Stable: An End-to-End Signal Propagation Theory for Language Models", arXiv:2403.09635.
"""

from dataclasses import dataclass
from math import exp, inf, isfinite, log, sqrt

import numpy as np

from normflax.theory import gaussian
from normflax.theory.gaussian import Smoothed, pair


@dataclass(frozen=True)
class Moments:
    """Mean, variance and correlation between two tokens of a value. A variance of 0 goes with any correlation."""

    mean: float = 0.0
    variance: float = 1.0
    correlation: float = 0.0

    def __post_init__(self):
        _check("mean", self.mean, isfinite(self.mean), "a finite number")
        _not_negative("variance", self.variance)
        _correlation("correlation", self.correlation)


@dataclass(frozen=True)
class Gradient:
    """Variance and correlation between two tokens of a gradient, whose mean is 0."""

    variance: float = 1.0
    correlation: float = 0.0

    def __post_init__(self):
        _not_negative("variance", self.variance)
        _correlation("correlation", self.correlation)


def linear(x: Moments, fan_in: int, std: float) -> Moments:
    """Wx with independent weights of mean 0 and standard deviation `std`, no bias: mean 0,

    variance n w² (s² + μ²)    covariance n w² (r s² + μ²)    with n = fan_in, w = std

    The mean of the input becomes a part that all tokens share. Kedia et al. 2024.
    """
    scale = _gain("fan_in", fan_in, std)
    return _moments(0.0, scale * (x.variance + x.mean**2), scale * (x.correlation * x.variance + x.mean**2))


def linear_backward(g: Gradient, fan_out: int, std: float) -> Gradient:
    """Wᵀg: variance n w² g², with n = fan_out and w = std; the correlation stays. Kedia et al. 2024."""
    return Gradient(_gain("fan_out", fan_out, std) * g.variance, g.correlation)


def relu(x: Moments) -> Moments:
    """max(x, 0) of a Gaussian x, by quadrature for any mean. At mean 0:

    mean s/√(2π)    variance s² (π - 1)/2π    covariance s² (√(1 - r²) + r (π - arccos r) - 1)/2π

    Cho and Saul 2009, equations 3 to 6; Kedia et al. 2024.
    """
    return _activation(gaussian.relu, x)


def relu_backward(g: Gradient, x: Moments) -> Gradient:
    """1[x > 0]·g, with x what the forward pass read. At mean 0: variance g²/2, covariance r_g g² (1/4 + arcsin(r)/2π)."""
    return _activation_backward(gaussian.relu_slope, g, x)


def gelu(x: Moments) -> Moments:
    """x·Φ(x), GELU in its exact form, of a Gaussian x, by quadrature for any mean. At mean 0, with A = s²/(1 + s²):

    mean s √(A/2π)    mean square (s²/2π) (π/2 + arcsin A + 2A/√(1 + 2s²)), at s = 1 0.4252

    Kedia et al. 2024.
    """
    return _activation(gaussian.gelu, x)


def gelu_backward(g: Gradient, x: Moments) -> Gradient:
    """gelu'(x)·g with gelu'(x) = Φ(x) + x φ(x), and x what the forward pass read. At mean 0, with A = s²/(1 + s²):

    variance g² (1/4 + (arcsin A + A (5s² + 3)/(1 + 2s²)^1.5)/2π), at s = 1 0.4558 g²

    Kedia et al. 2024.
    """
    return _activation_backward(gaussian.gelu_slope, g, x)


def layer_norm(x: Moments) -> Moments:
    """(x - mean)/std over features: mean 0, variance 1, the correlation stays. Width D to infinity (errors are O(1/D)), eps and
    the affine part left out. Kedia et al. 2024.
    """
    _check("x.variance", x.variance, x.variance > 0, "above 0, since layer_norm divides by it")
    return Moments(0.0, 1.0, x.correlation)


def layer_norm_backward(g: Gradient, x: Moments) -> Gradient:
    """Variance g²/s² with s² the variance of what the norm read; the correlation stays. It is 1 - 2/D of that at width D."""
    _check("x.variance", x.variance, x.variance > 0, "above 0, since layer_norm divides by it")
    return Gradient(g.variance / x.variance, g.correlation)


def rms_norm(x: Moments) -> Moments:
    """x/√(mean x²) over features: mean and standard deviation divided by √(s² + μ²), the correlation stays. As `layer_norm`."""
    square = x.variance + x.mean**2
    _check("x's mean square", square, square > 0, "above 0, since rms_norm divides by it")
    return Moments(x.mean / sqrt(square), x.variance / square, x.correlation)


def rms_norm_backward(g: Gradient, x: Moments) -> Gradient:
    """Variance g²/(s² + μ²), of what the norm read; the correlation stays. It is 1 - 1/D of that at width D."""
    square = x.variance + x.mean**2
    _check("x's mean square", square, square > 0, "above 0, since rms_norm divides by it")
    return Gradient(g.variance / square, g.correlation)


def softmax(x: Moments, keys: int) -> Moments:
    """Softmax over L keys of Gaussian scores; here the correlation is between keys, going in and coming out:

    mean 1/L    variance (exp(v) - 1)/L²    correlation -1/(L - 1)    with v = (1 - r) s² (1 - 1/L)

    Assumes small scores: variances within 5 %, back too, to v = 0.5 at 128 keys and to v = 1 at 512. Kedia et al. 2024, but for
    the factor 1 - 1/L, the spread around the mean of L scores, and the correlation, that of numbers which add up to 1.
    """
    same, _ = _overlaps(keys, (1 - x.correlation) * x.variance, name="x's variance around the mean over keys")
    return Moments(1 / keys, (same - 1 / keys) / keys, -1 / (keys - 1))


def softmax_backward(g: Gradient, x: Moments, keys: int) -> Gradient:
    """p·(g - Σ p g), with correlations between keys and x the scores that the forward pass read:

    variance (1 - r_g) (1 - 1/L) exp(v) g²/L²    correlation -1/(L - 1)    with v as in `softmax`

    A softmax passes on nothing of what all keys share of a gradient, hence 1 - r_g. Kedia et al. 2024 for r_g = 0 and many keys.
    """
    same, _ = _overlaps(keys, (1 - x.correlation) * x.variance, name="x's variance around the mean over keys")
    return Gradient((1 - g.correlation) * (1 - 1 / keys) * same * g.variance / keys, -1 / (keys - 1))


def attention(
    x: Moments,
    keys: int,
    score_variance: float = 0.0,
    score_correlation: float = 0.0,
    rate: float = 0.0,
    width: int | None = None,
) -> Moments:
    """Σ_k p_k x_k, the value path: every query's mean of L values with weights softmax(scores), and dropout q = `rate` on them:

    mean μ    variance s² (r + (1 - r) Y) + (s² + μ²) Y q/(1 - q)    covariance s² (r + (1 - r) C)
    Y = E Σ_k p_k² = exp(v)/L    C = E Σ_k p_k p'_k = exp(c v)/L    v = score_variance (1 - 1/L)

    over all L tokens, unmasked; uniform at v = 0. `score_variance` is that of one query's scores around their mean over keys,
    `score_correlation` c that between two queries' scores of the same key: with queries and keys linear in tokens of mean 0 and
    correlation r₀ they are (1 - r₀) times the scores' variance, and r₀. Assumes scores small as in `softmax`, and independent of
    values; if both come from the same tokens of D = `width` features, queries pull their means towards values of high score,
    which adds score_variance (1 - Y)²/D to Y and c times that to C. Y is Kedia et al. 2024's; C follows from E p_k p'_k of two
    queries, the pull from Stein's lemma, E Σ_k p_k x_k = μ + (1 - r) s² E Σ_k ∂p_k/∂x_k.
    """
    same, other = _overlaps(keys, score_variance, score_correlation)
    _shared("x.correlation", x.correlation, keys)
    dropped, r = (x.variance + x.mean**2) * same * rate / _kept(rate), x.correlation
    if width is not None:
        _check("width", width, width >= 1 and width % 1 == 0, "a whole number, at least 1")
        pull = score_variance * (1 - same) ** 2 / width
        same, other = same + pull, other + score_correlation * pull
    return _moments(x.mean, x.variance * (r + (1 - r) * same) + dropped, x.variance * (r + (1 - r) * other))


def attention_backward(
    g: Gradient, keys: int, score_variance: float = 0.0, score_correlation: float = 0.0, rate: float = 0.0
) -> Gradient:
    """Σ_q p_q g_q, the gradient at the values that L queries read. With `attention`'s Y, C and q:

    variance g² (Y/(1 - q) + r_g (L - 1) C)    covariance g² ((1 - Y)/(L - 1) + r_g (1 - C))

    Uniform: g² (1 + (L - 1) r_g)/L both, as Kedia et al. 2024. What reaches queries and keys through the scores is not in it.
    """
    same, other = _overlaps(keys, score_variance, score_correlation)
    _shared("g.correlation", g.correlation, keys)
    r, rest = g.correlation, keys - 1
    variance = g.variance * (same / _kept(rate) + r * rest * other)
    return _gradient(variance, g.variance * ((1 - same) / rest + r * (1 - other)))


def dropout(x: Moments, rate: float) -> Moments:
    """x·mask/(1 - q) with q = rate, every element for itself: mean μ, variance (s² + q μ²)/(1 - q), covariance r s².

    Kedia et al. 2024.
    """
    variance = (x.variance + rate * x.mean**2) / _kept(rate)
    return _moments(x.mean, variance, x.correlation * x.variance)


def dropout_backward(g: Gradient, rate: float) -> Gradient:
    """g·mask/(1 - q): variance g²/(1 - q), covariance r_g g². Kedia et al. 2024."""
    return Gradient(g.variance / _kept(rate), g.correlation * (1 - rate))


def residual(skip: Moments, branch: Moments, a: float = 1.0, b: float = 1.0, correlation: float = 0.0) -> Moments:
    """a·x + b·y with skip x, branch y and `correlation` c between them in the same token and feature:

    mean a μ_x + b μ_y    variance a² s_x² + b² s_y² + 2abc s_x s_y    covariance a² r_x s_x² + b² r_y s_y² + 2abc r_x s_x s_y

    c is 0 behind a matrix of fresh weights. Assumes that y is a multiple of x plus something independent of x.
    """
    return _moments(a * skip.mean + b * branch.mean, *_sum(skip, branch, a, b, correlation))


def residual_backward(skip: Gradient, branch: Gradient, a: float = 1.0, b: float = 1.0, correlation: float = 0.0) -> Gradient:
    """The gradient a·g + b·h at x: `skip` is g, that of the sum, `branch` is h, what the branch's backward makes of g (unscaled).

    Formulas and assumptions of `residual`, for gradients.
    """
    return _gradient(*_sum(skip, branch, a, b, correlation))


def _gain(name: str, fan: int, std: float) -> float:
    _check(name, fan, fan >= 1 and fan % 1 == 0, "a whole number, at least 1")
    _not_negative("std", std)
    return fan * std**2


def _sum(skip: Moments | Gradient, branch: Moments | Gradient, a: float, b: float, c: float) -> tuple[float, float]:
    """Variance and covariance of a sum."""
    _check("a", a, isfinite(a), "a finite number")
    _check("b", b, isfinite(b), "a finite number")
    _correlation("correlation", c)
    r, left = branch.correlation, 1 - c**2
    allowed = abs(r - c**2 * skip.correlation) <= left + 1e-9 or not skip.variance * branch.variance
    _check("branch.correlation", r, allowed, f"within 1 - c² = {left:.3g} of c² times skip.correlation, for a correlation c of {c}")
    first, second = a * sqrt(skip.variance), b * sqrt(branch.variance)
    variance = (first + c * second) ** 2 + left * second**2  # in this form never below 0
    return variance, (first**2 + 2 * c * first * second) * skip.correlation + second**2 * r


def _activation(f: Smoothed, x: Moments) -> Moments:
    mean = float(f(np.array([x.mean]), np.array([x.variance]))[0])
    return _moments(mean, *(pair(lambda m, v: f(m, v) - mean, x.mean, x.variance, r) for r in (1.0, x.correlation)))


def _activation_backward(slope: Smoothed, g: Gradient, x: Moments) -> Gradient:
    square, product = (pair(slope, x.mean, x.variance, r) for r in (1.0, x.correlation))
    return _gradient(g.variance * square, g.variance * g.correlation * product)


def _overlaps(keys: int, variance: float, correlation: float = 0.0, name: str = "score_variance") -> tuple[float, float]:
    """E Σ_k p_k p'_k of a query with itself and with another one. Both are at most 1, hence log(keys)."""
    _check("keys", keys, keys >= 2 and keys % 1 == 0, "a whole number, at least 2")
    _check(name, variance, 0 <= variance <= log(keys), f"from 0 to log(keys) = {log(keys):.3g}")
    _shared("score_correlation", correlation, keys)
    v = variance * (1 - 1 / keys)
    return exp(v) / keys, exp(correlation * v) / keys


def _shared(name: str, value: float, keys: int) -> None:
    """So many values can't all be further opposed to each other than those that add up to 0."""
    _check(name, value, -1 / (keys - 1) - 1e-12 <= value <= 1, f"from -1/(keys - 1) to 1 for {keys} keys")


def _moments(mean: float, variance: float, covariance: float) -> Moments:
    return Moments(mean, *_normalised(variance, covariance))


def _gradient(variance: float, covariance: float) -> Gradient:
    return Gradient(*_normalised(variance, covariance))


def _normalised(variance: float, covariance: float) -> tuple[float, float]:
    """Variance and correlation, which rounding may take a little beyond 0 and 1."""
    variance = max(variance, 0.0)
    return variance, min(1.0, max(-1.0, covariance / variance)) if variance else 0.0


def _kept(rate: float) -> float:
    """What dropout keeps."""
    _check("rate", rate, 0 <= rate < 1, "at least 0 and below 1")
    return 1 - rate


def _not_negative(name: str, value: float) -> None:
    _check(name, value, 0 <= value < inf, "a finite number, at least 0")


def _correlation(name: str, value: float) -> None:
    _check(name, value, -1 <= value <= 1, "from -1 to 1")


def _check(name: str, value: float | int, allowed: bool | np.bool_, what: str) -> None:
    if not allowed:
        raise ValueError(f"{name} is {value}: it has to be {what}")
