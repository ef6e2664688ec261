"""Norm layers: worked numbers, a float64 reference, and what no option may change."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref
from flax import nnx

from normflax.checks import CHOICES
from normflax.model import norms

KINDS = [kind for kind in norms.NORMS if kind != "none"]
X = [2.0, 4.0, 6.0, 8.0]
FLAGS = list(itertools.product([False, True], [False, True], ["w", "1+w"]))


def made(kind: str, width: int, **options: Any):
    """A norm with `stored` in place of its gain and `offset` in place of its bias, where given."""
    stored, offset = options.pop("stored", None), options.pop("offset", None)
    layer = norms.make(kind, width, **options)
    if stored is not None:
        layer.affine.scale[...] = jnp.array(stored, jnp.float32)
    if offset is not None:
        layer.affine.bias[...] = jnp.array(offset, jnp.float32)
    return layer


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize(
    ("kind", "x", "options", "expected"),
    [
        ("layer", [2, 4, 4, 6], {}, [-math.sqrt(2), 0, 0, math.sqrt(2)]),
        ("rms", [2, 4, 4, 6], {}, np.array([2, 4, 4, 6]) / math.sqrt(18)),
        ("layer", X, {}, [-1.341641, -0.447214, 0.447214, 1.341641]),
        ("layer", X, {"stored": [1, 2, 1, 2], "offset": [0, 1, 0, -1]}, [-1.341641, 0.105573, 0.447214, 1.683282]),
        ("rms", X, {}, [0.365148, 0.730297, 1.095445, 1.460593]),
        ("rms", X, {"stored": [1, 2, 1, 2]}, [0.365148, 1.460593, 1.095445, 2.921187]),
        ("rms", [1, 2, 3, 4], {"stored": [0.5] * 4, "gain_form": "1+w"}, [0.547723, 1.095445, 1.643168, 2.190890]),
        ("rms", [3, 4], {"eps": 1e-6}, [0.848528, 1.131371]),
        ("layer", [1, 0, 0, 0], {"eps": 1e-6}, [1.732047, -0.577349, -0.577349, -0.577349]),
        ("layer", [1e-3, -1e-3, 1e-3, -1e-3], {"eps": 1e-3}, [0.031607, -0.031607, 0.031607, -0.031607]),
        ("layer", [1e-3, -1e-3, 1e-3, -1e-3], {"eps": 1e-5}, [0.301511, -0.301511, 0.301511, -0.301511]),
        ("layer", [1e-3, -1e-3, 1e-3, -1e-3], {"eps": 1e-6}, [0.707107, -0.707107, 0.707107, -0.707107]),
        ("layer", [1e-3, -1e-3, 1e-3, -1e-3], {"eps": 1e-12}, [1, -1, 1, -1]),
        ("rms", [1e-3, -1e-3, 1e-3, -1e-3], {"eps": 1e-6}, [0.707107, -0.707107, 0.707107, -0.707107]),
        ("none", [2, 4, 4, 6], {}, [2, 4, 4, 6]),
    ],
)
def test_worked_numbers(kind: str, x: list[float], options: dict[str, Any], expected):
    """A-01: eps inside the root and from the settings, biased variance. A-03: which of gain and 1 + w is stored."""
    layer = made(kind, len(x), **{"eps": 0.0, "scale": True, "bias": True} | options)
    np.testing.assert_allclose(layer(jnp.array(x, jnp.float32)), expected, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (2, 2, 3, 4)])
def test_every_leading_axis_is_one_row_of_the_reference(kind: str, shape: tuple[int, ...]):
    x = 3 + normal(*shape, scale=2.0)
    gain, bias = np.linspace(0.5, 1.5, 4), np.linspace(-1, 1, 4)
    layer = made(kind, 4, eps=1e-3, scale=True, bias=True, gain_form="1+w", stored=gain, offset=bias)
    expected = ref.normalize(np.asarray(x, np.float64), kind, 1e-3, gain, bias, "1+w")
    np.testing.assert_allclose(layer(x), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gain", [1.0, 0.5])
def test_flags_change_the_parameters_and_never_the_function(kind: str, gain: float):
    x = normal(2, 3, 4)
    plain = gain * ref.normalize(np.asarray(x, np.float64), kind, 1e-6)
    for scale, bias, form in FLAGS:
        layer = norms.make(kind, 4, scale=scale, bias=bias, gain_form=form, gain=gain)
        np.testing.assert_allclose(layer(x), plain, rtol=2e-6, atol=1e-7)
        held = {v.role: v for v in jax.tree.leaves(nnx.state(layer), is_leaf=lambda v: isinstance(v, nnx.Variable))}
        assert set(held) == {role for role, flag in (("gain", scale), ("bias", bias)) if flag}
        assert all(v.shape == (4,) and v[...].dtype == jnp.float32 for v in held.values())
        if scale:
            assert (np.asarray(held["gain"][...]) == gain - (form == "1+w")).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_normalised_alone(kind: str):
    """A-01: ten times token (0, 1) changes no bit of any other."""
    layer = made(kind, 4, bias=True, stored=[1, 2, 3, 4], offset=[1, 0, 0, 1])
    x = normal(2, 3, 4)
    before, after = np.asarray(layer(x)), np.asarray(layer(x.at[0, 1].multiply(10)))
    others = np.ones((2, 3), bool)
    others[0, 1] = False
    np.testing.assert_array_equal(before[others], after[others])


@pytest.mark.parametrize("kind", norms.NORMS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("value", [0.0, 1.0, 1234.0])
def test_a_constant_row_is_finite_both_ways(kind: str, dtype, value: float):
    """A-02; a LayerNorm gives its bias, and an RMSNorm of zeros too."""
    x = jnp.full((1, 256), value, dtype)
    offset = np.linspace(-1, 1, 256) if kind != "none" else None
    layer = made(kind, 256, bias=True, offset=offset)
    weights = normal(1, 256)
    y, pull = jax.vjp(layer, x)
    assert y.dtype == dtype and np.isfinite(np.asarray(y, np.float32)).all()
    assert np.isfinite(np.asarray(pull(weights.astype(dtype))[0], np.float32)).all()
    if kind == "layer" or (kind == "rms" and value == 0):
        np.testing.assert_allclose(np.asarray(y[0], np.float32), offset, atol=1e-6 if dtype == jnp.float32 else 4e-3)


def test_squares_are_not_formed_in_half_precision():
    """A-03: 300² is inf in float16."""
    y = made("rms", 64)(jnp.full(64, 300, jnp.float16))
    np.testing.assert_allclose(np.asarray(y, np.float32), 1.0, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_in_and_out_with_the_affine_step_in_float32(kind: str):
    """A-03: the gain is applied before the cast, and parameters stay float32."""
    gain = 1 + np.linspace(0, 2**-7, 64)  # bfloat16 itself has two numbers here
    layer = made(kind, 64, stored=gain)
    x = normal(5, 64).astype(jnp.bfloat16)
    y = layer(x)
    assert y.dtype == jnp.bfloat16
    assert {v.dtype for v in jax.tree.leaves(nnx.state(layer))} == {jnp.dtype("float32")}
    exact = ref.normalize(np.asarray(x, np.float64), kind, 1e-6, gain)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0, 100.0])
def test_the_output_has_unit_size_at_any_scale(kind: str, scale: float):
    y = made(kind, 64)(normal(5, 64, scale=scale))
    np.testing.assert_allclose(np.sqrt(np.mean(np.square(y), -1)), 1.0, atol=0.005)


@pytest.mark.parametrize("mean", [1000, 4096, 10_000])
def test_a_small_spread_around_a_large_mean_is_seen(mean: int):
    """The variance is taken in two passes: E[x²] - E[x]² in float32 gives 2.0 and 0.0 for the last two 1.25."""
    x = jnp.arange(mean, mean + 4, dtype=jnp.float32)
    np.testing.assert_allclose(made("layer", 4, eps=0.0)(x), [-1.341641, -0.447214, 0.447214, 1.341641], rtol=1e-5)


def test_a_spread_of_one_float_is_seen():
    """1e4 + i/1000 has steps of one float32; its mean is rounded, its spread is not lost."""
    x = np.float32(1e4) + np.float32(1e-3) * np.arange(16, dtype=np.float32)
    y = made("layer", 16, eps=1e-12)(jnp.asarray(x))
    np.testing.assert_allclose(np.ptp(y), np.ptp(ref.normalize(x.astype(np.float64), "layer", 1e-12)), rtol=0.02)


def test_layernorm_ignores_a_shift_and_rmsnorm_keeps_it():
    x = normal(5, 64)
    np.testing.assert_allclose(made("layer", 64)(x + 3), made("layer", 64)(x), atol=3e-6)
    assert np.mean(made("rms", 64)(x + 3)) > 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_orthogonal_to_what_the_norm_ignores(kind: str):
    """Scaling a row changes nothing, so the gradient has no part along it; nor along ones, for a LayerNorm."""
    layer, x, w = made(kind, 64, eps=0.0), 2 + normal(5, 64), normal(5, 64, seed=1)
    g = np.asarray(jax.grad(lambda x: jnp.sum(w * layer(x)))(x))
    assert np.abs(g).max() > 0.1
    np.testing.assert_allclose(np.sum(g * x, -1), 0, atol=1e-4)
    if kind == "layer":
        np.testing.assert_allclose(np.sum(g, -1), 0, atol=1e-4)


def test_a_norm_is_a_module_of_anyones_model():
    class Mine(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.linear, self.norm = nnx.Linear(4, 8, rngs=rngs), norms.RMSNorm(8)

        def __call__(self, x):
            return self.norm(self.linear(x))

    mine = Mine(nnx.Rngs(0))
    grads = nnx.grad(lambda m: jnp.sum(jnp.square(m(jnp.ones((2, 4))))))(mine)
    assert grads["norm"]["affine"]["scale"].shape == (8,)
    np.testing.assert_allclose(jnp.sum(grads["norm"]["affine"]["scale"][...]), 2 * 2 * 8, rtol=1e-5)


def test_the_kinds_are_those_of_the_settings_and_a_wrong_one_is_named():
    assert tuple(norms.NORMS) == CHOICES["norm.kind"]
    with pytest.raises(ValueError, match=r"norm\.kind 'layr' is unknown: .*layer, rms, none; did you mean 'layer'\?"):
        norms.make("layr", 4)


def test_no_norm_is_the_identity_without_parameters():
    layer, x = norms.make("none", 4, eps=1.0, gain=7.0), normal(2, 4)
    assert layer(x) is x and not jax.tree.leaves(nnx.state(layer))
