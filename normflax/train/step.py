"""One update as a pure function, and the three programs made of it: many updates, one probed update, evaluation.

The order inside update t: the loss and its gradient on batch t at the parameters before it, the norms of that gradient, clipping,
the optimiser, and the new parameters if everything is finite, else the old ones.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from normflax.axes import Count, Scalar, Stream
from normflax.data import batches
from normflax.model.dropout import Dropout
from normflax.model.placements import Scales
from normflax.model.transformer import PathScales, matrices
from normflax.probes import backward, beside, updates
from normflax.probes.fields import FIELDS, on_batch
from normflax.probes.observer import Observer
from normflax.train import losses, optim, schedules


class State(NamedTuple):
    """Parameters, and the optimiser's memory."""

    params: nnx.State
    memory: object


def path_scales(hyper) -> PathScales:
    """What multiplies the paths of a run's model."""
    return PathScales(hyper["embed_scale"], Scales(hyper["skip"], hyper["branch"], hyper["input"]))


def gradients(graph, params: nnx.State, hyper, batch: batches.Batch, *, fields=(), parts: int = 1, dropout: Dropout | None = None):
    """Mean loss, the gradient of what is minimised, and what the layers showed of `fields`, in one backward pass.

    What the layers showed is a pair: fields that are read on the way forward, and the slots' gradients, which are the squared
    activation gradients [S + 1]. Everything is of means over the valid targets of the whole batch, also where its `parts` are
    worked off one after the other: their gradients, and the squares of activation gradients, add up.
    """
    slots, valid = jnp.zeros(hyper["skip"].size + 1), jnp.maximum(jnp.sum(batch.mask.astype(jnp.float32)), 1.0)

    def share(params, slots, batch, dropout):
        model, observer = nnx.merge(graph, params), Observer(fields) if fields else None
        logits, seen = model(batch.inputs, path_scales(hyper), observer=observer, slots=slots if fields else None, dropout=dropout)
        minimised = losses.objectives(logits, batch.targets, batch.mask, hyper["label_smoothing"], hyper["z_loss"])
        loss = losses.token_losses(logits, batch.targets, batch.mask)
        return jnp.sum(minimised) / valid, (jnp.sum(loss) / valid, seen)

    differentiate = jax.grad(share, argnums=(0, 1), has_aux=True)
    if parts == 1:
        (grads, squares), (loss, seen) = differentiate(params, slots, batch, dropout)
        return loss, grads, (seen, squares)

    def add(total, piece):
        batch, number = piece
        drop = dropout and Dropout(jax.random.fold_in(dropout.key, number), dropout.rate)
        got, (loss, seen) = differentiate(params, slots, batch, drop)
        return jax.tree.map(jnp.add, total, (got, loss)), seen

    pieces = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
    nothing = jax.tree.map(jnp.zeros_like, ((params, slots), jnp.float32(0)))
    ((grads, squares), loss), seen = jax.lax.scan(add, nothing, (pieces, jnp.arange(parts)))
    return loss, grads, ({name: jax.tree.map(WHOLE[FIELDS[name].parts], seen[name]) for name in seen}, squares)


WHOLE = {
    "mean": lambda x: jnp.mean(x, axis=0),
    "max": lambda x: jnp.max(x, axis=0),
    "rms": lambda x: jnp.sqrt(jnp.mean(jnp.square(x), axis=0)),
}
"""How a batch's value follows from those of its equally large parts (leading axis), by `Field.parts`."""


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
    dropout = Dropout(jax.random.fold_in(batches.named_key(hyper["seed"], "dropout"), t), hyper["dropout"])
    loss, grads, (seen, squares) = gradients(
        graph,
        state.params,
        hyper,
        batch,
        fields=fields,
        parts=static.accumulate,
        dropout=dropout if static.model.dropout else None,
    )
    rate = schedules.rate(static.schedule, t, hyper)
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
            **updates.of_gradients(per_matrix, {role: w[0].size for role, w in matrices(grads).items()}),
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
    return step(static, graph, state, hyper, arrays, t, on_batch((*static.fields, *static.every_step)))


def evaluate(static, graph, params: nnx.State, hyper, windows: batches.Batch, count: Count) -> Float[Array, "W"]:
    """Mean loss of each of the first `count` windows, a multiple of the batch; 0 for the rest.

    `windows` [W, …] with W a multiple of the batch.
    """
    grouped = jax.tree.map(lambda x: x.reshape(-1, static.batch, x.shape[-1]), windows)

    def body(i, found):
        batch = jax.tree.map(lambda x: x[i], grouped)
        logits, _ = nnx.merge(graph, params)(batch.inputs, path_scales(hyper))
        valid = jnp.maximum(jnp.sum(batch.mask.astype(jnp.float32), axis=-1), 1.0)
        return found.at[i].set(jnp.sum(losses.token_losses(logits, *batch[1:]), axis=-1) / valid)

    found = jnp.zeros((grouped.mask.shape[0], static.batch))
    return jax.lax.fori_loop(jnp.int32(0), count // static.batch, body, found).reshape(-1)


def represent(static, graph, params: nnx.State, hyper, windows: batches.Batch) -> Stream:
    """What the head reads on the windows that are read beside the steps, without dropout: F of M10."""
    return nnx.merge(graph, params).entries(windows.inputs[: beside.WINDOWS], path_scales(hyper))[1]


def outputs(static, graph, params: nnx.State, hyper, windows: batches.Batch) -> Float[Array, "L B T D"]:
    """What every block leaves in the stream, on the same windows."""
    return nnx.merge(graph, params).entries(windows.inputs[: beside.WINDOWS], path_scales(hyper))[0][1:]


def angles(static, graph, params: nnx.State, hyper, windows: batches.Batch) -> Float[Array, "states states"]:
    """M20 on the same windows."""
    return beside.angles(nnx.merge(graph, params).entries(windows.inputs[: beside.WINDOWS], path_scales(hyper))[0])
