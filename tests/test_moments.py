"""Moments of a Transformer's parts: every formula beside samples that went through the part, and back by its chain rule."""

import math
from math import pi, sqrt

import numpy as np
import pytest
from scipy.special import ndtr

from normflax.theory import moments
from normflax.theory.moments import Gradient, Moments

CORRELATIONS = (0.0, 0.3, 0.9)
INPUTS = [Moments(mean, variance, r) for mean, variance in ((0.0, 1.0), (0.7, 0.25), (-0.5, 4.0)) for r in CORRELATIONS]
GRADIENTS = [Gradient(variance, r) for variance, r in zip((1.0, 0.3, 5.0), CORRELATIONS, strict=True)]
SCORES = [(0.0, 0.0, 0.0), (0.5, 0.0, 0.0), (0.5, 0.6, 0.2), (0.25, 1.0, 0.5)]  # variance, correlation, dropout
W = 0.11  # standard deviation of weights


def each(*values):
    """One parameter with a readable name per value."""
    return [pytest.param(value, id=str(value)) for value in values]


def sample(rng, x: Moments | Gradient, sets: int, tokens: int, features: int) -> np.ndarray:
    """Gaussian values [sets, tokens, features] with the moments of x."""
    mean = x.mean if isinstance(x, Moments) else 0.0
    common, own = rng.normal(size=(sets, 1, features)), rng.normal(size=(sets, tokens, features))
    return mean + sqrt(x.variance) * (sqrt(x.correlation) * common + sqrt(1 - x.correlation) * own)


def second(c: np.ndarray) -> tuple[float, float]:
    """Variance and correlation over pairs of tokens, of centred values."""
    n, variance = c.shape[1], np.mean(c**2)
    covariance = np.mean(np.sum(c, axis=1) ** 2 - np.sum(c**2, axis=1)) / (n * (n - 1))
    return float(variance), float(covariance / variance)


def is_near(expected: Moments | Gradient, samples: np.ndarray, small: float = 0.02) -> None:
    """Samples have these moments, within 5 %; `small` is a difference of correlations that passes."""
    mean = float(np.mean(samples)) if isinstance(expected, Moments) else 0.0
    variance, correlation = second(samples - mean)
    assert expected.variance == pytest.approx(variance, rel=0.05)
    assert expected.correlation == pytest.approx(correlation, rel=0.05, abs=small)
    if isinstance(expected, Moments):
        assert expected.mean == pytest.approx(mean, rel=0.05, abs=0.05 * sqrt(variance))


def gelu(x):
    return x * ndtr(x)


def gelu_slope(x):
    return ndtr(x) + x * np.exp(-(x**2) / 2) / sqrt(2 * pi)


ACTIVATIONS = {
    "relu": (moments.relu, moments.relu_backward, lambda x: np.maximum(x, 0), lambda x: x > 0),
    "gelu": (moments.gelu, moments.gelu_backward, gelu, gelu_slope),
}


@pytest.mark.parametrize("x", each(*INPUTS))
def test_linear(x):
    rng = np.random.default_rng(0)
    weights = rng.normal(scale=W, size=(200, 128, 120))
    is_near(moments.linear(x, 128, W), sample(rng, x, 200, 2, 128) @ weights)


@pytest.mark.parametrize("g", each(*GRADIENTS))
def test_linear_backward(g):
    rng = np.random.default_rng(0)
    weights = rng.normal(scale=W, size=(200, 128, 120))
    is_near(moments.linear_backward(g, 120, W), sample(rng, g, 200, 2, 120) @ weights.swapaxes(1, 2))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("x", each(*INPUTS))
def test_activation(name, x):
    forward, backward, function, slope = ACTIVATIONS[name]
    rng = np.random.default_rng(0)
    values = sample(rng, x, 1000, 2, 150)
    is_near(forward(x), function(values))
    for g in GRADIENTS:
        is_near(backward(g, x), slope(values) * sample(rng, g, 1000, 2, 150))


