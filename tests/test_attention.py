"""Attention and FFN branches: masks, rotary positions, storage of q, k and v, and half precision."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref
from models import quick

from normflax.model.attention import MASKS, SelfAttention, attend, rotate
from normflax.model.ffn import FeedForward
from normflax.model.norms import Identity

B, H, T, K, D = 2, 2, 4, 4, 8


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def heads(dtype=jnp.float32) -> list[jax.Array]:
    return [jnp.asarray(normal(B, H, T, K, seed=seed), dtype) for seed in range(3)]


def spelled_out(q, k, v, mask) -> np.ndarray:
    """Attention with a loop over queries; zeros for a query without keys."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    for t in range(q.shape[2]):
        keys = np.flatnonzero(mask[t])
        if len(keys):
            weights = ref.softmax(np.einsum("bhk,bhsk->bhs", q[:, :, t], k[:, :, keys]) / np.sqrt(q.shape[-1]))
            out[:, :, t] = np.einsum("bhs,bhsk->bhk", weights, v[:, :, keys])
    return out


@quick
def attended(q, k, v, mask) -> tuple[jax.Array, tuple]:
    """Attention, and the gradients of its sum."""
    y, pull = jax.vjp(lambda q, k, v: attend(q, k, v, mask), q, k, v)
    return y, pull(jnp.ones_like(y))


# ── attend ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 3e-2), (jnp.float16, 4e-3)])
def test_a_query_that_sees_no_key_gives_zeros(dtype, tolerance: float):
    """A-11: row 2 of four sees nothing; the others are as without it, and every gradient is finite."""
    mask = np.tri(T, dtype=bool)
    mask[2] = False
    q, k, v = heads(dtype)
    y, gradients = attended(q, k, v, jnp.asarray(mask))
    assert y.dtype == dtype and (y[:, :, 2] == 0).all()
    np.testing.assert_allclose(np.asarray(y, np.float64), spelled_out(q, k, v, mask), atol=tolerance)
    whole, rest = attended(q, k, v, MASKS["causal"](T))[0], np.array([0, 1, 3])
    np.testing.assert_array_equal(np.asarray(y)[:, :, rest], np.asarray(whole)[:, :, rest])
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in gradients)
    assert (np.asarray(gradients[0])[:, :, 2] == 0).all()


def test_the_mask_lets_a_query_see_itself_and_what_came_before():
    """A-12: neither dropped, inverted nor shifted."""
    np.testing.assert_array_equal(MASKS["causal"](3), [[True, False, False], [True, True, False], [True, True, True]])


def test_weights_of_unequal_keys_are_a_softmax():
    q, k, v = heads()
    for mask in (np.tri(T, dtype=bool), np.ones((T, T), bool)):
        np.testing.assert_allclose(attended(q, k, v, jnp.asarray(mask))[0], spelled_out(q, k, v, mask), atol=2e-6)


@pytest.mark.parametrize("size", [1e4, -1e4, 1e15])
def test_large_scores_are_finite_and_pick_the_largest(size: float):
    q = jnp.full((1, 1, 3, 1), size, jnp.float32)
    k = jnp.array([1.0, 3.0, 2.0]).reshape(1, 1, 3, 1)
    v = jnp.array([10.0, 20.0, 30.0]).reshape(1, 1, 3, 1)
    y, gradients = attended(q, k, v, MASKS["causal"](3))
    np.testing.assert_allclose(y[0, 0, :, 0], [10, 20, 20] if size > 0 else [10, 10, 10])
    assert all(np.isfinite(g).all() for g in gradients)


# ── Rotary positions ────────────────────────────────────────────────────────────────────────────────────────────────


def test_rotation_is_the_references():
    x = normal(2, 5, 3, 8)  # [B, T, H, K] there, [B, H, T, K] here
    turned = rotate(jnp.asarray(x.transpose(0, 2, 1, 3), jnp.float32))
    np.testing.assert_allclose(turned, ref.rotate(x).transpose(0, 2, 1, 3), atol=2e-6)


def test_scores_depend_on_the_distance_alone():
    """The same q and k at every position: q_t · k_s is a function of t - s, and lengths stay."""
    q, k = (rotate(jnp.broadcast_to(jnp.asarray(normal(8, seed=seed), jnp.float32), (6, 8))) for seed in range(2))
    scores = np.asarray(q @ k.T)
    for distance in range(-4, 5):
        np.testing.assert_allclose(np.diag(scores, distance), scores.diagonal(distance)[0], rtol=1e-5)
    assert np.ptp(scores[0]) > 0.1
    np.testing.assert_allclose(jnp.linalg.norm(q, axis=-1), np.linalg.norm(normal(8)), rtol=1e-6)


