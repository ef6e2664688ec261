"""What is minimised: by hand, by its gradient, and what a run reports of it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import flat, model, quick, some_batch
from tiny import tiny

from normflax.build import hyper_part, programs, static_part
from normflax.data import batches
from normflax.train import losses, step

LOGITS = jnp.log(jnp.array([[[1.0, 3.0], [4.0, 4.0], [1.0, 1.0]]]))
TARGETS, MASK = jnp.array([[1, 0, 0]]), jnp.array([[True, True, False]])


def objective(smoothing: float, z: float) -> np.ndarray:
    return np.asarray(losses.objectives(LOGITS, TARGETS, MASK, jnp.float32(smoothing), jnp.float32(z)))[0]


def test_objectives_by_hand():
    """Z = 4 and 8; targets with probability 3/4 and 1/2; the third is not valid."""
    np.testing.assert_allclose(objective(0, 0), [math.log(4 / 3), math.log(2), 0], rtol=1e-6)
    uniform = np.array([math.log(4) - math.log(3) / 2, math.log(8) - math.log(4), 0])
    np.testing.assert_allclose(objective(1, 0), uniform, rtol=1e-6)
    np.testing.assert_allclose(objective(0.1, 0), 0.9 * objective(0, 0) + 0.1 * uniform, rtol=1e-6)
    squares = [math.log(4) ** 2, math.log(8) ** 2, 0]
    np.testing.assert_allclose(objective(0.1, 0.01) - objective(0.1, 0), 0.01 * np.array(squares), rtol=1e-4)


def test_gradients_are_those_of_a_softened_target_and_of_a_held_normaliser():
    """∂/∂o = softmax - ((1-ε)·onehot + ε/V) + 2·c·ln Z·softmax."""

    def total(o):
        return jnp.sum(losses.objectives(o, TARGETS, MASK, jnp.float32(0.2), jnp.float32(0.01)))

    p = np.array([[0.25, 0.75], [0.5, 0.5]])
    soft = np.array([[0.1, 0.9], [0.9, 0.1]])
    log_z = np.log([[4.0], [8.0]])
    found = jax.grad(total)(LOGITS)[0]
    np.testing.assert_allclose(found[:2], p - soft + 0.02 * log_z * p, rtol=1e-5)
    assert (found[2] == 0).all()


@pytest.mark.parametrize("changes", [{"train__label_smoothing": 0.2}, {"train__z_loss": 0.1}])
def test_the_loss_of_a_run_is_the_cross_entropy_whatever_is_minimised(changes):
    """Step 0 reports the same loss, and with another gradient; the two share their program."""
    plain, other = tiny(), tiny(**changes)
    loaded = batches.load(plain.data)
    assert static_part(plain, loaded.task) == static_part(other, loaded.task)
    compiled, rows = programs(static_part(plain, loaded.task)), []
    for config in (plain, other):
        hyper = hyper_part(config)
        rows.append(compiled.probe(compiled.init(hyper), hyper, loaded.arrays, jnp.int32(0))[1])
    assert rows[0]["loss"] == rows[1]["loss"] and abs(rows[0]["grad_norm"] - rows[1]["grad_norm"]) > 1e-4


def test_the_gradient_of_the_model_is_that_of_the_objective():
    """Along its own direction, by central differences."""
    m, batch = model("pre", train__label_smoothing=0.1, train__z_loss=0.05), some_batch()
    loss, grads, _ = quick(lambda p, h, b: step.gradients(m.graph, p, h, b))(m.params, m.hyper, batch)
    length = math.sqrt(sum(float(np.sum(np.square(g))) for g in flat(grads).values()))

    @quick
    def along(s):
        moved = jax.tree.map(lambda p, g: p + s * g / length, m.params, grads)
        logits = step.nnx.merge(m.graph, moved)(batch.inputs, step.path_scales(m.hyper))[0]
        found = losses.objectives(logits, batch.targets, batch.mask, m.hyper["label_smoothing"], m.hyper["z_loss"])
        return jnp.sum(found) / 7, losses.mean_loss(logits, batch.targets, batch.mask)

    slope = (along(jnp.float32(1e-2))[0] - along(jnp.float32(-1e-2))[0]) / 2e-2
    assert float(slope) == pytest.approx(length, rel=2e-3)
    assert float(loss) == pytest.approx(float(along(jnp.float32(0))[1]), rel=1e-6)