def test_gains_of_gelu():
    out = moments.gelu(Moments())
    assert out.variance + out.mean**2 == pytest.approx(0.4252, rel=1e-3)
    assert moments.gelu_backward(Gradient(), Moments()).variance == pytest.approx(0.4558, rel=1e-3)
    z = np.random.default_rng(0).normal(size=1_000_000)
    assert out.variance + out.mean**2 == pytest.approx(np.mean(gelu(z) ** 2), rel=0.01)
    assert moments.gelu_backward(Gradient(), Moments()).variance == pytest.approx(np.mean(gelu_slope(z) ** 2), rel=0.01)


@pytest.mark.parametrize("s", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("r", [-1.0, -0.4, *CORRELATIONS, 1.0])
def test_activations_at_mean_zero_are_the_closed_forms(s, r):
    x, g, q = Moments(0.0, s**2, r), Gradient(2.0, 0.7), s**2
    out, back = moments.relu(x), moments.relu_backward(g, x)
    covariance = q * (sqrt(1 - r**2) + r * (pi - math.acos(r)) - 1) / (2 * pi)
    assert [out.mean, out.variance] == pytest.approx([s / sqrt(2 * pi), q * (pi - 1) / (2 * pi)], rel=1e-8)
    assert out.correlation * out.variance == pytest.approx(covariance, abs=1e-8 * q)
    assert back.variance == pytest.approx(1.0, rel=1e-8)
    assert back.variance * back.correlation == pytest.approx(1.4 * (0.25 + math.asin(r) / (2 * pi)), abs=1e-8)

    out, back, a = moments.gelu(x), moments.gelu_backward(g, x), q / (1 + q)
    square = q * (pi / 2 + math.asin(a) + 2 * a / sqrt(1 + 2 * q)) / (2 * pi)
    rest = 2 * q / pi * (q * (1 - r**2) + 1 + r**2) / ((1 + q) * sqrt((1 + q) ** 2 - (r * q) ** 2))
    product = q / 4 * (r + 2 * r / pi * math.asin(r * a) + rest)
    assert out.mean == pytest.approx(s * sqrt(a / (2 * pi)), rel=1e-8)
    assert out.variance + out.mean**2 == pytest.approx(square, rel=1e-8)
    assert out.variance * out.correlation + out.mean**2 == pytest.approx(product, abs=1e-8 * q)
    assert back.variance == pytest.approx(0.5 + (math.asin(a) + a * (5 * q + 3) / (1 + 2 * q) ** 1.5) / pi, rel=1e-8)
    numerator = r * a * ((q + 1) * (2 * q + 3) - 2 * (r * q) ** 2)
    kernel = math.asin(r * a) + numerator / ((q + 1) ** 2 - (r * q) ** 2) ** 1.5
    assert back.variance * back.correlation == pytest.approx(1.4 * (0.25 + kernel / (2 * pi)), abs=1e-8)


def test_an_activation_far_from_its_kink_or_at_a_point():
    assert moments.relu(Moments(50.0, 2.0, 0.3)).variance == pytest.approx(2.0, rel=1e-9)
    assert moments.relu(Moments(-1e5, 1.0, 0.3)) == Moments(0.0, 0.0, 0.0)
    assert moments.gelu(Moments(1e4, 2.0, 0.3)).correlation == pytest.approx(0.3, rel=1e-6)
    assert moments.relu(Moments(2.0, 0.0, 0.3)) == Moments(2.0, 0.0, 0.0)
    back = moments.relu_backward(Gradient(2.0, 0.5), Moments(3.0, 0.0))
    assert (back.variance, back.correlation) == pytest.approx((2.0, 0.5))


@pytest.mark.parametrize("x", each(*INPUTS))
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_norm(name, x):
    rng = np.random.default_rng(0)
    values = sample(rng, x, 60, 2, 1024)
    centred = values - np.mean(values, axis=-1, keepdims=True) if name == "layer_norm" else values
    root = np.sqrt(np.mean(centred**2, axis=-1, keepdims=True))
    unit = centred / root
    is_near(getattr(moments, name)(x), unit)
    for g in GRADIENTS:
        above = sample(rng, g, 60, 2, 1024)
        below = above - unit * np.mean(above * unit, axis=-1, keepdims=True)
        if name == "layer_norm":
            below -= np.mean(above, axis=-1, keepdims=True)
        is_near(getattr(moments, name + "_backward")(g, x), below / root)


@pytest.mark.parametrize("x", each(*INPUTS[:3], Moments(0.7, 0.5, 0.0), Moments(-2.0, 3.0, 0.9)))
def test_softmax(x):
    """Tokens are keys here, and the one feature is the query."""
    rng, keys = np.random.default_rng(0), 512
    p = np.exp(sample(rng, x, 1500, keys, 1))
    p /= np.sum(p, axis=1, keepdims=True)
    is_near(moments.softmax(x, keys), p, small=0.0)
    for g in GRADIENTS:
        above = sample(rng, g, 1500, keys, 1)
        is_near(moments.softmax_backward(g, x, keys), p * (above - np.sum(p * above, axis=1, keepdims=True)), small=0.0)


def test_softmax_over_few_keys():
    """Small scores over 4 keys, where the factor 1 - 1/L counts."""
    rng, x, g = np.random.default_rng(0), Moments(0.0, 0.02, 0.3), Gradient(1.0, 0.3)
    p, above = np.exp(sample(rng, x, 50_000, 4, 1)), sample(rng, g, 50_000, 4, 1)
    p /= np.sum(p, axis=1, keepdims=True)
    is_near(moments.softmax(x, 4), p, small=0.0)
    is_near(moments.softmax_backward(g, x, 4), p * (above - np.sum(p * above, axis=1, keepdims=True)), small=0.0)


def weights_of(rng, scores: np.ndarray, rate: float) -> np.ndarray:
    """Attention weights [sets, queries, keys] with dropout."""
    p = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
    return p / np.sum(p, axis=-1, keepdims=True) * (rng.random(p.shape) >= rate) / (1 - rate)


@pytest.mark.parametrize(("variance", "correlation", "rate"), SCORES)
def test_attention(variance, correlation, rate):
    rng, sets, keys = np.random.default_rng(0), 60, 128
    # [sets, keys, queries] -> [sets, queries, keys]: scores are correlated between queries.
    scores = sample(rng, Moments(0.0, variance, correlation), sets, keys, keys)
    p = weights_of(rng, scores, rate)
    for x in (INPUTS[0], INPUTS[4], INPUTS[8]):
        is_near(moments.attention(x, keys, variance, correlation, rate), p @ sample(rng, x, sets, keys, 160))
    for g in GRADIENTS:
        below = p.swapaxes(1, 2) @ sample(rng, g, sets, keys, 160)
        is_near(moments.attention_backward(g, keys, variance, correlation, rate), below)


@pytest.mark.parametrize("r", [0.0, 0.3])
def test_attention_of_real_queries_and_keys(r):
    rng, sets, keys, width = np.random.default_rng(0), 60, 128, 160
    x, g = Moments(0.0, 1.0, r), Gradient(1.0, 0.3)
    scale = 0.5 ** (1 / 4) / sqrt(width)  # the scores' variance is 0.5
    tokens, above = sample(rng, x, sets, keys, width), sample(rng, g, sets, keys, width)
    query, key, value = rng.normal(size=(3, sets, width, width)) * np.reshape([scale, scale, W], (3, 1, 1, 1))
    p = weights_of(rng, (tokens @ query) @ (tokens @ key).swapaxes(1, 2) / sqrt(width), 0.0)
    spread = 0.5 * (1 - r)
    is_near(moments.attention(moments.linear(x, width, W), keys, spread, r, width=width), p @ (tokens @ value))
    expected = moments.linear_backward(moments.attention_backward(g, keys, spread, r), width, W)
    is_near(expected, (p.swapaxes(1, 2) @ above) @ value.swapaxes(1, 2))


def test_uniform_attention_averages_tokens():
    out = moments.attention(Moments(0.4, 2.0, 0.0), 8)
    assert (out.mean, out.variance, out.correlation) == pytest.approx((0.4, 0.25, 1.0))
    back = moments.attention_backward(Gradient(2.0, 0.5), 8)
    assert (back.variance, back.correlation) == pytest.approx((2 * (1 + 7 * 0.5) / 8, 1.0))


@pytest.mark.parametrize("x", each(*INPUTS))
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5])
def test_dropout(x, rate):
    rng = np.random.default_rng(0)
    mask = (rng.random((500, 2, 200)) >= rate) / (1 - rate)
    is_near(moments.dropout(x, rate), mask * sample(rng, x, 500, 2, 200))
    for g in GRADIENTS:
        is_near(moments.dropout_backward(g, rate), mask * sample(rng, g, 500, 2, 200))


