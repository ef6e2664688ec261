"""Optimisers, with every number traced, and who is decayed."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import nnx

from normflax.axes import Scalar
from normflax.model.transformer import roles
from normflax.train.each_matrix import each_matrix

DECAYED = frozenset({"q", "k", "v", "qkv", "out", "up", "gate", "down", "head"})
"""The roles that weight decay acts on: matrices, embeddings excepted. By role, never by rank: stacked norms have rank 2."""

Hyper = Mapping[str, Any]


def decayed(params: nnx.State) -> nnx.State:
    """True for every parameter that is decayed, in the structure of the parameters."""
    return jax.tree.map(lambda role: role in DECAYED, roles(params))


MATRICES = DECAYED - {"head"}
"""The roles that Muon orthogonalises: the matrices of the branches."""


def _decoupled(direction: optax.GradientTransformation, h: Hyper) -> optax.GradientTransformation:
    return optax.chain(direction, optax.add_decayed_weights(h["decay"], decayed))


def _adam(h: Hyper) -> optax.GradientTransformation:
    return optax.scale_by_adam(h["beta1"], h["beta2"], h["eps"])


def _adafactor(h: Hyper) -> optax.GradientTransformation:
    """Row and column means of g² + eps for every matrix, whatever its size, with weight 1 - t^-memory of the past at update t from
    1 on; rms of an update at most `update_clip`; no momentum, no relative step and no scaling by the parameters."""
    second_moment = optax.scale_by_factored_rms(decay_rate=h["memory"], min_dim_size_to_factor=1, epsilon=h["eps"])
    return optax.chain(second_moment, optax.clip_by_block_rms(h["update_clip"]))


def _muon(h: Hyper) -> optax.GradientTransformation:
    """Five Newton-Schulz steps on Nesterov's momentum, which is without the bias of its start. An orthogonalised matrix has rms
    max(I, O)^-1/2; times 0.2·√max(I, O) it is 0.2, about that of an update of Adam, so that one rate serves both."""
    orthogonal = optax.contrib.scale_by_muon(beta=h["momentum"])
    return optax.chain(orthogonal, optax.stateless_with_tree_map(lambda u, _: 0.2 * max(jnp.shape(u)) ** 0.5 * u))


FAMILIES: dict[str, Callable[[Hyper], optax.GradientTransformation]] = {
    "adamw": lambda h: _decoupled(_adam(h), h),
    "adam": _adam,
    "sgd": lambda h: _decoupled(optax.trace(h["momentum"]), h),
    "lion": lambda h: _decoupled(optax.scale_by_lion(h["beta1"], h["beta2"]), h),
    "adafactor": lambda h: _decoupled(each_matrix(lambda role: _adafactor(h)), h),
    "muon": lambda h: _decoupled(each_matrix(lambda role: _muon(h) if role in MATRICES else _adam(h)), h),
}
"""Name -> direction of descent. The update is minus the rate times it: decay is decoupled from gradients, not from the rate.

Kingma and Ba 2015, arXiv:1412.6980, algorithm 1; Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2; Chen et al. 2023,
arXiv:2302.06675, algorithm 2 (lion); Shazeer and Stern 2018, arXiv:1804.04235, algorithm 4 (adafactor); Jordan et al. 2024 and
Liu et al. 2025, arXiv:2502.16982, section 2.2 (muon).
"""


def clip_factor(norm: Scalar, limit: Scalar) -> Scalar:
    """What gradients of global norm `norm` are multiplied by so that it is at most `limit`; exactly 1 below it, and for inf."""
    return jnp.where(norm > limit, limit / norm, 1.0)


def update(family: str, hyper: Hyper, rate: Scalar, gradients: nnx.State, memory, params: nnx.State):
    """What is added to the parameters, and the optimiser's next state."""
    with jax.numpy_dtype_promotion("standard"):  # optax raises the traced betas, float32, to its int32 count
        direction, memory = FAMILIES[family](hyper).update(gradients, memory, params)
    return jax.tree.map(lambda d: -rate * d, direction), memory
