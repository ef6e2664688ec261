"""One update: its loss, which norm and which rate are logged, what is skipped, and evaluation."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import TINY, filled, tiny

from normflax.build import hyper_part, programs, static_part
from normflax.config import Config
from normflax.data import batches
from normflax.train import loop, optim, step
from normflax.train.losses import mean_loss, token_losses
from normflax.train.schedules import rate
from normflax.train.step import State, global_norm, path_scales

quick = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
"""jit for tests that look at numbers and not at bits: compiling takes half the time."""


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


# ── The loss ────────────────────────────────────────────────────────────────────────────────────────────────────────


def example() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 5, 7)).astype(np.float32) * 3
    return logits, rng.integers(0, 7, (2, 5)), rng.random((2, 5)) < 0.5


def test_the_loss_is_the_mean_over_the_valid_targets():
    logits, targets, mask = example()
    assert 0 < mask.sum() < mask.size
    right = -np.take_along_axis(log_softmax(logits), targets[..., None], -1)[..., 0]
    arrays = jnp.asarray(logits), jnp.asarray(targets), jnp.asarray(mask)
    np.testing.assert_allclose(token_losses(*arrays), np.where(mask, right, 0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(mean_loss(*arrays), right[mask].mean(), rtol=1e-5)


def test_large_logits_give_a_large_and_not_an_infinite_loss():
    logits = jnp.array([[[1e4, -1e4, 0.0]]])
    loss, grad = jax.value_and_grad(mean_loss)(logits, jnp.array([[1]]), jnp.array([[True]]))
    assert float(loss) == 2e4 and np.isfinite(grad).all()


def test_the_loss_of_no_valid_target_is_zero_with_a_zero_gradient():
    """A-13, at the logits."""
    logits, targets, mask = (jnp.asarray(x) for x in example())
    loss, grad = jax.value_and_grad(mean_loss)(logits, targets, jnp.zeros_like(mask))
    assert float(loss) == 0 and (grad == 0).all()


def test_the_length_of_a_tree_is_one_length_in_float32():
    """A-20: [3] and [4] in two leaves are 5 together. A-19: zeros alone are exactly 0; half precision is widened."""
    assert float(global_norm(nnx.State({"a": jnp.array([3.0]), "b": jnp.array([[4.0]])}))) == 5.0
    assert float(global_norm(nnx.State({"a": jnp.zeros(3), "b": jnp.zeros((2, 2))}))) == 0.0
    wide = global_norm(nnx.State({"a": jnp.full(4096, 256.0, jnp.float16)}))
    assert wide.dtype == jnp.float32 and float(wide) == 256.0 * 64


# ── One update with a known gradient ────────────────────────────────────────────────────────────────────────────────


def state_of(config: Config, params: nnx.State) -> State:
    return State(params, optim.FAMILIES[config.optim.name](hyper_part(config)).init(params))


def update(monkeypatch, config: Config, gradient, t: int = 0, loss: float = 1.0) -> tuple[State, State, dict]:
    """The state before update t, all zeros, the one after it, and the scalars, when the gradient is `gradient`."""
    monkeypatch.setattr(step, "gradients", lambda *_, **__: (jnp.float32(loss), gradient, ({}, jnp.zeros(5))))
    static, hyper = static_part(config, batches.load(config.data).task), hyper_part(config)
    before = state_of(config, filled(config))
    one = quick(lambda state, hyper, t: step.step(static, None, state, hyper, {}, t, ())[:2])
    after, scalars = one(before, hyper, jnp.int32(t))
    return before, after, {name: float(value) for name, value in scalars.items()}


def sgd(**settings) -> Config:
    return tiny(optim__name="sgd", **settings)


def same(a, b) -> bool:
    return all(x.tobytes() == y.tobytes() for x, y in zip(*map(jax.tree.leaves, jax.device_get((a, b))), strict=True))


@pytest.mark.parametrize("t", [0, 1, 3, 4, 9, 19])
def test_the_logged_rate_is_the_one_that_was_used(monkeypatch, t):
    """A-15: plain SGD on a gradient of ones moves every parameter by minus the rate in the row of that update."""
    config = sgd(optim__rate=0.3, schedule__name="cosine", schedule__warmup_steps=4, schedule__final=0.1, train__steps=20)
    _, after, scalars = update(monkeypatch, config, filled(config, 1.0), t)
    moved = {float(x) for leaf in jax.tree.leaves(after.params) for x in np.unique(leaf)}
    assert moved == {-scalars["rate"]}
    numbers = {"rate": jnp.float32(0.3), "warmup": jnp.int32(4), "total": jnp.int32(20), "final": jnp.float32(0.1)}
    np.testing.assert_allclose(scalars["rate"], rate("cosine", jnp.int32(t), numbers), rtol=1e-6)
    if t < 4:
        np.testing.assert_allclose(scalars["rate"], 0.3 * (t + 1) / 4, rtol=1e-6)


def three_four(config: Config) -> nnx.State:
    """A gradient of [3, 4] in two leaves and zeros in every other place."""
    gradient = filled(config)
    gradient["token_table"][...] = gradient["token_table"][...].at[0, 0].set(3.0)
    gradient["head"][...] = gradient["head"][...].at[0, 0].set(4.0)
    return gradient


@pytest.mark.parametrize(
    ("clip", "moved"), [(1.0, (0.6, 0.8)), (2.5, (1.5, 2.0)), (5.0, (3.0, 4.0)), (6.0, (3.0, 4.0)), (None, (3.0, 4.0))]
)
def test_the_logged_norm_is_before_clipping_and_the_update_after_it(monkeypatch, clip, moved):
    """A-20."""
    config = sgd(optim__rate=1.0, optim__clip=clip)
    _, after, scalars = update(monkeypatch, config, three_four(config))
    assert scalars["grad_norm"] == 5.0 and scalars["grad_norm_matrices"] == 0.0
    found = -float(after.params["token_table"][...][0, 0]), -float(after.params["head"][...][0, 0])
    np.testing.assert_allclose(found, moved, rtol=1e-6)


def test_clipping_comes_before_adam(monkeypatch):
    """Adam's first direction is g / (|g| + eps): with eps = 1 it is 0.6 / 1.6 for what was 3 before the clipping."""
    config = tiny(optim__rate=1.0, optim__clip=1.0, optim__eps=1.0)
    _, after, _ = update(monkeypatch, config, three_four(config))
    np.testing.assert_allclose(-after.params["token_table"][...][0, 0], 0.6 / 1.6, rtol=1e-5)