@pytest.mark.parametrize("a, b", [(1.0, 1.0), (0.8, 0.3), (2.0, -1.0)])
@pytest.mark.parametrize("correlation", [0.0, 0.5, -0.7])
def test_residual(a, b, correlation):
    rng, shape = np.random.default_rng(0), (500, 3, 200)
    along, across = correlation, 1 - correlation**2
    for x, own in ((INPUTS[0], INPUTS[5]), (INPUTS[4], INPUTS[2])):
        skip, rest = sample(rng, x, *shape), sample(rng, Moments(0.0, across, own.correlation), *shape)
        branch = 0.3 + sqrt(own.variance) * (along * (skip - x.mean) / sqrt(x.variance) + rest)
        y = Moments(0.3, own.variance, along**2 * x.correlation + across * own.correlation)
        is_near(y, branch)
        is_near(moments.residual(x, y, a, b, correlation), a * skip + b * branch)
        g, h = Gradient(x.variance, x.correlation), Gradient(y.variance, y.correlation)
        is_near(moments.residual_backward(g, h, a, b, correlation), a * (skip - x.mean) + b * (branch - 0.3))


def test_a_branch_that_is_its_skip_doubles_or_removes_it():
    x = Moments(0.3, 2.0, 0.4)
    out = moments.residual(x, x, correlation=1.0)
    assert (out.mean, out.variance, out.correlation) == pytest.approx((0.6, 8.0, 0.4))
    assert moments.residual(x, x, b=-1.0, correlation=1.0) == Moments(0.0, 0.0, 0.0)


