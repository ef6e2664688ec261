"""One update as a pure function, and the three programs made of it: many updates, one probed update, evaluation.

The order inside update t: the loss and its gradient on batch t at the parameters before it, the norms of that gradient, clipping,
the optimiser, and the new parameters if everything is finite, else the old ones.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from normflax.axes import Count, Logits, Mask, Scalar, Tokens
from normflax.data import batches
from normflax.model.transformer import matrices
from normflax.probes import backward, updates
from normflax.probes.fields import chosen
from normflax.probes.observer import Observer
from normflax.train import optim, schedules


class State(NamedTuple):
    """Parameters, and the optimiser's memory."""

    params: nnx.State
    memory: object


def token_losses(logits: Logits, targets: Tokens, mask: Mask) -> Float[Array, "B T"]:
    """Cross-entropy in nats of every valid target, and 0 elsewhere."""
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.where(mask, jax.nn.logsumexp(logits, axis=-1) - picked, 0.0)


def mean_loss(logits: Logits, targets: Tokens, mask: Mask) -> Scalar:
    """Mean over the valid targets; 0 where there is none."""
    valid = jnp.sum(mask.astype(jnp.float32))
    return jnp.sum(token_losses(logits, targets, mask)) / jnp.maximum(valid, 1.0)


def gradients(graph, params: nnx.State, hyper, batch: batches.Batch, observe: bool):
    """Loss, what the layers showed, and the gradient of the mean loss, in one backward pass.

    With `observe` the slots' gradients come along as the squared activation gradients [S + 1].
    """
    slots = jnp.zeros(hyper["skip"].size + 1)

    def loss(params, slots):
        model = nnx.merge(graph, params)
        if not observe:
            logits, seen = model(batch.inputs, hyper["skip"], hyper["branch"])
        else:
            logits, seen = model(batch.inputs, hyper["skip"], hyper["branch"], observer=Observer(), slots=slots)
        return mean_loss(logits, batch.targets, batch.mask), seen

    (value, seen), (grads, squares) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, slots)
    return value, grads, (seen, squares)


def global_norm(tree: nnx.State) -> Scalar:
    """Euclidean length of everything in the tree, in float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)))


def step(static, graph, state: State, hyper, arrays, t: Count, fields: tuple[str, ...]):
    """Update t: the next state, the step's scalars, and the given fields of the layers.

    Scalars: loss, rate (the one this update used), grad_norm of all parameters and grad_norm_matrices of the branch matrices,
    both before clipping, valid (targets in the batch), skipped (1 where loss or gradient was not finite and the update was not
    made).
    """
    batch = batches.draw(static.task, arrays, hyper["data_seed"], t, static.batch, static.tokens)
    loss, grads, (seen, squares) = gradients(graph, state.params, hyper, batch, observe=bool(fields))
    rate = schedules.rate(
        static.schedule, t, peak=hyper["rate"], warmup=hyper["warmup"], total=hyper["total"], final=hyper["final"]
    )
    norm, per_matrix = global_norm(grads), updates.squares(matrices(grads))
    finite, factor = jnp.isfinite(loss) & jnp.isfinite(norm), optim.clip_factor(norm, hyper["clip"])
    # Without the barrier every parameter's kernel would compute the norm of all of them again.
    finite, factor, rate = jax.lax.optimization_barrier((finite, factor, rate))
    clipped = jax.tree.map(lambda g: g * factor, grads)
    change, memory = optim.update(static.optimiser, hyper, rate, clipped, state.memory, state.params)
    # Held, so that reading the update does not change how it is added: a fused multiply-add rounds differently.
    change = jax.lax.optimization_barrier(change)
    moved = State(jax.tree.map(jnp.add, state.params, change), memory)
    valid = jnp.sum(batch.mask.astype(jnp.float32))
    scalars = {
        "loss": loss,
        "rate": rate,
        "grad_norm": norm,
        "grad_norm_matrices": updates.norm_of(per_matrix),
        "valid": valid,
        "skipped": (~finite).astype(jnp.float32),
    }
    layers = {}
    if fields:
        positions = static.batch * static.tokens * static.model.width
        layers = {
            **seen,
            **backward.activation_gradients(squares, valid, positions),
            **updates.of_gradients(per_matrix),
            **updates.of_updates(matrices(state.params), matrices(change)),
        }
        layers = {name: layers[name] for name in fields}
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), moved, state), scalars, layers


CHUNK = 64
"""Updates of one call of `advance` at most: the length of the buffers its scalars come back in."""


def advance(static, graph, state: State, hyper, arrays, first: Count, last: Count):
    """Updates first … last - 1 (at most CHUNK) in one program, ending early at one that is not finite.

    Returns the state, the scalars and the fields of `probe.every_step` with a leading axis [CHUNK], and the number of steps made.
    """

    def one(state, t):
        return step(static, graph, state, hyper, arrays, t, static.every_step)

    shapes = jax.eval_shape(one, state, first)[1:]
    rows = jax.tree.map(lambda s: jnp.zeros((CHUNK, *s.shape), s.dtype), shapes)

    def going(carry):
        _, _, t, healthy = carry
        return (t < last) & healthy

    def body(carry):
        state, rows, t, _ = carry
        state, *new = one(state, t)
        rows = jax.tree.map(lambda r, n: r.at[t - first].set(n), rows, tuple(new))
        return state, rows, t + 1, new[0]["skipped"] == 0

    state, (scalars, layers), t, _ = jax.lax.while_loop(going, body, (state, rows, first, jnp.bool_(True)))
    return state, scalars, layers, t - first


def probe(static, graph, state: State, hyper, arrays, t: Count):
    """Update t with every recorded field of the layers: the state, the scalars, the fields."""
    return step(static, graph, state, hyper, arrays, t, chosen((*static.fields, *static.every_step)))


def evaluate(static, graph, params: nnx.State, hyper, windows: batches.Batch, count: Count) -> Float[Array, "W"]:
    """Mean loss of each of the first `count` windows, a multiple of the batch; 0 for the rest.

    `windows` [W, …] with W a multiple of the batch.
    """
    grouped = jax.tree.map(lambda x: x.reshape(-1, static.batch, x.shape[-1]), windows)

    def body(i, losses):
        batch = jax.tree.map(lambda x: x[i], grouped)
        logits, _ = nnx.merge(graph, params)(batch.inputs, hyper["skip"], hyper["branch"])
        valid = jnp.maximum(jnp.sum(batch.mask.astype(jnp.float32), axis=-1), 1.0)
        return losses.at[i].set(jnp.sum(token_losses(logits, *batch[1:]), axis=-1) / valid)

    losses = jnp.zeros((grouped.mask.shape[0], static.batch))
    return jax.lax.fori_loop(jnp.int32(0), count // static.batch, body, losses).reshape(-1)
