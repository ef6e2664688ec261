"""Models that have made no update: what is measured of them alone, and that it is what a run's first step shows."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref
import reference_probes as probed
from flax import nnx
from models import EVERY, OPTIONS, flat, gradients, model, quick, scales_of, some_batch, spec
from tiny import tiny

from normflax.build import hyper_part, programs, static_part
from normflax.data import batches
from normflax.model.transformer import matrices
from normflax.probes import amplification, dependency, updates
from normflax.train import initial, step

SOME = ["second_moment", "token_cosine", "norm_input", "branch_ratio", "grad_rms", "grad_matrix", "grad_block", "log_z"]

CASES = [
    *((name, "plain") for name in EVERY),
    ("models:scaled_input", "modern"),
    *(pytest.param(name, "modern", marks=pytest.mark.slow) for name in ("post", "models:two_hop")),
]


def stream(m):
    """The blocks and what they are given."""
    built = nnx.merge(m.graph, m.params)
    return built.blocks, built.embed_norm(built.embed(some_batch().inputs, m.hyper["embed_scale"]))


# ── M11 and M12 against NumPy ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("placement", "options"), CASES)
def test_amplification_is_the_derivative_along_the_noise(placement: str, options: str):
    """Float64 central differences of the reference, whose matrices move along the same signs; biases and norms stay."""
    m = model(placement, **OPTIONS[options])
    blocks, x = stream(m)
    change = amplification.noise(m.params["blocks"], jax.random.key(3))
    moved = quick(amplification.moved)(blocks, change, x, scales_of(m))
    signs = {
        name: np.asarray(w, np.float64) for name, w in flat(nnx.State({**m.params, "blocks": change})).items() if name in MATRICES
    }
    assert {float(v) for w in signs.values() for v in np.unique(np.abs(w))} == {float(np.float32(1e-4))}
    expected = probed.amplification(flat(m.params), np.asarray(some_batch().inputs), spec(m.config, m.static, m.hyper), signs, 1.0)
    np.testing.assert_allclose(moved, expected, rtol=2e-4)


MATRICES = {*(f"attention.{role}" for role in ("q", "k", "v", "out")), *(f"ffn.{role}" for role in ("up", "gate", "down"))}


def test_signs_are_drawn_apart_and_as_often_up_as_down():
    m = model("pre")
    change = flat(nnx.State({**m.params, "blocks": amplification.noise(m.params["blocks"], jax.random.key(0))}))
    up = np.concatenate([np.ravel(change[name]) for name in sorted(MATRICES & change.keys())]) > 0
    assert abs(up.mean() - 0.5) < 0.05
    assert (np.asarray(change["attention.q"]) != np.asarray(change["attention.k"])).any()
    for name in change.keys() - MATRICES - {"embed.tokens", "embed.positions", "head", "final.scale", "final.bias"}:
        assert not np.any(change[name]), name


def test_the_gradients_signs_go_downhill():
    """Along -sign(g) the loss falls, by 1e-6 Σ|g| to first order; entries without a gradient stay."""
    m, grads = model("post"), gradients("post").tree
    change = amplification.against(grads["blocks"])
    whole = nnx.State({**m.params, "blocks": change})
    for before, after in zip(jax.tree.leaves(matrices(whole)), jax.tree.leaves(matrices(grads)), strict=True):
        np.testing.assert_array_equal(before, -1e-6 * np.sign(after))

    def loss(scale):
        moved = jax.tree.map(lambda w, d: w + scale * d, m.params["blocks"], change)
        return step.gradients(m.graph, nnx.State({**m.params, "blocks": moved}), m.hyper, some_batch())[0]

    slope = jax.jvp(loss, (jnp.float32(0),), (jnp.float32(1),))[1]
    total = sum(float(jnp.sum(jnp.abs(g))) for g in jax.tree.leaves(matrices(grads)))
    np.testing.assert_allclose(slope, -1e-6 * total, rtol=1e-4)


@pytest.mark.parametrize(("placement", "options"), CASES)
def test_dependency_is_the_references(placement: str, options: str):
    """Part by part in float64, with gains and biases that are not 1 and 0."""
    m = model(placement, **OPTIONS[options])
    blocks, x = stream(m)
    found = quick(dependency.shares)(blocks, x, scales_of(m))
    words = spec(m.config, m.static, m.hyper)
    trace = ref.forward(flat(m.params), np.asarray(some_batch().inputs), words)
    np.testing.assert_allclose(found, probed.dependency(flat(m.params), trace, words), rtol=5e-5, atol=1e-6)
    assert not np.triu(np.asarray(found), 2).any()


def test_parts_of_a_state_add_up_to_it():
    """Of Pre-LN's state they are branch outputs as they were written: Σ_j x_j = x, so no share is above the sum of the others."""
    m = model("pre", norm__bias=False)
    blocks, x = stream(m)
    last = np.asarray(dependency.shares(blocks, x, scales_of(m)))[-1]
    assert (2 * last <= last.sum() + 1).all() and (last > 0).all()