def test_far_angles_survive_half_precision():
    """A-14: at position 1023 of a bfloat16 model cos and sin are those of a float64 table."""
    x = jnp.concatenate([jnp.ones((1024, 32)), jnp.zeros((1024, 32))], -1).astype(jnp.bfloat16)
    turned = rotate(x)
    assert turned.dtype == jnp.bfloat16
    angle = np.arange(1024)[:, None] * 10_000.0 ** (-np.arange(32) / 32)
    table = np.concatenate([np.cos(angle), np.sin(angle)], -1)
    np.testing.assert_allclose(np.asarray(turned, np.float64), table, atol=5e-3)


# ── The branches ────────────────────────────────────────────────────────────────────────────────────────────────────

GAINS = {role: jnp.float32(g) for role, g in zip(("q", "k", "v", "out"), (1.0, 1.5, 0.25, 0.5), strict=True)}
GAINS |= {"up": jnp.float32(0.5), "gate": jnp.float32(1.0), "down": jnp.float32(2.0)}


def attention(fused: bool, **options: Any) -> SelfAttention:
    shared = {
        "heads": 2,
        "groups": 2,
        "rope": True,
        "mask": "causal",
        "bias": True,
        "q_norm": Identity(),
        "k_norm": Identity(),
        "base": "xavier_normal",
        "std": jnp.float32(0.02),
    }
    return quick(lambda key: SelfAttention(key, GAINS, D, fused=fused, **shared | options))(jax.random.key(0))


def test_fused_and_apart_are_one_function_at_the_start():
    """One draw: q, k and v have the same numbers, each with its own gain, however they are stored."""
    fused, apart = attention(True), attention(False)
    assert fused.qkv.shape == (D, 3, D) and not hasattr(fused, "q") and not hasattr(apart, "qkv")
    for i, role in enumerate("qkv"):
        np.testing.assert_array_equal(fused.qkv[...][:, i], getattr(apart, role)[...])
    x = jnp.asarray(normal(B, T, D), jnp.float32)
    np.testing.assert_allclose(fused(x), apart(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_biases_of_q_k_and_v_reach_their_own(fused: bool):
    layer, x = attention(fused, rope=False), jnp.asarray(normal(B, T, D), jnp.float32)
    before = layer.project(x)
    for i, role in enumerate("qkv"):
        shift = jnp.asarray(normal(D, seed=i), jnp.float32)
        if fused:
            layer.qkv_bias[...] = jnp.zeros((3, D)).at[i].set(shift)
        else:
            for other in "qkv":
                getattr(layer, f"{other}_bias")[...] = shift if other == role else jnp.zeros(D)
        for j, (new, old) in enumerate(zip(layer.project(x), before, strict=True)):
            moved = np.broadcast_to(np.asarray(shift).reshape(1, 2, 1, K), new.shape) if i == j else np.zeros(new.shape)
            np.testing.assert_allclose(new - old, moved, atol=2e-6)


def test_only_queries_and_keys_are_turned():
    layer, flat = attention(True), attention(True, rope=False)
    x = jnp.asarray(normal(B, T, D), jnp.float32)
    for turned, plain, role in zip(layer.project(x), flat.project(x), "qkv", strict=True):
        np.testing.assert_allclose(turned, plain if role == "v" else rotate(plain), atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("form", "roles"), [("gelu", {"up", "down"}), ("swiglu", {"up", "gate", "down"})])
def test_ffn_is_the_references(form: str, roles: set[str], bias: bool):
    layer = FeedForward(jax.random.key(0), GAINS, D, 3, form=form, bias=bias, base="xavier_normal", std=jnp.float32(0.02))
    params = {}
    for role in roles:
        params[role] = np.asarray(getattr(layer, role)[...])
        assert (getattr(layer, f"{role}_bias") is not None) == bias
        if bias:
            params[f"{role}_bias"] = normal(params[role].shape[1])
            getattr(layer, f"{role}_bias")[...] = jnp.asarray(params[f"{role}_bias"], jnp.float32)
    x = normal(B, T, D)
    expected = ref.feedforward(params, x, ref.Spec(depth=1, width=D, heads=1, ffn=form))
    np.testing.assert_allclose(layer(jnp.asarray(x, jnp.float32)), expected, rtol=1e-5, atol=1e-6)