def test_rounding_takes_nothing_beyond_its_range():
    for variance in np.linspace(0.1, 3.0, 200).tolist():
        x = Moments(0.3, variance, 1.0)
        assert moments.residual(x, x, 0.7, variance, correlation=1.0).correlation == pytest.approx(1.0)
    for keys in range(2, 200):  # centred tokens, whose uniform mean is 0
        assert moments.attention(Moments(0.3, 1.7, -1 / (keys - 1)), keys).variance == pytest.approx(0.0, abs=1e-12)
        assert moments.attention_backward(Gradient(1.7, -1 / (keys - 1)), keys).variance == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("r", CORRELATIONS)
def test_a_feed_forward_branch_and_its_residual(r):
    rng, sets, width, hidden, a, b = np.random.default_rng(0), 200, 96, 256, 0.9, 0.6
    x, g = Moments(0.2, 1.5, r), Gradient(0.7, r)
    first = rng.normal(scale=W, size=(sets, width, hidden))
    last = rng.normal(scale=W, size=(sets, hidden, width))
    tokens, above = sample(rng, x, sets, 4, width), sample(rng, g, sets, 4, width)

    before = tokens @ first
    branch = np.maximum(before, 0) @ last
    read = moments.linear(x, width, W)
    written = moments.linear(moments.relu(read), hidden, W)
    is_near(written, branch)
    is_near(moments.residual(x, written, a, b), a * tokens + b * branch)

    below = ((above @ last.swapaxes(1, 2)) * (before > 0)) @ first.swapaxes(1, 2)
    inner = moments.relu_backward(moments.linear_backward(g, width, W), read)
    back = moments.linear_backward(inner, hidden, W)
    is_near(back, below)
    is_near(moments.residual_backward(g, back, a, b), a * above + b * below)


