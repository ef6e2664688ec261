"""Causal self-attention, with its three projections stored fused or apart."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from normflax.axes import Key, Scalar, Stream
from normflax.model import init
from normflax.model.placements import ATTENTION_ROLES

Heads = Float[Array, "B H T K"]


def attend(q: Heads, k: Heads, v: Heads, mask: Bool[Array, "T T"]) -> Heads:
    """softmax(q kᵀ / √K) v over the allowed keys, and zeros for a query that may see none.

    Shapes: q, k, v [B, H, T, K], mask [T, T] (query, key; True = allowed). The division by the softmax's sum comes after the
    product with v, which is K/T of the work; Vaswani et al. 2017, arXiv:1706.03762, equation 1.
    """
    scores = jnp.einsum("bhqk,bhsk->bhqs", q * q.shape[-1] ** -0.5, k)
    scores = jnp.where(mask[None, None], scores, jnp.finfo(scores.dtype).min)
    peak = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - peak)
    mean = jnp.einsum("bhqs,bhsk->bhqk", weights, v) / jnp.sum(weights, axis=-1, keepdims=True)
    return mean * jnp.any(mask, axis=-1)[None, None, :, None].astype(mean.dtype)


def causal(tokens: int) -> Bool[Array, "T T"]:
    """Query t sees keys 0..t."""
    return jnp.tril(jnp.ones((tokens, tokens), bool))


def rotate(x: Float[Array, "*batch T K"]) -> Float[Array, "*batch T K"]:
    """Rotary positions: features i and i + K/2 of token t turn together by the angle t · 10000^(-2i/K).

    Angles are float32 whatever x is. Su et al. 2021, arXiv:2104.09864, equation 34, with halves instead of neighbours paired.
    """
    tokens, width = x.shape[-2:]
    frequency = 10000.0 ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angle = jnp.arange(tokens, dtype=jnp.float32)[:, None] * frequency[None, :]
    angle = angle.reshape((1,) * (x.ndim - 2) + angle.shape)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)


class SelfAttention(nnx.Module):
    """Multi-head causal self-attention: out(concat_h softmax(q_h k_hᵀ/√K) v_h).

    q, k, v are drawn alike (the same base standard deviation, each with its own gain and key) whether they are stored fused as
    `qkv` [D, 3, D] or apart as `q`, `k`, `v` [D, D]: the two are one function at initialisation. Stream [B, T, D] -> [B, T, D].
    """

    def __init__(
        self,
        key: Key,
        gains: dict[str, Array],
        width: int,
        *,
        heads: int,
        rope: bool,
        bias: bool,
        fused: bool,
        base: str,
        std: Scalar,
    ):
        self.heads, self.rope, self.fused = heads, rope, fused
        drawn = {role: init.weight(key, role, (width, width), base, std, gains[role]) for role in ATTENTION_ROLES}
        if fused:
            self.qkv = nnx.Param(jnp.stack([drawn[role] for role in "qkv"], axis=1), role="qkv")
            self.qkv_bias = init.zeros("bias", 3, width) if bias else None
        else:
            self.q, self.k, self.v = (nnx.Param(drawn[role], role=role) for role in "qkv")
            self.q_bias, self.k_bias, self.v_bias = (init.zeros("bias", width) if bias else None for _ in "qkv")
        self.out = nnx.Param(drawn["out"], role="out")
        self.out_bias = init.zeros("bias", width) if bias else None

    def project(self, x: Stream) -> tuple[Heads, Heads, Heads]:
        """Queries, keys and values, each [B, H, T, K]."""
        batch, tokens, width = x.shape
        if self.fused:
            y = (x.reshape(-1, width) @ self.qkv[...].reshape(width, 3 * width)).reshape(batch, tokens, 3, self.heads, -1)
            if self.qkv_bias is not None:
                y = y + self.qkv_bias[...].reshape(1, 1, 3, self.heads, -1)
            q, k, v = jnp.transpose(y, (2, 0, 3, 1, 4))
        else:
            q, k, v = (
                init.affine(x, w, c).reshape(batch, tokens, self.heads, -1).transpose(0, 2, 1, 3)
                for w, c in ((self.q, self.q_bias), (self.k, self.k_bias), (self.v, self.v_bias))
            )
        return (rotate(q), rotate(k), v) if self.rope else (q, k, v)

    def __call__(self, x: Stream) -> Stream:
        mixed = attend(*self.project(x), causal(x.shape[1]))
        return init.affine(mixed.transpose(0, 2, 1, 3).reshape(x.shape), self.out, self.out_bias)
