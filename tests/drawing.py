"""Batches and levels as tests look at them: compiled once a shape, and on the host."""

import jax
import jax.numpy as jnp
import numpy as np

from normflax.data import levels
from normflax.data.batches import Batch, Loaded, draw, heldout

compiled = jax.jit(draw, static_argnames=("task", "batch", "tokens"))


def drawn(loaded: Loaded, seed: int = 0, step: int = 0, batch: int = 4, tokens: int = 16) -> Batch:
    return Batch(*jax.device_get(compiled(loaded.task, loaded.arrays, jnp.uint32(seed), jnp.int32(step), batch, tokens)))


def levels_of(loaded: Loaded, windows: int, tokens: int) -> levels.Levels:
    return levels.levels(loaded.source, *map(np.asarray, heldout(loaded, windows, tokens)))


def same(a, b) -> bool:
    return all((x == y).all() for x, y in zip(jax.device_get(a), jax.device_get(b), strict=True))
