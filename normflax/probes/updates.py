"""Gradients and updates of the branch matrices, by block and role."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from normflax.axes import Scalar

Matrices = dict[str, Float[Array, "L I O"]]
PerRole = dict[str, Float[Array, "L"]]


def squares(matrices: Matrices) -> PerRole:
    """Σ W² of every block's matrix, in float32."""
    return {role: jnp.sum(jnp.square(w.astype(jnp.float32)), axis=(1, 2)) for role, w in matrices.items()}


def of_gradients(gradients: PerRole, sizes: dict[str, int]) -> dict[str, PerRole | Float[Array, "L"]]:
    """M06, M06b and M06d from the squares of the gradients and the number of entries of a matrix, by role."""
    total = sum(gradients.values())
    return {
        "grad_matrix": {role: jnp.sqrt(g) for role, g in gradients.items()},
        "grad_matrix_rms": {role: jnp.sqrt(g / sizes[role]) for role, g in gradients.items()},
        "grad_block": jnp.sqrt(total),
    }


def norm_of(gradients: PerRole) -> Scalar:
    """M09 over the branch matrices alone."""
    return jnp.sqrt(jnp.sum(sum(gradients.values())))


def of_updates(before: Matrices, update: Matrices) -> dict[str, PerRole]:
    """M26: the update's length over the matrix's before it, and the update's root mean square."""
    moved, size = squares(update), squares(before)
    return {
        "update_ratio": {role: jnp.sqrt(moved[role] / size[role]) for role in moved},
        "update_rms": {role: jnp.sqrt(moved[role] / (w.shape[1] * w.shape[2])) for role, w in update.items()},
    }
