"""Weights at initialisation: drawn from named keys, at a base standard deviation times the gain of their role."""

from collections.abc import Callable
from zlib import crc32

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from normflax.axes import Key, Scalar
from normflax.model.bases import DEVIATIONS


def _normal(key: Key, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.float32)


def _uniform(key: Key, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.uniform(key, shape, jnp.float32, -(3**0.5), 3**0.5)


def _truncated(key: Key, shape: tuple[int, ...]) -> jax.Array:
    """Cut off at two standard deviations and stretched, so that its own is 1 again."""
    return jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32) / 0.8796256610342398


DRAWS: dict[str, Callable[[Key, tuple[int, ...]], jax.Array]] = {
    "xavier_normal": _normal,
    "xavier_uniform": _uniform,
    "lecun": _normal,
    "normal": _normal,
    "truncated_normal": _truncated,
}
"""Name -> a draw of standard deviation 1; `bases.DEVIATIONS` has the standard deviation it is multiplied by."""


def named(key: Key, name: str) -> Key:
    """The key that belongs to `name`: the same in every process and whatever else is drawn."""
    return jax.random.fold_in(key, crc32(name.encode()))


def weight(
    key: Key, role: str, shape: tuple[int, int], base: str, std: Scalar, gain: Scalar, fan_out: int | None = None
) -> Float[Array, "I O"]:
    """A matrix [fan in, fan out] with mean 0 and standard deviation gain · base std, drawn from the key of its role.

    `fan_out` stands in for the matrix's own where it is part of a wider one, as the keys and values of grouped heads are.
    """
    deviation = DEVIATIONS[base](shape[0], fan_out or shape[1], std)
    return gain * (deviation * DRAWS[base](named(key, role), shape))


def zeros(role: str, *shape: int) -> nnx.Param:
    """A bias of the given role, at zero."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), role=role)


def affine(x: Float[Array, "B T I"], w: nnx.Param, c: nnx.Param | None) -> Float[Array, "B T O"]:
    """x W + c in x's dtype. The rows are flattened first: one large matrix product is what every backend does best."""
    y = (x.reshape(-1, x.shape[-1]) @ w[...].astype(x.dtype)).reshape(*x.shape[:-1], -1)
    return y if c is None else y + c[...].astype(x.dtype).reshape(1, 1, -1)
