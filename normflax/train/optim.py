"""Optimisers, with every number traced, and who is decayed."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from normflax.axes import Scalar
from normflax.model.transformer import roles

DECAYED = frozenset({"q", "k", "v", "qkv", "out", "up", "gate", "down", "head"})
"""The roles that weight decay acts on: matrices, embeddings excepted. By role, never by rank: stacked norms have rank 2."""

Hyper = Mapping[str, Any]


def decayed(params: nnx.State) -> nnx.State:
    """True for every parameter that is decayed, in the structure of the parameters."""
    return jax.tree.map(lambda role: role in DECAYED, roles(params))


FAMILIES: dict[str, Callable[[Hyper], optax.GradientTransformation]] = {
    "adamw": lambda h: optax.chain(
        optax.scale_by_adam(h["beta1"], h["beta2"], h["eps"]), optax.add_decayed_weights(h["decay"], decayed)
    ),
    "adam": lambda h: optax.scale_by_adam(h["beta1"], h["beta2"], h["eps"]),
    "sgd": lambda h: optax.chain(optax.trace(h["momentum"]), optax.add_decayed_weights(h["decay"], decayed)),
}
"""Name -> direction of descent. The update is minus the rate times it: decay is decoupled from gradients, not from the rate.

Kingma and Ba 2015, arXiv:1412.6980, algorithm 1; Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2.
"""


def clip_factor(norm: Scalar, limit: Scalar) -> Scalar:
    """What gradients of global norm `norm` are multiplied by so that it is at most `limit`; exactly 1 below it, and for inf."""
    return jnp.where(norm > limit, limit / norm, 1.0)


def update(family: str, hyper: Hyper, rate: Scalar, gradients: nnx.State, memory, params: nnx.State):
    """What is added to the parameters, and the optimiser's next state."""
    with jax.numpy_dtype_promotion("standard"):  # optax raises the traced betas, float32, to its int32 count
        direction, memory = FAMILIES[family](hyper).update(gradients, memory, params)
    return jax.tree.map(lambda d: -rate * d, direction), memory
