"""Which branch outputs a state is made of (M12)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from normflax.axes import Stream
from normflax.model.block import Block
from normflax.model.placements import KINDS, Scales
from normflax.model.stack import of_kind


def shares(blocks: Block, x: Stream, scales: Scales) -> Float[Array, "sublayers states"]:
    """β_kj: the standard deviation over the width of the part that came from sublayer j (0: the embedding) in the state after
    sublayer k, over that of the state; mean over batch and tokens; 0 for j > k.

    A state is the sum of its parts: what a sublayer wrote, times every skip scale and every norm's factor since. Norms act on a
    part with the statistics of the whole, and their biases belong to no part. Memory is S·B·T·D.
    Liu et al. 2020 (Admin), arXiv:2004.08249, section 4.1.
    """
    graph, weights = nnx.split(blocks)
    S = 2 * scales.skip.shape[0]
    parts = jnp.zeros((S + 1, *x.shape), jnp.float32).at[0].set(x.astype(jnp.float32))

    def step(carry, data):
        (x, parts), (weights, scales, first) = carry, data
        block, entry, entered, found = nnx.merge(graph, weights), x, parts, []
        for i, kind in enumerate(KINDS):
            layer, k = getattr(block, kind), first + i
            before = layer.pre.of_part(parts, x) if layer.skip_from == "u" else entered if layer.skip_from == "block" else parts
            x, wires = layer(x, entry, of_kind(scales, i))
            parts = (scales.skip[i] * before).at[k].set(wires["written"])
            parts = layer.post.of_part(parts, wires["post"])
            spread = jnp.std(parts, axis=-1) / jnp.std(x.astype(jnp.float32), axis=-1)[None]
            found.append(jnp.mean(spread, axis=(1, 2)))
        return (x, parts), jnp.stack(found)

    first = 1 + jnp.arange(0, S, 2)
    _, found = jax.lax.scan(step, (x, parts), (weights, scales, first))
    return found.reshape(S, S + 1)
