"""What is read on held-out windows that are never trained on, beside a step."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from normflax.axes import Scalar, Stream

WINDOWS = 8
"""How many of the held-out windows, the first ones."""


def model_update(now: Stream, start: Stream) -> Scalar:
    """M10: mean over batch and tokens of ‖F_t - F_0‖₂/√D, for what the head reads.

    Wang et al. 2022, arXiv:2203.00555, section 4.
    """
    moved = (now - start).astype(jnp.float32)
    return jnp.mean(jnp.linalg.norm(moved, axis=-1)) / jnp.sqrt(jnp.float32(now.shape[-1]))


def sizes(now: Float[Array, "L B T D"], start: Float[Array, "L B T D"]) -> dict[str, Float[Array, "L"]]:
    """M29 of what every block leaves in the stream: mean |x_l| and mean |x_l(t) - x_l(0)|.

    Yang et al. 2022, arXiv:2203.03466, appendix D.1, over depth: Dey et al. 2025 (CompleteP), arXiv:2505.01618, figure 7.
    """
    return {
        "mean_abs": jnp.mean(jnp.abs(now.astype(jnp.float32)), axis=(1, 2, 3)),
        "mean_abs_change": jnp.mean(jnp.abs((now - start).astype(jnp.float32)), axis=(1, 2, 3)),
    }


def angles(inputs: Float[Array, "states B T D"]) -> Float[Array, "states states"]:
    """M20: (1/π) arccos cos(x_l, x_m) of every two block inputs [L + 1], mean over batch and tokens.

    One token at a time, so that memory is L². Gromov et al. 2024, arXiv:2403.17887, equation 3.
    """
    x = inputs.reshape(len(inputs), -1, inputs.shape[-1]).astype(jnp.float32)
    unit = jnp.swapaxes(x / jnp.linalg.norm(x, axis=-1, keepdims=True), 0, 1)

    def add(total, u):
        cosine = jnp.clip(u @ u.T, -1 + 1e-7, 1 - 1e-7)
        return total + jnp.arccos(cosine) / jnp.pi, None

    total, _ = jax.lax.scan(add, jnp.zeros((len(inputs), len(inputs))), unit)
    return total / len(unit)
