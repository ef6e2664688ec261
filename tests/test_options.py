"""What a model and a step may be made of: every combination starts, and each option does what its name says."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import TABLE, close, flat, gradients, model, quick, scales_of, some_batch
from tiny import tiny

from normflax.build import hyper_part, programs, static_part, transformer
from normflax.checks import CHOICES
from normflax.config import Config, ConfigError, check
from normflax.data import batches
from normflax.model import init, stack
from normflax.model.attention import attend
from normflax.model.dropout import Dropout
from normflax.model.placements import PLACEMENTS, Depths, norm_count
from normflax.train import optim, step
from normflax.train.step import State, path_scales

# ── Every combination ───────────────────────────────────────────────────────────────────────────────────────────────

AXES = {"placement": tuple(PLACEMENTS)} | {
    key: CHOICES[key.replace("__", ".")] for key in ("model__ffn", "model__positions", "model__mask", "model__dtype")
}
COMBINATIONS = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]


def pairwise(rows: list[dict]) -> list[dict]:
    """Few of the rows, in which every two values of two axes still meet."""
    missing = {pair for row in rows for pair in itertools.combinations(row.items(), 2)}
    few = []
    while missing:
        best = max(rows, key=lambda row: len(missing & set(itertools.combinations(row.items(), 2))))
        few.append(best)
        missing -= set(itertools.combinations(best.items(), 2))
    return few


FEW = pairwise(COMBINATIONS)
combinations = [pytest.param(row, id="-".join(row.values()), marks=() if row in FEW else pytest.mark.slow) for row in COMBINATIONS]


@pytest.mark.parametrize("row", combinations)
def test_every_combination_takes_a_finite_step(row: dict[str, Any]):
    """Three blocks: the loss starts in [ln V, ln V + 0.6], the step is made, parameters are float32 and another."""
    config = check(tiny(**row, model__depth=3, data__vocab=64, train__batch=16))
    static, hyper = static_part(config, batches.load(config.data).task), hyper_part(config)

    def one(hyper):
        graph, params = nnx.split(transformer(static, hyper))
        start = State(params, optim.FAMILIES[static.optimiser](hyper).init(params))
        return start, step.step(static, graph, start, hyper, {}, jnp.int32(0), ())[:2]

    before, (after, scalars) = quick(one)(hyper)
    assert 0 <= scalars["loss"] - math.log(64) <= 0.6 and scalars["skipped"] == 0 and scalars["grad_norm"] > 0
    leaves = [jax.tree.leaves(state.params) for state in (before, after)]
    assert all(leaf.dtype == jnp.float32 and np.isfinite(leaf).all() for leaf in leaves[1])
    assert any((a != b).any() for a, b in zip(*leaves, strict=True))


# ── Half precision ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("placement", TABLE)
def test_a_model_in_half_precision_is_the_model_but_for_rounding(placement: str):
    """Loss, gradients and statistics; everything that is recorded is float32 (A-03)."""
    full, half = gradients(placement), gradients(placement, model__dtype="bfloat16")
    assert 0 < abs(half.loss - full.loss) < 0.02 * full.loss
    for name, value in full.params.items():
        assert half.params[name].dtype == np.float32
        distance = np.linalg.norm(half.params[name] - value)
        assert distance < 0.1 * np.linalg.norm(value) + 1e-3, name
    for field, found in half.seen.items():
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(full.seen[field]), strict=True):
            assert a.dtype == np.float32, field
            np.testing.assert_allclose(a, b, rtol=0.05, atol=0.05, err_msg=field)


def test_half_precision_is_what_the_stream_is_kept_in():
    m = model("pre", model__dtype="bfloat16")
    built = nnx.merge(m.graph, m.params)
    inputs, h = built.entries(some_batch().inputs, path_scales(m.hyper))
    assert inputs.dtype == h.dtype == jnp.bfloat16 and built.logits(h).dtype == jnp.float32


def test_softmax_is_float32_in_half_precision():
    """Scores of 257/√2 and 256/√2, which bfloat16 would put a whole 1 apart: weights 0.670 and 0.330, not 0.731 and 0.269."""
    k = jnp.array([[256.0, 1.0], [256.0, 0.0]], jnp.bfloat16)[None, None]
    v = jnp.array([[1.0, 0.0], [0.0, 0.0]], jnp.bfloat16)[None, None]
    y = attend(jnp.ones((1, 1, 2, 2), jnp.bfloat16), k, v, jnp.ones((2, 2), bool))
    assert y.dtype == jnp.bfloat16 and float(y[0, 0, 1, 0]) == pytest.approx(0.670, rel=0.01)


# ── Heads ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_heads_are_heads_that_share(groups: int):
    """The model whose k and v are written out for every head is the same function."""
    heads = {"model__heads": 4, "model__positions": "rope", "model__qk_norm": True}
    grouped, whole = model("pre", **heads, model__kv_heads=groups), model("pre", **heads, model__fused_qkv=False)
    params = dict(nnx.to_flat_state(grouped.params))
    for path, variable in params.items():
        if path[-1] in ("k", "v", "k_bias", "v_bias"):
            w = variable[...]
            apart = w.reshape(*w.shape[:-1], groups, 2)
            params[path] = variable.replace(jnp.repeat(apart, 4 // groups, axis=-2).reshape(*w.shape[:-1], 8))
    assert set(params) == {path for path, _ in nnx.to_flat_state(whole.params)}
    written_out = nnx.merge(whole.graph, nnx.from_flat_state([*params.items()]))
    built, batch = nnx.merge(grouped.graph, grouped.params), some_batch()
    close(built(batch.inputs, path_scales(whole.hyper))[0], written_out(batch.inputs, path_scales(whole.hyper))[0], 1e-5)


def test_shared_heads_start_with_the_standard_deviation_of_all():
    """Xavier of the whole matrix [D, D], of which a grouped one is a part."""
    config = tiny(model__width=128, model__heads=8, model__kv_heads=2, model__depth=1)
    static, hyper = static_part(config, batches.load(config.data).task), hyper_part(config)
    found = flat(nnx.split(quick(lambda h: transformer(static, h))(hyper))[1])
    assert found["attention.k"].shape == found["attention.v"].shape == (1, 128, 32)
    for role in ("q", "k", "v", "out"):
        assert np.std(found[f"attention.{role}"]) == pytest.approx(128**-0.5, rel=0.05), role


def test_norms_of_queries_and_keys_bound_the_scores():
    """√K is the largest score of two heads of length √K; each block has two such norms, whatever the placement."""
    m = model("post", model__qk_norm=True, norm__scale=False, norm__bias=False)
    assert norm_count(m.static.entry, Depths(decoder=3)) == 6 + 6
    assert (gradients("post", model__qk_norm=True, norm__scale=False, norm__bias=False).seen["max_logit"] <= math.sqrt(4)).all()
    assert (gradients("post", norm__scale=False, norm__bias=False).seen["max_logit"] > 0).all()


# ── Initialisers ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("base", "std", "largest"),
    [
        ("xavier_normal", 0.0883883, math.inf),
        ("xavier_uniform", 0.0883883, 0.1530931),
        ("lecun", 0.125, math.inf),
        ("normal", 0.3, math.inf),
        ("truncated_normal", 0.3, 0.6 / 0.8796256),
    ],
)
def test_bases_have_their_standard_deviation_and_reach(base: str, std: float, largest: float):
    """A matrix [64, 192], each of whose entries is drawn alike."""
    w = init.weight(jax.random.key(0), "up", (64, 192), base, jnp.float32(0.3), jnp.float32(1))
    assert np.std(w) == pytest.approx(std, rel=0.02) and abs(np.mean(w)) < 4 * std / np.sqrt(w.size)
    assert np.abs(w).max() <= largest * (1 + 1e-6)
    assert np.abs(w).max() > (0.97 * largest if math.isfinite(largest) else 3.3 * std)
    assert set(init.DRAWS) == set(CHOICES["model.init"]) - {None}


def test_residual_scaling_reaches_what_a_branch_writes_and_nothing_else():
    """A-07: base 0.02 and 12 blocks give 0.02/√24 = 0.004082 in out and down; gains of the placement stay."""
    plain = {"model__depth": 12, "model__init": "normal", "model__residual_scaling": True}
    gains = hyper_part(tiny(**plain))["gains"]
    assert {role for role, g in gains.items() if (g != 1).any()} == {"out", "down"}
    np.testing.assert_allclose(0.02 * gains["out"], 0.00408248, rtol=1e-6)
    both = hyper_part(tiny(placement="deepnorm", **plain))["gains"]
    np.testing.assert_allclose(both["down"], 96**-0.25 * 24**-0.5, rtol=1e-6)
    np.testing.assert_allclose(both["up"], 96**-0.25, rtol=1e-6)


# ── Dropout ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_mask_keeps_its_share_and_the_mean():
    x = jnp.ones(40_000)
    y = np.asarray(Dropout(jax.random.key(0), jnp.float32(0.25))(x))
    assert set(np.unique(y)) == {0, np.float32(1 / np.float32(0.75))} and np.mean(y == 0) == pytest.approx(0.25, abs=0.01)
    np.testing.assert_array_equal(y, Dropout(jax.random.key(0), jnp.float32(0.25))(x))
    other = np.asarray(Dropout(jax.random.key(0), jnp.float32(0.25)).at("elsewhere")(x))
    assert np.mean((y == 0) == (other == 0)) == pytest.approx(0.25**2 + 0.75**2, abs=0.01)
    np.testing.assert_array_equal(Dropout(jax.random.key(0), jnp.float32(0))(x), x)


def masks(key: int) -> np.ndarray:
    """What multiplies each branch's result, for every layer, branch and feature of one token [L · kinds, D].

    It is the gradient of the last state in a branch's bias, where all weights are 0 and nothing else is done to the stream.
    """
    m = model("pre", model__depth=4, model__width=512, norm__kind="none")
    params = jax.tree.map(jnp.zeros_like, m.params)

    def total(params):
        drop, sites = Dropout(jax.random.key(key), jnp.float32(0.5)), m.static.entry.sites
        x = jnp.zeros((1, 1, 512))
        blocks = nnx.merge(m.graph, params).blocks
        return jnp.sum(stack.run(blocks, x, scales_of(m), sites=sites, remat="dots", dropout=drop)[0])

    found = flat(quick(jax.grad(total))(params))
    return np.concatenate([found["attention.out_bias"], found["ffn.down_bias"]])


def test_every_layer_and_branch_has_a_mask_of_its_own():
    """A-08: two masks at one half agree on about half of 512 entries, and a key gives the same ones again."""
    found = masks(0)
    assert found.shape == (8, 512) and set(np.unique(found)) == {0, 2}
    for a, b in [*itertools.combinations(found, 2), *zip(found, masks(1), strict=True)]:
        assert 0.4 <= np.mean(a == b) <= 0.6
    np.testing.assert_array_equal(found, masks(0))


DROP = {"model__dropout": 0.1}


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_what_is_computed_again_drops_the_same(remat: str):
    """A-09: with one key, loss and gradients with remat are those without."""

    def dropped(remat: str):
        m = model("pre", model__remat=remat, **DROP)
        drop = Dropout(jax.random.key(3), jnp.float32(0.1))
        return quick(lambda p, h, b: step.gradients(m.graph, p, h, b, dropout=drop))(m.params, m.hyper, some_batch())[:2]

    (loss, grads), (expected, others) = dropped(remat), dropped("none")
    assert float(loss) == pytest.approx(float(expected), rel=1e-6) and abs(float(loss) - gradients("pre").loss) > 1e-3
    for name, g in flat(grads).items():
        close(g, flat(others)[name], 2e-6)


def first_losses(config: Config, steps: int = 2) -> list[float]:
    """The losses of the first steps at parameters that do not move."""
    loaded = batches.load(config.data)
    compiled, hyper = programs(static_part(config, loaded.task)), hyper_part(config)
    state, rows = compiled.init(hyper), []
    for t in range(steps):
        state, scalars, *_ = compiled.advance(state, hyper, loaded.arrays, jnp.int32(t), jnp.int32(t + 1))
        rows.append(float(scalars["loss"][0]))
    return rows


def test_masks_follow_the_seed_and_the_step_and_rate_0_is_no_dropout():
    still = {"optim__rate": 0.0, "data__seed": 0, "probe__fields": []}
    off, on = (first_losses(tiny(**still, model__dropout=p)) for p in (0.0, 0.5))
    assert off != on and first_losses(tiny(**still, model__dropout=0.5)) == on
    nearly = first_losses(tiny(**still, model__dropout=1e-9))
    np.testing.assert_allclose(nearly, off, rtol=1e-6)


# ── What can't be ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__kv_heads": 3}, ("model.kv_heads=3", "model.heads=2")),
        ({"model__heads": 3}, ("model.heads=3", "model.width=8")),
        ({"model__heads": 8, "model__positions": "rope"}, ("rope", "odd")),
        ({"model__qk_norm": True, "norm__kind": "none"}, ("model.qk_norm", "norm.kind=none")),
        ({"model__embed_norm": True, "norm__kind": "none"}, ("model.embed_norm", "norm.kind=none")),
        ({"model__dropout": 1.0}, ("model.dropout=1.0",)),
        ({"model__dropout": -0.1}, ("model.dropout=-0.1",)),
        ({"model__mask": "bidirectional", "data__name": "markov"}, ("model.mask=bidirectional", "markov", "copy")),
        ({"model__positions": "sinusoid"}, ("model.positions", "sinusoidal")),
        ({"model__dtype": "float16"}, ("model.dtype", "bfloat16")),
        ({"train__accumulate": 3}, ("train.accumulate=3", "train.batch=2")),
        ({"train__label_smoothing": 1.0}, ("train.label_smoothing=1.0",)),
        ({"train__z_loss": -1.0}, ("train.z_loss=-1.0",)),
        ({"probe__every_step": ["angle"]}, ("probe.every_step=angle", "probe.fields")),
    ],
)
def test_what_does_not_fit_is_one_sentence(changes: dict[str, Any], words: tuple[str, ...]):
    with pytest.raises(ConfigError) as caught:
        check(tiny(**changes))
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)