def test_the_two_norms_cover_all_parameters_and_the_branch_matrices(monkeypatch):
    config = sgd()
    _, _, scalars = update(monkeypatch, config, filled(config, 1.0))
    counts = loop.parameter_counts(filled(config))
    np.testing.assert_allclose(scalars["grad_norm"], counts["total"] ** 0.5, rtol=1e-6)
    np.testing.assert_allclose(scalars["grad_norm_matrices"], counts["matrices"] ** 0.5, rtol=1e-6)
    assert counts["matrices"] < counts["total"]


@pytest.mark.parametrize("bad", ["nan gradient", "inf gradient", "nan loss", "inf loss"])
def test_an_update_from_a_loss_or_gradient_that_is_not_finite_is_not_made(monkeypatch, bad):
    """Parameters and the optimiser's memory, its count included, keep every bit; the row says what was seen."""
    value, where = bad.split()
    gradient = filled(TINY, 1.0)
    if where == "gradient":
        gradient["head"][...] = gradient["head"][...].at[1, 2].set(float(value))
    loss = float(value) if where == "loss" else 1.0
    before, after, scalars = update(monkeypatch, TINY, gradient, loss=loss)
    assert scalars["skipped"] == 1 and same(before, after)
    np.testing.assert_equal(scalars["loss"], loss)
    assert np.isfinite(scalars["grad_norm"]) == (where == "loss")


