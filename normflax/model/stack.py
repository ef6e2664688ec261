"""The stack: stacked blocks [L, …] and one scan over them, so that a program's size does not depend on depth."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from normflax.axes import Stream
from normflax.model.block import Block
from normflax.model.placements import KINDS
from normflax.probes.observer import Observer

REMAT = {
    "none": lambda step: step,
    "full": lambda step: jax.checkpoint(step, prevent_cse=False),
    "dots": lambda step: jax.checkpoint(step, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable, prevent_cse=False),
}
"""What the backward pass computes again: nothing, all of a block, or all but its products with weights (the fastest on CPU)."""

Scales = Float[Array, "L kinds"]


def run(
    blocks: Block,
    x: Stream,
    skip: Scales,
    branch: Scales,
    *,
    sites: tuple[str, ...],
    remat: str,
    observer: Observer | None = None,
    slots: Float[Array, "L kinds"] | None = None,
) -> tuple[Stream, Any]:
    """The stream after every block, and what the observer saw.

    x [B, T, D]; skip and branch scales [L, kinds] and slots [L, kinds] are data of the scan and may be traced. Without an
    observer the second result is None; with one it is its statistics, each [S] in the order in which the stream meets them.
    """
    graph, weights = nnx.split(blocks)

    def step(x, layer):
        weights, a, b, slots = layer
        block, entry, seen = nnx.merge(graph, weights), x, []
        for i, kind in enumerate(KINDS):
            x, wires = getattr(block, kind)(x, entry, a[i], b[i])
            if observer is not None:
                x, state = observer.state(x, slots[i])
                seen.append({**state, **observer.sublayer(wires, sites)})
        return x, jax.tree.map(lambda *s: jnp.stack(s), *seen) if seen else None

    x, seen = jax.lax.scan(REMAT[remat](step), x, (weights, skip, branch, slots))
    return x, jax.tree.map(jnp.ravel, seen)


def stacked(keys: Any, gains: dict[str, Float[Array, "L"]], make_block) -> Block:
    """L blocks as one module whose parameters lead with the layer axis: block l from keys[l] and {role: gains[role][l]}."""
    return nnx.vmap(make_block, in_axes=(0, 0))(keys, gains)
