"""Optimisers that look at a matrix as a whole, on parameters that are stacked over layers."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

from normflax.model.transformer import roles

VECTORS = ("gain", "bias")
"""Roles whose parameters are vectors, however many of them are stacked."""


def each_matrix(choose: Callable[[str], optax.GradientTransformation]) -> optax.GradientTransformation:
    """The transformation `choose(role)` on every single matrix or vector of a Transformer's parameters.

    Those of the blocks are stacked [L, …], and q, k and v may be one array [L, D, 3, D]. What reads a leaf's shape, its length or
    its singular values would take that for one thing: here each of its matrices is updated as if it were alone.
    """

    def init(params: nnx.State) -> list[Any]:
        found = []
        for role, axes, value in _leaves(params):
            start = choose(role).init
            for axis in reversed(axes):
                start = jax.vmap(start, in_axes=axis)
            found.append(start(value))
        return found

    def update(gradients: nnx.State, memory: list[Any], params: nnx.State | None = None):
        assert params is not None
        new, kept = [], []
        for (role, axes, value), gradient, state in zip(_leaves(params), jax.tree.leaves(gradients), memory, strict=True):
            step = choose(role).update
            for axis in reversed(axes):
                step = jax.vmap(step, in_axes=(axis, 0, axis), out_axes=(axis, 0))
            direction, state = step(gradient, state, value)
            new.append(direction)
            kept.append(state)
        return jax.tree.unflatten(jax.tree.structure(gradients), new), kept

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _leaves(params: nnx.State) -> list[tuple[str, tuple[int, ...], jax.Array]]:
    """Role, the axes to take apart one after the other (each as it is counted once those before it are gone), and value."""
    found = []
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (path, value), role in zip(leaves, jax.tree.leaves(roles(params)), strict=True):
        if role in VECTORS:
            axes = (0,) * (value.ndim - 1)
        else:
            axes = ((0,) if path[0].key == "blocks" else ()) + ((1,) if role == "qkv" else ())
        found.append((role, axes, value))
    return found