def test_a_finite_update_is_made(monkeypatch):
    before, after, scalars = update(monkeypatch, TINY, filled(TINY, 1.0))
    assert scalars["skipped"] == 0 and not same(before, after)


# ── One update of a real model ──────────────────────────────────────────────────────────────────────────────────────


@cache
def started():
    """The tiny run before its first update: its programs, its numbers and its state."""
    config = tiny()
    compiled, hyper = programs(static_part(config, batches.load(config.data).task)), hyper_part(config)
    return compiled, hyper


def batch_of(config: Config, t: int) -> batches.Batch:
    task = batches.load(config.data).task
    return jax.device_get(batches.draw(task, {}, config.seed, t, config.train.batch, config.train.tokens))


@quick
def logits_of(params, tokens):
    compiled, hyper = started()
    return nnx.merge(compiled.graph, params)(tokens, path_scales(hyper))[0]


def window_losses(params, batch: batches.Batch) -> np.ndarray:
    """Mean loss of every sequence, from the model's logits and a log-softmax in float64."""
    logp = log_softmax(np.asarray(logits_of(params, jnp.asarray(batch.inputs))))
    losses = -np.take_along_axis(logp, np.asarray(batch.targets)[..., None], -1)[..., 0] * np.asarray(batch.mask)
    return losses.sum(-1) / np.asarray(batch.mask).sum(-1)


def test_a_row_is_the_loss_on_its_own_batch_before_its_update():
    compiled, hyper = started()
    state = compiled.init(hyper)
    for t in range(3):
        right = window_losses(state.params, batch_of(TINY, t)).mean()
        before = jax.device_get(state.params)  # the state that goes in is used up
        state, scalars, _, made = compiled.advance(state, hyper, {}, jnp.int32(t), jnp.int32(t + 1))
        assert int(made) == 1 and not same(before, state.params)
        np.testing.assert_allclose(scalars["loss"][0], right, rtol=1e-5)
        assert float(scalars["valid"][0]) == 2 * 7  # of 8 tokens the first has no target


def test_evaluation_is_the_loss_of_every_window():
    compiled, hyper = started()
    params = compiled.init(hyper).params
    windows = batches.heldout(batches.load(TINY.data), 4, 8)
    right = window_losses(params, windows)
    np.testing.assert_allclose(compiled.evaluate(params, hyper, windows, jnp.int32(4)), right, rtol=1e-5)
    half = compiled.evaluate(params, hyper, windows, jnp.int32(2))
    np.testing.assert_allclose(half, [*right[:2], 0, 0], rtol=1e-5)
    mean, error = loop.evaluate(compiled, params, hyper, windows, 3)
    np.testing.assert_allclose((mean, error), (right[:3].mean(), right[:3].std(ddof=1) / 3**0.5), rtol=1e-4)


def test_a_batch_without_a_valid_target_moves_nothing_and_the_next_one_trains(monkeypatch):
    """A-13: loss 0, gradient 0, count 0, and a finite update."""
    compiled, hyper = started()
    draw = batches.draw

    def none_at_first(task, arrays, seed, t, batch, tokens):
        drawn = draw(task, arrays, seed, t, batch, tokens)
        return drawn._replace(mask=drawn.mask & (t > 0))

    monkeypatch.setattr(batches, "draw", none_at_first)
    before = compiled.init(hyper)
    one = quick(lambda state, t: step.step(compiled.static, compiled.graph, state, hyper, {}, t, ())[:2])
    after, scalars = one(before, jnp.int32(0))
    assert {name: float(scalars[name]) for name in ("loss", "grad_norm", "grad_norm_matrices", "valid", "skipped")} == {
        "loss": 0, "grad_norm": 0, "grad_norm_matrices": 0, "valid": 0, "skipped": 0
    }  # fmt: skip
    assert same(before.params, after.params)
    then, scalars = one(after, jnp.int32(1))
    assert scalars["valid"] == 14 and scalars["skipped"] == 0 and 1 < scalars["loss"] < 4
    assert np.isfinite(global_norm(then.params)) and not same(then.params, after.params)