def test_expected_gradient_is_that_of_the_mean_over_batches():
    """M06c: 32 batches one after the other, whose gradients are averaged before their length is taken."""
    config = tiny(train__steps=0, probe__fields=["grad_expected"])
    m = model("sandwich")
    static, hyper = static_part(config, batches.load(config.data).task), m.hyper
    found = quick(lambda p: initial.expected(static, m.graph, p, hyper, {}))(m.params)
    one = jax.jit(lambda t: step.gradients(m.graph, m.params, hyper, batches.draw(static.task, {}, 0, t, 2, 8))[1])
    each = [matrices(one(jnp.int32(t))) for t in range(32)]
    for role, length in found.items():
        mean = np.mean([np.asarray(g[role], np.float64) for g in each], axis=0)
        np.testing.assert_allclose(length, np.linalg.norm(mean, axis=(1, 2)), rtol=1e-4, err_msg=role)
        apart = np.mean([np.linalg.norm(np.asarray(g[role]), axis=(1, 2)) for g in each], axis=0)
        assert (np.asarray(length) < 0.9 * apart).all()


# ── The program of many seeds ───────────────────────────────────────────────────────────────────────────────────────


@cache
def read(placement: str, seeds: tuple[int, ...]):
    config = tiny(placement=placement, train__steps=0, data__seed=7, probe__fields=SOME, probe__seeds=len(seeds))
    loaded = batches.load(config.data)
    static, hyper = static_part(config, loaded.task), hyper_part(config)
    return jax.device_get(programs(static).initial(hyper, loaded.arrays, jnp.array(seeds, jnp.uint32)))


@pytest.mark.parametrize("placement", ["post", pytest.param("lns", marks=pytest.mark.slow)])
def test_a_seed_among_others_is_the_seed_alone(placement: str):
    together, alone = read(placement, (0, 1, 2)), read(placement, (2,))
    for many, one in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(many[2], one[0], rtol=1e-5, atol=1e-7)
        assert len(many) == 3
    assert len({float(value) for value in together[0]["loss"]}) == 3


@pytest.mark.parametrize("placement", ["post", pytest.param("scaled_init", marks=pytest.mark.slow)])
def test_it_is_what_the_first_step_of_a_run_shows(placement: str):
    """The same weights, the same batch, before the first update: scalars and every field."""
    config = tiny(placement=placement, seed=2, data__seed=7, probe__fields=SOME)
    loaded = batches.load(config.data)
    static, hyper = static_part(config, loaded.task), hyper_part(config)
    compiled = programs(static)
    _, scalars, layers = jax.device_get(compiled.probe(compiled.init(hyper), hyper, loaded.arrays, jnp.int32(0)))
    found, fields = read(placement, (2,))
    for name in ("loss", "grad_norm", "grad_norm_matrices", "valid"):
        np.testing.assert_allclose(found[name][0], scalars[name], rtol=2e-5, err_msg=name)
    assert set(fields) == set(SOME)
    for name in SOME:
        for got, expected in zip(jax.tree.leaves(fields[name]), jax.tree.leaves(layers[name]), strict=True):
            np.testing.assert_allclose(got[0], expected, rtol=5e-5, atol=1e-7, err_msg=name)


def test_without_a_field_of_gradients_no_gradient_is_taken():
    config = tiny(train__steps=0, probe__fields=["second_moment"])
    static, hyper = static_part(config, batches.load(config.data).task), hyper_part(config)
    scalars, fields = programs(static).initial(hyper, {}, jnp.zeros(1, jnp.uint32))
    assert set(scalars) == {"loss", "valid"} and set(fields) == {"second_moment"}


def test_a_gain_of_nothing_on_q_and_k_makes_attention_uniform():
    """coef.qk_gain=0: every key counts alike, so entropy is that of n equal weights."""
    config = tiny(train__steps=0, coef__qk_gain=0.0, probe__fields=["attention_entropy_share", "max_logit"])
    static, hyper = static_part(config, batches.load(config.data).task), hyper_part(config)
    assert not np.any(hyper["gains"]["q"]) and not np.any(hyper["gains"]["k"]) and np.all(hyper["gains"]["v"] == 1)
    fields = programs(static).initial(hyper, {}, jnp.zeros(1, jnp.uint32))[1]
    np.testing.assert_allclose(fields["attention_entropy_share"], 1.0, rtol=1e-6)
    assert not np.any(fields["max_logit"])


def test_squares_are_of_the_changed_structure():
    """The roles that amplification moves are those that gradients are recorded of."""
    m = model("post", model__ffn="swiglu")
    assert set(updates.squares(matrices(m.params))) == {name.split(".")[1] for name in MATRICES}
