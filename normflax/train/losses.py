"""What is minimised, and what is reported."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from normflax.axes import Logits, Mask, Scalar, Tokens

PerToken = Float[Array, "B T"]


def token_losses(logits: Logits, targets: Tokens, mask: Mask) -> PerToken:
    """Cross-entropy in nats of every valid target, and 0 elsewhere."""
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.where(mask, jax.nn.logsumexp(logits, axis=-1) - picked, 0.0)


def mean_loss(logits: Logits, targets: Tokens, mask: Mask) -> Scalar:
    """Mean cross-entropy over the valid targets; 0 where there is none."""
    valid = jnp.sum(mask.astype(jnp.float32))
    return jnp.sum(token_losses(logits, targets, mask)) / jnp.maximum(valid, 1.0)


def objectives(logits: Logits, targets: Tokens, mask: Mask, smoothing: Scalar, z: Scalar) -> PerToken:
    """What is minimised of every valid target, and 0 elsewhere, with logits o, target y, ε = `smoothing` and c = `z`:

        (1 - ε)·(ln Z - o_y) + ε·(ln Z - mean o) + c·(ln Z)²,    Z = Σ exp o

    Label smoothing mixes the target with the uniform law (Szegedy et al. 2016, arXiv:1512.00567, section 7); the z-loss holds
    ln Z near 0 (Chowdhery et al. 2022, arXiv:2204.02311, section 5). With both at 0 it is the cross-entropy.
    """
    logits = logits.astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    uniform = log_z - jnp.mean(logits, axis=-1)
    plain = token_losses(logits, targets, mask)
    return jnp.where(mask, (1 - smoothing) * plain + smoothing * uniform + z * jnp.square(log_z), 0.0)
