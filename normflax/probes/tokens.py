"""How alike the tokens of a sequence are, in float32."""

import jax.numpy as jnp

from normflax.axes import Scalar, Stream
from normflax.probes.forward import aside, length

FIELDS = ("token_cosine", "rank_one_residual", "stable_rank", "effective_rank")


def statistics(x: Stream) -> dict[str, Scalar]:
    """M18 and M19 of one state [B, T, D]; of one token, a cosine is NaN."""
    x = aside(x)
    T = x.shape[1]
    unit = x / length(x)[..., None]
    # Σ over t ≠ s of the cosines is |Σ unit|² less the T diagonal ones: no matrix of pairs.
    pairs = jnp.sum(jnp.square(jnp.sum(unit, axis=1)), axis=-1) - jnp.sum(jnp.square(unit), axis=(1, 2))
    own = x - jnp.mean(x, axis=1, keepdims=True)
    sigma = jnp.linalg.svd(x, compute_uv=False)
    p = sigma / jnp.sum(sigma, axis=-1, keepdims=True)
    entropy = -jnp.sum(p * jnp.log(jnp.where(p > 0, p, 1.0)), axis=-1)
    squares = jnp.sum(jnp.square(x), axis=(1, 2))
    return {
        "token_cosine": jnp.mean(pairs) / jnp.float32(T * (T - 1)),
        "rank_one_residual": jnp.mean(jnp.sqrt(jnp.sum(jnp.square(own), axis=(1, 2)) / squares)),
        "stable_rank": jnp.mean(squares / jnp.square(sigma[:, 0])),
        "effective_rank": jnp.mean(jnp.exp(entropy)),
    }
