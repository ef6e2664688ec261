"""Base initialisers: the standard deviation of a weight before its role's gain, and the named keys that draw it."""

from collections.abc import Callable
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from normflax.axes import Key, Scalar

BASES: dict[str, Callable[[int, int, Any], Any]] = {
    "xavier_normal": lambda fan_in, fan_out, std: (2 / (fan_in + fan_out)) ** 0.5,
    "normal": lambda fan_in, fan_out, std: std,
}
"""Name -> standard deviation from (fan in, fan out, model.init_std). Glorot and Bengio 2010, equation 12; GPT-2."""


def named(key: Key, name: str) -> Key:
    """The key that belongs to `name`: the same in every process and whatever else is drawn."""
    return jax.random.fold_in(key, crc32(name.encode()))


def weight(key: Key, role: str, shape: tuple[int, int], base: str, std: Scalar, gain: Scalar) -> Float[Array, "I O"]:
    """A matrix [fan in, fan out] ~ Normal(0, (gain · base std)²), drawn from the key of its role."""
    scale = BASES[base](*shape, std)
    return gain * (scale * jax.random.normal(named(key, role), shape, jnp.float32))


def zeros(role: str, *shape: int) -> nnx.Param:
    """A bias of the given role, at zero."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), role=role)


def affine(x: Float[Array, "B T I"], w: nnx.Param, c: nnx.Param | None) -> Float[Array, "B T O"]:
    """x W + c. The rows are flattened first: one large matrix product is what every backend does best."""
    y = (x.reshape(-1, x.shape[-1]) @ w[...]).reshape(*x.shape[:-1], -1)
    return y if c is None else y + c[...].reshape(1, 1, -1)
