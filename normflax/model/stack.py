"""The stack: stacked blocks [L, …] and one scan over them, so that a program's size does not depend on depth."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from normflax.axes import Stream
from normflax.model.block import Block
from normflax.model.dropout import Dropout
from normflax.model.placements import KINDS, Scales
from normflax.probes.observer import Observer

REMAT = {
    "none": lambda step: step,
    "full": lambda step: jax.checkpoint(step, prevent_cse=False),
    "dots": lambda step: jax.checkpoint(step, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable, prevent_cse=False),
}
"""What the backward pass computes again: nothing, all of a block, or all but its products with weights (the fastest on CPU)."""

PerLayer = Float[Array, "L kinds"]


def of_kind(scales: Scales, i: int) -> Scales:
    """The scales of one sublayer of a block."""
    return Scales(*(scale[i] for scale in scales))


def run(
    blocks: Block,
    x: Stream,
    scales: Scales,
    *,
    sites: tuple[str, ...],
    remat: str,
    observer: Observer | None = None,
    slots: PerLayer | None = None,
    dropout: Dropout | None = None,
) -> tuple[Stream, dict[str, Any]]:
    """The stream after every block, and what the observer saw.

    x [B, T, D]; scales and slots [L, kinds] are data of the scan and may be traced; every block has a dropout key of its own.
    Without an observer the second result is empty; with one it is its statistics: of states and sublayers [S] in the order in
    which the stream meets them, of attention [L].
    """
    graph, weights = nnx.split(blocks)
    keys = None if dropout is None else jax.random.split(dropout.key, scales.skip.shape[0])

    def step(x, layer):
        weights, scales, slots, key = layer
        block, entry, seen, attention = nnx.merge(graph, weights), x, [], {}
        for i, kind in enumerate(KINDS):
            drop = None if dropout is None else Dropout(key, dropout.rate).at(kind)
            x, wires = getattr(block, kind)(x, entry, of_kind(scales, i), drop)
            if observer is not None:
                x, state = observer.state(x, slots[i])
                seen.append({**state, **observer.sublayer(wires, sites)})
                if kind == "attention":
                    attention = observer.attention(block.attention.branch, wires["u"])
        return x, (jax.tree.map(lambda *s: jnp.stack(s), *seen) if seen else {}, attention)

    x, (seen, attention) = jax.lax.scan(REMAT[remat](step), x, (weights, scales, slots, keys))
    return x, jax.tree.map(jnp.ravel, seen) | attention


def entries(blocks: Block, x: Stream, scales: Scales) -> tuple[Stream, Float[Array, "L B T D"]]:
    """The stream after every block, and what each block was given; without dropout."""
    graph, weights = nnx.split(blocks)

    def step(x, layer):
        weights, scales = layer
        block, entry = nnx.merge(graph, weights), x
        for i, kind in enumerate(KINDS):
            x, _ = getattr(block, kind)(x, entry, of_kind(scales, i))
        return x, entry

    return jax.lax.scan(step, x, (weights, scales))


def stacked(keys: Any, gains: dict[str, Float[Array, "L"]], make_block) -> Block:
    """L blocks as one module whose parameters lead with the layer axis: block l from keys[l] and {role: gains[role][l]}."""
    return nnx.vmap(make_block, in_axes=(0, 0))(keys, gains)
