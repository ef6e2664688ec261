"""Statistics of attention weights, computed beside the model."""

import jax
import jax.numpy as jnp

from normflax.axes import Scalar, Stream
from normflax.model.attention import MASKS, SelfAttention, scores_of
from normflax.probes.forward import aside

FIELDS = ("attention_entropy", "attention_entropy_share", "max_logit")


def statistics(branch: SelfAttention, u: Stream) -> dict[str, Scalar]:
    """M23 and M24 of one attention branch that reads u.

    Scores and weights are computed again from what the branch reads, behind a barrier: the backward pass shares the model's
    own, and reading those would move its bits.
    """
    q, k, _ = branch.project(aside(u).astype(u.dtype))
    mask = MASKS[branch.mask](u.shape[1])[None, None]
    scores = jnp.where(mask, scores_of(q, k), -jnp.inf)
    p = jax.nn.softmax(scores, axis=-1)
    entropy = -jnp.sum(p * jnp.log(jnp.where(p > 0, p, 1.0)), axis=-1)
    allowed = jnp.sum(mask.astype(jnp.float32), axis=-1)
    return {
        "attention_entropy": jnp.mean(entropy),
        "attention_entropy_share": jnp.mean(entropy) / jnp.mean(jnp.log(allowed)),
        "max_logit": jnp.max(scores),
    }