X, G = Moments(), Gradient()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Moments(float("nan")), "mean is nan: it has to be a finite number"),
        (lambda: Moments(0.0, -1.0), "variance is -1.0: it has to be a finite number, at least 0"),
        (lambda: Moments(0.0, math.inf), "variance is inf"),
        (lambda: Moments(0.0, 1.0, 1.5), "correlation is 1.5: it has to be from -1 to 1"),
        (lambda: Gradient(-1.0), "variance is -1.0"),
        (lambda: Gradient(1.0, -1.5), "correlation is -1.5"),
        (lambda: moments.linear(X, 0, W), "fan_in is 0: it has to be a whole number, at least 1"),
        (lambda: moments.linear(X, 8, -W), "std is -0.11"),
        (lambda: moments.linear_backward(G, 0, W), "fan_out is 0"),
        (lambda: moments.linear_backward(G, 8, -W), "std is -0.11"),
        (lambda: moments.layer_norm(Moments(1.0, 0.0)), "x.variance is 0.0: it has to be above 0"),
        (lambda: moments.layer_norm_backward(G, Moments(1.0, 0.0)), "x.variance is 0.0"),
        (lambda: moments.rms_norm(Moments(0.0, 0.0)), "x's mean square is 0.0: it has to be above 0"),
        (lambda: moments.rms_norm_backward(G, Moments(0.0, 0.0)), "x's mean square is 0.0"),
        (lambda: moments.softmax(X, 1), "keys is 1: it has to be a whole number, at least 2"),
        (lambda: moments.softmax(Moments(0.0, 9.0), 64), "x's variance around the mean over keys is 9.0"),
        (lambda: moments.softmax_backward(G, X, 0), "keys is 0"),
        (lambda: moments.attention(X, 0), "keys is 0"),
        (lambda: moments.attention(X, 64, -0.1), "score_variance is -0.1: it has to be from 0 to log"),
        (lambda: moments.attention(X, 64, 5.0), "score_variance is 5.0"),
        (lambda: moments.attention(X, 64, 0.1, 1.1), "score_correlation is 1.1"),
        (lambda: moments.attention(X, 64, 0.1, -0.5), "score_correlation is -0.5"),
        (lambda: moments.attention(X, 64, rate=1.0), "rate is 1.0: it has to be at least 0 and below 1"),
        (lambda: moments.attention(Moments(0.0, 1.0, -0.5), 64), "x.correlation is -0.5: it has to be from -1/"),
        (lambda: moments.attention_backward(Gradient(1.0, -0.5), 64), "g.correlation is -0.5"),
        (lambda: moments.attention_backward(G, 64, rate=-0.1), "rate is -0.1"),
        (lambda: moments.attention_backward(G, 1), "keys is 1"),
        (lambda: moments.attention(X, 64, width=0), "width is 0: it has to be a whole number, at least 1"),
        (lambda: moments.dropout(X, 1.0), "rate is 1.0"),
        (lambda: moments.dropout_backward(G, -0.1), "rate is -0.1"),
        (lambda: moments.residual(X, X, math.nan), "a is nan: it has to be a finite number"),
        (lambda: moments.residual(X, X, 1.0, math.inf), "b is inf"),
        (lambda: moments.residual(X, X, correlation=2.0), "correlation is 2.0"),
        (lambda: moments.residual(X, Moments(0.0, 1.0, 0.9), correlation=-0.9), "branch.correlation is 0.9: it has to be within"),
        (lambda: moments.residual_backward(G, G, correlation=-2.0), "correlation is -2.0"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value) and "\n" not in str(caught.value)
