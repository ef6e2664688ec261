"""Learning rates as pure functions of the update's number, all of whose numbers may be traced."""

from collections.abc import Callable

import jax.numpy as jnp

from normflax.axes import Count, Scalar

SHAPES: dict[str, Callable[[Scalar, Scalar], Scalar]] = {
    "constant": lambda done, final: jnp.ones_like(done),
    "cosine": lambda done, final: final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * done)),
}
"""Name -> share of the peak after `done` (0 … 1) of the updates that follow the warm-up, ending at `final`."""


def rate(name: str, update: Count, *, peak: Scalar, warmup: Count, total: Count, final: Scalar) -> Scalar:
    """The rate that update t (first t = 0) uses:

        peak · min(1, (t + 1)/W) · shape((t - W)/(total - W))

    with W warm-up updates counted inside `total`; W = 0 means none and equals W = 1. Past the total the shape stays at its end.
    """
    t, w = update.astype(jnp.float32), jnp.where(warmup > 1, warmup, 0).astype(jnp.float32)
    rising = jnp.minimum(1.0, (t + 1) / jnp.maximum(w, 1.0))
    done = jnp.clip((t - w) / jnp.maximum(total.astype(jnp.float32) - w, 1.0), 0.0, 1.0)
    return peak * rising * SHAPES[name](done, final)
