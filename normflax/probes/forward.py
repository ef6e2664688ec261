"""Statistics of the stream and of a sublayer's wires, in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from normflax.axes import Logits, Scalar, Stream


def aside(x: Stream) -> Float[Array, "B T D"]:
    """x in float32 as something only probes look at.

    The barrier keeps the compiler from fusing a probe's reduction into the computation it watches, which would move its bits.
    """
    return jax.lax.optimization_barrier(jax.lax.stop_gradient(x)).astype(jnp.float32)


def length(x: Stream) -> Float[Array, "B T"]:
    """Euclidean length of every token's vector."""
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=-1))


def of_state(x: Stream) -> dict[str, Scalar]:
    """M01, M02 and M04 of one state of the stream."""
    x = aside(x)
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return {
        "second_moment": jnp.mean(jnp.square(x)),
        "variance": jnp.mean(jnp.square(centred)),
        "peak": jnp.max(jnp.abs(x)),
    }


def of_logits(logits: Logits) -> dict[str, Scalar]:
    """M25: of ln Z = logsumexp(logits) the mean and the root mean square, and the mean logit."""
    logits = jax.lax.optimization_barrier(jax.lax.stop_gradient(logits))
    log_z = jax.nn.logsumexp(logits, axis=-1)
    return {
        "log_z": jnp.mean(log_z),
        "log_z_rms": jnp.sqrt(jnp.mean(jnp.square(log_z))),
        "mean_logit": jnp.mean(logits),
    }


def norm_input(x: Stream) -> Scalar:
    """M03 of one norm: mean length of its input over √D."""
    return jnp.mean(length(aside(x))) / jnp.sqrt(jnp.float32(x.shape[-1]))


def branch_ratio(wires: dict[str, Stream]) -> Scalar:
    """M22 of one sublayer."""
    return jnp.mean(length(aside(wires["written"])) / length(aside(wires["skip"])))
