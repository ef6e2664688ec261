"""How far a small change of every branch matrix moves the normalised stream (M11)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from normflax.axes import Key, PerSublayer, Stream
from normflax.model.block import Block
from normflax.model.init import named
from normflax.model.placements import KINDS, Scales
from normflax.model.stack import of_kind

NOISE, AGAINST = 1e-4, 1e-6
"""The change of every entry: along signs drawn at random, and against the sign of its gradient."""

MATRICES = ("q", "k", "v", "qkv", "out", "up", "gate", "down")


def moved(blocks: Block, change: nnx.State, x: Stream, scales: Scales) -> PerSublayer:
    """Σ over batch, tokens and width of the squared change of x_k/std(x_k), to first order in the change of the weights.

    By forward differentiation inside the scan, so that memory does not grow with depth and nothing is lost to a difference of
    float32 numbers. `change` [L, …] has the structure of the blocks' parameters. Liu et al. 2020 (Admin), arXiv:2004.08249.
    """
    graph, weights = nnx.split(blocks)

    def step(carry, layer):
        (x, dx), (weights, change, scales) = carry, layer
        entry, sums = (x, dx), []
        for i, kind in enumerate(KINDS):

            def pass_through(weights, x, entry, i=i, kind=kind):
                return getattr(nnx.merge(graph, weights), kind)(x, entry, of_kind(scales, i))[0]

            x, dx = jax.jvp(pass_through, (weights, x, entry[0]), (change, dx, entry[1]))
            sums.append(jnp.sum(jnp.square(jax.jvp(unit, (x,), (dx,))[1])))
        return (x, dx), jnp.stack(sums)

    _, sums = jax.lax.scan(step, (x, jnp.zeros_like(x)), (weights, change, scales))
    return sums.ravel()


def unit(x: Stream) -> Float[Array, "B T D"]:
    """Every token over the standard deviation of its features."""
    x = x.astype(jnp.float32)
    return x / jnp.std(x, axis=-1, keepdims=True)


def noise(weights: nnx.State, key: Key) -> nnx.State:
    """± 1e-4 for every entry of a branch matrix, 0 for biases and norms; each parameter's signs from a key of its own."""
    leaves, structure = jax.tree.flatten(weights, is_leaf=_is_variable)
    drawn = [_signs(leaf, jax.random.fold_in(named(key, "amplification"), i)) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, drawn)


def against(gradient: nnx.State) -> nnx.State:
    """-1e-6 times the sign of the gradient for every entry of a branch matrix, 0 for biases and norms."""
    return jax.tree.map(
        lambda g: g.replace(-AGAINST * jnp.sign(g[...]) if g.role in MATRICES else jnp.zeros_like(g[...])),
        gradient,
        is_leaf=_is_variable,
    )


def _signs(leaf: nnx.Variable, key: Key) -> nnx.Variable:
    if leaf.role not in MATRICES:
        return leaf.replace(jnp.zeros_like(leaf[...]))
    return leaf.replace(NOISE * jax.random.rademacher(key, leaf[...].shape, jnp.float32))


def _is_variable(leaf) -> bool:
    return isinstance(leaf, nnx.Variable)
