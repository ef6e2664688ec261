"""The gradient with respect to the stream, read on its way back and never stored."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from normflax.axes import Scalar, Stream


@jax.custom_vjp
def watch(x: Stream, slot: Scalar) -> Stream:
    """The identity on x, whose backward pass leaves ‖∂ℓ/∂x‖² as the gradient of `slot`.

    Differentiating in slots [S + 1] beside the parameters gives one number per state: memory O(S), nothing kept per token.
    x [B, T, D]; slot [], whose value is never read.
    """
    return x


def _forward(x, slot):
    return x, None


def _backward(_, cotangent):
    seen = jax.lax.optimization_barrier(cotangent).astype(jnp.float32)
    return cotangent, jnp.sum(jnp.square(seen))


watch.defvjp(_forward, _backward)


def activation_gradients(squares: Float[Array, "states"], valid: Scalar, positions: int) -> dict[str, Float[Array, "states"]]:
    """M05 from what the slots hold: the whole gradient's length, and its rms times the number of valid targets.

    `positions` is B·T·D, the number of entries of a state.
    """
    return {"grad_frobenius": jnp.sqrt(squares), "grad_rms": valid * jnp.sqrt(squares / positions)}
