"""Self-attention, with its three projections stored fused or apart."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from normflax.axes import Key, Scalar, Stream
from normflax.model import init
from normflax.model.dropout import Dropout, dropped
from normflax.model.placements import ATTENTION_ROLES

Heads = Float[Array, "B H T K"]
Scores = Float[Array, "B H T T"]
Mask = Bool[Array, "T T"]


def scores_of(q: Heads, k: Heads) -> Scores:
    """q kᵀ / √K in float32, before the mask."""
    return jnp.einsum("bhqk,bhsk->bhqs", q * q.shape[-1] ** -0.5, k, preferred_element_type=jnp.float32)


def attend(q: Heads, k: Heads, v: Heads, mask: Mask, dropout: Dropout | None = None) -> Heads:
    """softmax(q kᵀ / √K) v over the allowed keys, and zeros for a query that may see none; the softmax is in float32.

    Shapes: q, k, v [B, H, T, K], mask [T, T] (query, key; True = allowed). The division by the softmax's sum comes after the
    product with v, which is K/T of the work, and the sum is that of all weights, dropped ones too, so that dropout acts on
    probabilities. Vaswani et al. 2017, arXiv:1706.03762, equation 1.
    """
    scores = scores_of(q, k)
    scores = jnp.where(mask[None, None], scores, jnp.finfo(scores.dtype).min)
    peak = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - peak)
    kept = dropped(weights, dropout, "weights").astype(v.dtype)
    mean = jnp.einsum("bhqs,bhsk->bhqk", kept, v, preferred_element_type=jnp.float32) / jnp.sum(weights, axis=-1, keepdims=True)
    return (mean * jnp.any(mask, axis=-1)[None, None, :, None].astype(mean.dtype)).astype(v.dtype)


MASKS = {
    "causal": lambda tokens: jnp.tril(jnp.ones((tokens, tokens), bool)),
    "bidirectional": lambda tokens: jnp.ones((tokens, tokens), bool),
}
"""Name -> which keys [T, T] a query sees: 0 … t, or all."""


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
    """Multi-head self-attention: out(concat_h softmax(q_h k_hᵀ/√K) v_h), with q_h and k_h through a norm where there is one.

    q, k, v are drawn alike (the same base standard deviation, each with its own gain and key) whether they are stored fused as
    `qkv` [D, 3, D] or apart as `q` [D, D], `k`, `v` [D, G·K]: the two are one function at initialisation. With G < H heads of
    k and v, each serves H/G heads of q next to each other (Ainslie et al. 2023, arXiv:2305.13245); they are stored apart.
    Stream [B, T, D] -> [B, T, D].
    """

    def __init__(
        self,
        key: Key,
        gains: dict[str, Array],
        width: int,
        *,
        heads: int,
        groups: int,
        rope: bool,
        mask: str,
        bias: bool,
        fused: bool,
        base: str,
        std: Scalar,
        q_norm: nnx.Module,
        k_norm: nnx.Module,
    ):
        self.heads, self.groups, self.rope, self.mask, self.fused = heads, groups, rope, mask, fused and groups == heads
        self.q_norm, self.k_norm = q_norm, k_norm
        shared = width // heads * groups
        wide = {"q": width, "k": shared, "v": shared, "out": width}
        drawn = {role: init.weight(key, role, (width, wide[role]), base, std, gains[role], width) for role in ATTENTION_ROLES}
        if self.fused:
            self.qkv = nnx.Param(jnp.stack([drawn[role] for role in "qkv"], axis=1), role="qkv")
            self.qkv_bias = init.zeros("bias", 3, width) if bias else None
        else:
            self.q, self.k, self.v = (nnx.Param(drawn[role], role=role) for role in "qkv")
            self.q_bias, self.k_bias, self.v_bias = (init.zeros("bias", wide[role]) if bias else None for role in "qkv")
        self.out = nnx.Param(drawn["out"], role="out")
        self.out_bias = init.zeros("bias", width) if bias else None

    def project(self, x: Stream) -> tuple[Heads, Heads, Heads]:
        """Queries, keys and values as they meet, each [B, H, T, K]."""
        batch, tokens, width = x.shape
        if self.fused:
            w = self.qkv[...].astype(x.dtype).reshape(width, 3 * width)
            y = (x.reshape(-1, width) @ w).reshape(batch, tokens, 3, self.heads, -1)
            if self.qkv_bias is not None:
                y = y + self.qkv_bias[...].astype(x.dtype).reshape(1, 1, 3, self.heads, -1)
            q, k, v = jnp.transpose(y, (2, 0, 3, 1, 4))
        else:
            q, k, v = (
                init.affine(x, w, c).reshape(batch, tokens, -1, width // self.heads).transpose(0, 2, 1, 3)
                for w, c in ((self.q, self.q_bias), (self.k, self.k_bias), (self.v, self.v_bias))
            )
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rope:
            q, k = rotate(q), rotate(k)
        if self.groups < self.heads:
            k, v = (jnp.repeat(x, self.heads // self.groups, axis=1) for x in (k, v))
        return q, k, v

    def __call__(self, x: Stream, dropout: Dropout | None = None) -> Stream:
        mixed = attend(*self.project(x), MASKS[self.mask](x.shape[1]), dropout)
        y = init.affine(mixed.transpose(0, 2, 1, 3).reshape(x.shape), self.out, self.out_bias)
        return dropped(y, dropout, "result")
