"""Norm layers: ordinary `nnx.Module`s over the last axis, usable in anyone's model.

Statistics are taken in float32 whatever the input, the result comes back in the input's dtype, parameters are float32. The
options change which parameters there are, never the function at initialisation: without `scale` the gain stays at its
initial value, without `bias` nothing is added.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from normflax.nearest import unknown

GainForm = Literal["w", "1+w"]


class _Affine(nnx.Module):
    """The last step of a norm: g · x̂ + c, with gain g = w or 1 + w and bias c, in float32."""

    def __init__(self, width: int, *, scale: bool, bias: bool, gain_form: GainForm, gain: float):
        self.gain, self.offset = gain, 1.0 if gain_form == "1+w" else 0.0
        stored = jnp.full(width, gain - self.offset, jnp.float32)
        self.scale = nnx.Param(stored, role="gain") if scale else None
        self.bias = nnx.Param(jnp.zeros(width, jnp.float32), role="bias") if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.scaled(x)
        return y if self.bias is None else y + self.bias[...].reshape((1,) * (x.ndim - 1) + (-1,))

    def scaled(self, x: jax.Array) -> jax.Array:
        """g · x, without the bias."""
        if self.scale is None:
            return x * self.gain
        return x * (self.scale[...] + self.offset).reshape((1,) * (x.ndim - 1) + (-1,))


class LayerNorm(nnx.Module):
    """Layer normalization, in four steps:

        μ = mean(x)    σ² = mean((x - μ)²)    x̂ = (x - μ) / √(σ² + eps)    y = g · x̂ + c

    over the last axis, with the biased variance (divisor D) taken in a second pass, eps inside the root, gain g = w (or 1 + w)
    and bias c. [2, 4, 4, 6] has mean 4 and variance 2 and becomes about [-1.41, 0, 0, 1.41].

    Shapes: x [..., D] -> [..., D] in x's dtype; w, c [D] float32. `gain` is the initial g. A constant row gives c.
    Ba, Kiros and Hinton 2016, arXiv:1607.06450, equations 3 and 4.
    """

    def __init__(
        self,
        width: int,
        *,
        eps: float = 1e-6,
        scale: bool = True,
        bias: bool = True,
        gain_form: GainForm = "w",
        gain: float = 1.0,
    ):
        self.eps = eps
        self.affine = _Affine(width, scale=scale, bias=bias, gain_form=gain_form, gain=gain)

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        centred = self._centred(x)
        return self.affine(centred * self._over(centred)).astype(x.dtype)

    def of_part(self, part: Float[Array, "*parts D"], x: Float[Array, "*batch D"]) -> Float[Array, "*parts D"]:
        """What becomes of one summand of x, or of a stack of them: g · (part - mean(part)) / √(σ² + eps) with x's σ², float32.

        The summands of x add up to the norm of x less its bias.
        """
        scale = self._over(self._centred(x))
        return self.affine.scaled(self._centred(part) * scale.reshape((1,) * (part.ndim - x.ndim) + scale.shape))

    def _centred(self, x: jax.Array) -> jax.Array:
        # Two passes: E[x²] - E[x]² loses every digit of a small spread around a large mean.
        wide = x.astype(jnp.float32)
        return wide - jnp.mean(wide, axis=-1, keepdims=True)

    def _over(self, centred: jax.Array) -> jax.Array:
        return jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + self.eps)


class RMSNorm(nnx.Module):
    """Root-mean-square normalization:

        r² = mean(x²)    y = g · x / √(r² + eps) + c

    over the last axis, eps inside the root (the paper has none), gain g = w (or 1 + w), bias c off unless asked for. The mean of
    x is kept. [2, 4, 4, 6] has r = √18.

    Shapes: x [..., D] -> [..., D] in x's dtype; w, c [D] float32. `gain` is the initial g.
    Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.
    """

    def __init__(
        self,
        width: int,
        *,
        eps: float = 1e-6,
        scale: bool = True,
        bias: bool = False,
        gain_form: GainForm = "w",
        gain: float = 1.0,
    ):
        self.eps = eps
        self.affine = _Affine(width, scale=scale, bias=bias, gain_form=gain_form, gain=gain)

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        wide = x.astype(jnp.float32)
        return self.affine(wide * self._over(wide)).astype(x.dtype)

    def of_part(self, part: Float[Array, "*parts D"], x: Float[Array, "*batch D"]) -> Float[Array, "*parts D"]:
        """What becomes of one summand of x, or of a stack of them: g · part / √(r² + eps) with x's r², float32."""
        scale = self._over(x.astype(jnp.float32))
        return self.affine.scaled(part.astype(jnp.float32) * scale.reshape((1,) * (part.ndim - x.ndim) + scale.shape))

    def _over(self, wide: jax.Array) -> jax.Array:
        return jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)


class Identity(nnx.Module):
    """No norm: y = x. What an empty site holds, and what `norm=none` puts at every site."""

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return x

    def of_part(self, part: Float[Array, "*parts D"], x: Float[Array, "*batch D"]) -> Float[Array, "*parts D"]:
        """The part itself."""
        return part


NORMS = {"layer": LayerNorm, "rms": RMSNorm, "none": Identity}


def make(kind: str, width: int, **options) -> nnx.Module:
    """A norm by its name. Raises ValueError for an unknown one."""
    if kind not in NORMS:
        raise ValueError(unknown("norm.kind", kind, NORMS))
    return Identity() if kind == "none" else NORMS[kind](width, **options)
