"""Expectations of activations over pairs of Gaussians, and of softmaxes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normflax.model.ffn import ACTIVATIONS
from normflax.theory import gram, kernels

FUNCTIONS = {"relu": (kernels.relu, "relu"), "gelu": (kernels.gelu, "gelu"), "silu": (kernels.silu, "swiglu")}


def pair(f, s: float, t: float, r: float) -> float:
    """E f(x) f(y) by the trapezoidal rule on a grid, which is exact to many digits for smooth functions of Gaussians."""
    z, step = np.linspace(-10, 10, 801, retstep=True)
    y = r * z[:, None] + np.sqrt(1 - r**2) * z[None, :]
    density = np.exp(-(z[:, None] ** 2 + z[None, :] ** 2) / 2) / (2 * np.pi)
    return float(np.sum(f(s * z)[:, None] * f(t * y) * density) * step**2)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_are_the_expectations_of_the_models_activations(name: str):
    """Both of them, for unequal variances, against quadrature of the function that the model applies and of its slope."""
    kernel, form = FUNCTIONS[name]
    act, slope = ACTIVATIONS[form], jax.grad(lambda x: ACTIVATIONS[form](x))
    for s, t, r in ((1.0, 1.0, 0.3), (0.6, 1.5, -0.7)):
        H, change = kernel(np.array([[s**2, r * s * t], [r * s * t, t**2]]))
        z, w = np.random.default_rng(0).normal(size=(2, 500_000))
        x, y = (jnp.asarray(v, jnp.float32) for v in (s * z, t * (r * z + np.sqrt(1 - r**2) * w)))
        np.testing.assert_allclose(H[0, 1], np.mean(np.asarray(act(x) * act(y), np.float64)), atol=4e-3)
        slopes = jax.vmap(slope)(x) * jax.vmap(slope)(y)
        np.testing.assert_allclose(change[0, 1], np.mean(np.asarray(slopes, np.float64)), atol=4e-3)


@pytest.mark.parametrize("name", ["gelu", "silu"])
def test_smooth_kernels_are_exact_to_many_digits(name: str):
    functions = {"gelu": kernels._gelu, "silu": kernels._silu}
    for s, t, r in ((1.0, 1.0, 0.5), (0.4, 2.0, 0.9)):
        H = FUNCTIONS[name][0](np.array([[s**2, r * s * t], [r * s * t, t**2]]))[0]
        np.testing.assert_allclose(H[0, 1], pair(functions[name], s, t, r), rtol=1e-5)


def test_the_published_gains():
    """GELU at unit variance: 0.4252 forward and 0.4558 back; ReLU a half of both."""
    H, slope = kernels.gelu(np.eye(1))
    np.testing.assert_allclose([H[0, 0], slope[0, 0]], [0.4252, 0.4558], rtol=0.01)
    np.testing.assert_allclose(np.ravel(kernels.relu(np.eye(1))), 0.5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_diagonal_is_the_mean_square_and_tokens_alike_agree(name: str):
    H, slope = FUNCTIONS[name][0](np.full((3, 3), 1.7))
    assert np.ptp(H) < 1e-9 and np.ptp(slope) < 1e-9
    for P in (np.eye(3), np.array([[1.0, 0.2, 0.0], [0.2, 2.0, -0.3], [0.0, -0.3, 0.5]])):
        for gram_matrix in FUNCTIONS[name][0](P):
            np.testing.assert_allclose(gram_matrix, gram_matrix.T)
            assert np.linalg.eigvalsh(gram_matrix).min() > -1e-9


def test_a_variable_that_is_nothing_stays_nothing():
    P = np.diag([1.0, 0.0])
    for kernel, _ in FUNCTIONS.values():
        H, slope = kernel(P)
        assert np.isfinite(slope).all() and abs(H[1, 1]) < 1e-12


@pytest.mark.parametrize("rho", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("vocab", [64, 256])
def test_softmaxes_overlap_as_expected(vocab: int, rho: float):
    """E⟨p, p'⟩ over draws: within 3 % at 64 logits, 1 % at 256."""
    z, w = np.random.default_rng(1).normal(size=(2, 20_000, vocab))
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (z, rho * z + np.sqrt(1 - rho**2) * w))
    expected = gram.overlap(np.array([[1.0, rho], [rho, 1.0]]), vocab)[0, 1]
    np.testing.assert_allclose(np.mean(np.sum(p * q, axis=1)), expected, rtol=2 / vocab)


def test_the_losss_gradient_is_that_of_softmax_and_head():
    """⟨δ_t, δ_s⟩ at what the head reads: mean over heads W of variance 1/D, for given tokens and targets, one target masked."""
    D, V, n = 64, 32, 4
    rng = np.random.default_rng(2)
    shared = rng.normal(size=D)
    h = np.stack([np.sqrt(r) * shared + np.sqrt(1 - r) * rng.normal(size=D) for r in (0.9, 0.9, 0.5, 0.0)])
    h *= np.sqrt(D) / np.linalg.norm(h, axis=1, keepdims=True)
    targets, valid = np.array([3, 3, 7, 1]), np.array([True, True, True, False])
    W = rng.normal(size=(4000, D, V)) / np.sqrt(D)
    z = np.einsum("td,wdv->wtv", h, W)
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    delta = np.einsum("wtv,wdv->wtd", (p - np.eye(V)[targets]) * valid[:, None] / 3, W)
    found = np.einsum("wtd,wsd->ts", delta, delta) / len(W)
    expected = gram.loss_gradient(h @ h.T / D, targets, valid, V)
    np.testing.assert_allclose(found, expected, atol=0.06 * np.max(expected))
    assert not expected[3].any() and n == len(expected)
