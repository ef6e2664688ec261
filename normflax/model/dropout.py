"""Dropout whose rate is traced, and whose masks depend on nothing but a key."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from normflax.axes import Key, Scalar
from normflax.model.init import named


class Dropout(NamedTuple):
    """x · m / (1 - p) with m ~ Bernoulli(1 - p), for a key and a rate p in [0, 1).

    What computes the same thing again, as the backward pass does under remat, draws the same mask from the same key.
    Srivastava et al. 2014, J. Mach. Learn. Res. 15:1929, section 10 (the inverted form).
    """

    key: Key
    rate: Scalar

    def at(self, name: str) -> "Dropout":
        """The dropout of one place."""
        return Dropout(named(self.key, name), self.rate)

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        kept = jax.random.bernoulli(self.key, 1 - self.rate, x.shape)
        return jnp.where(kept, x / (1 - self.rate).astype(x.dtype), jnp.zeros((), x.dtype))


def dropped(x: Float[Array, "*shape"], dropout: Dropout | None, name: str) -> Float[Array, "*shape"]:
    """x with the dropout of place `name`; x itself where there is none."""
    return x if dropout is None else dropout.at(name)(x)
