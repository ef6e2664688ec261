"""A model that has made no update, read on one batch: everything that probes show there, for many seeds in one program."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from normflax.data import batches
from normflax.model.transformer import matrices
from normflax.probes import amplification, backward, beside, dependency, updates
from normflax.probes.fields import FIELDS
from normflax.train.step import global_norm, gradients, path_scales

GRADIENTS = frozenset(name for name in FIELDS if name.startswith("grad_"))
"""The fields that take a backward pass, and that theory has gradients for."""

EXPECTED_OVER = 32
"""Batches whose gradients are averaged for `grad_expected`: those of updates 0 … 31."""


def measure(static, graph, params: nnx.State, hyper, arrays) -> tuple[dict, dict]:
    """The scalars and the chosen fields of one draw of the parameters, on the batch of update 0 and without dropout.

    Scalars: loss, valid targets, and where a field of gradients is asked for grad_norm of all parameters and grad_norm_matrices of
    the branch matrices. What nobody asks for is pruned by jit: without a field of gradients there is no backward pass.
    """
    batch = batches.draw(static.task, arrays, hyper["data_seed"], jnp.int32(0), static.batch, static.tokens)
    loss, grads, (seen, squares) = gradients(graph, params, hyper, batch, fields=static.fields, parts=static.accumulate)
    per_matrix, sizes = updates.squares(matrices(grads)), {role: w[0].size for role, w in matrices(grads).items()}
    valid = jnp.sum(batch.mask.astype(jnp.float32))
    scalars = {"loss": loss, "valid": valid}
    if GRADIENTS & set(static.fields):
        scalars |= {"grad_norm": global_norm(grads), "grad_norm_matrices": updates.norm_of(per_matrix)}
    found: dict[str, Any] = {
        **seen,
        **backward.activation_gradients(squares, valid, static.batch * static.tokens * static.model.width),
        **updates.of_gradients(per_matrix, sizes),
    }
    model, scales = nnx.merge(graph, params), path_scales(hyper)
    blocks, x = model.blocks, model.embed_norm(model.embed(batch.inputs, scales.embed))
    weights = params["blocks"]
    if "amplification" in static.fields:
        change = amplification.noise(weights, batches.named_key(hyper["seed"], "probe"))
        found["amplification"] = amplification.moved(blocks, change, x, scales.stack)
    if "amplification_gradient" in static.fields:
        found["amplification_gradient"] = amplification.moved(blocks, amplification.against(grads["blocks"]), x, scales.stack)
    if "dependency" in static.fields:
        found["dependency"] = dependency.shares(blocks, x, scales.stack)
    if "angle" in static.fields:
        found["angle"] = beside.angles(model.entries(batch.inputs, scales)[0])
    if "grad_expected" in static.fields:
        found["grad_expected"] = expected(static, graph, params, hyper, arrays)
    return scalars, {name: found[name] for name in static.fields}


def expected(static, graph, params: nnx.State, hyper, arrays) -> dict[str, jax.Array]:
    """M06c: the length of the mean over batches of every matrix's gradient [L], by role. Xiong et al. 2020, figure 3."""

    def add(total, t):
        batch = batches.draw(static.task, arrays, hyper["data_seed"], t, static.batch, static.tokens)
        return jax.tree.map(jnp.add, total, gradients(graph, params, hyper, batch)[1]), None

    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), jnp.arange(EXPECTED_OVER))
    return {role: jnp.sqrt(square) / EXPECTED_OVER for role, square in updates.squares(matrices(total)).items()}
