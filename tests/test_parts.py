"""A batch in parts, one after the other, is the batch."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import flat, model, quick, settings

from normflax.build import programs
from normflax.data import batches
from normflax.data.batches import Batch
from normflax.probes.fields import on_batch
from normflax.train import step


def uneven() -> Batch:
    """Four sequences with 5, 1, 0 and 4 valid targets: the mean over parts is not the mean over targets."""
    rng = np.random.default_rng(1)
    inputs, targets = rng.integers(0, 8, (2, 4, 5))
    mask = np.zeros((4, 5), bool)
    mask[0], mask[1, 2], mask[3, 1:] = True, True, True
    return Batch(jnp.asarray(inputs, jnp.int32), jnp.asarray(targets, jnp.int32), jnp.asarray(mask))


@cache
def observed(parts: int):
    m = model("sandwich", train__z_loss=0.01)
    run = quick(lambda p, h, b: step.gradients(m.graph, p, h, b, fields=on_batch(["all"]), parts=parts))
    return jax.device_get(run(m.params, m.hyper, uneven()))


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_add_up_to_the_batch(parts: int):
    """Loss, gradients, squares of activation gradients and every statistic of the forward pass."""
    loss, grads, (seen, squares) = observed(1)
    in_parts, sums, (also, also_squares) = observed(parts)
    assert float(in_parts) == pytest.approx(float(loss), rel=1e-6) and set(seen) == set(also)
    for name, g in flat(grads).items():
        np.testing.assert_allclose(flat(sums)[name], g, rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(also_squares, squares, rtol=1e-5)
    for field in seen:
        for a, b in zip(jax.tree.leaves(also[field]), jax.tree.leaves(seen[field]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7, err_msg=field)


def test_the_norm_that_is_logged_is_that_of_the_sum():
    """A-20: parts with gradients [3, 0] and [0, 4] of their own means give 2.5, not 3.5."""
    mean = (jnp.array([3.0, 0.0]) + jnp.array([0.0, 4.0])) / 2
    assert step.global_norm(nnx.State({"w": nnx.Param(mean)})) == 2.5


def test_a_run_in_parts_is_the_run():
    """Three updates, in one program each; the parts' program is another."""
    rows = {}
    for parts in (1, 2):
        config, static, hyper = settings("pre", train__accumulate=parts, train__batch=4)
        loaded = batches.load(config.data)
        _, scalars, *_ = programs(static).advance(programs(static).init(hyper), hyper, loaded.arrays, jnp.int32(0), jnp.int32(3))
        rows[parts] = {name: value[:3] for name, value in jax.device_get(scalars).items()}
    for name in rows[1]:
        np.testing.assert_allclose(rows[2][name], rows[1][name], rtol=1e-5, err_msg=name)
    assert settings("pre", train__accumulate=2, train__batch=4)[1] != settings("pre", train__batch=4)[1]


@pytest.mark.slow
def test_probing_a_run_in_parts_changes_no_bit():
    config, static, hyper = settings("post", train__accumulate=2, train__batch=4, model__dropout=0.2, probe__fields=("all",))
    loaded, ends = batches.load(config.data), []
    for name in ("probe", "advance"):
        state = programs(static).init(hyper)
        for t in range(3):
            more = (jnp.int32(t + 1),) if name == "advance" else ()
            state, *_ = getattr(programs(static), name)(state, hyper, loaded.arrays, jnp.int32(t), *more)
        ends.append([leaf.tobytes() for leaf in jax.tree.leaves(jax.device_get(state))])
    assert ends[0] == ends[1]
