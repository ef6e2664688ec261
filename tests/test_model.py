"""The whole model: the NumPy reference, the stack as a loop, rematerialisation, causality, and the start of a run."""

import itertools
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref
import reference_probes as probed
from flax import nnx
from models import EVERY, MAIN, OPTIONS, TABLE, backward, close, flat, gradients, looped, model, quick, settings, some_batch, spec

from normflax.build import hyper_part, transformer
from normflax.config import change
from normflax.data.batches import Batch
from normflax.model.placements import PLACEMENTS, find
from normflax.probes.fields import FIELDS
from normflax.probes.observer import Observer
from normflax.train.step import path_scales

every_placement = pytest.mark.parametrize("placement", EVERY)
LOOPED = [*itertools.product(EVERY, ["plain"]), ("post", "modern"), ("sandwich", "modern")]


def observed(graph, params, hyper, tokens):
    """Logits and statistics."""
    slots = jnp.zeros(hyper["skip"].size + 1)
    return nnx.merge(graph, params)(tokens, path_scales(hyper), observer=Observer(FIELDS), slots=slots)


@cache
def forward(placement: str, options: str = "plain"):
    """The product's scanned pass as a compiled function of tokens: logits and statistics."""
    m = model(placement, **OPTIONS[options])
    run = quick(partial(observed, m.graph))
    return lambda tokens: jax.device_get(run(m.params, m.hyper, tokens))


# ── Independent and equivalent computations ─────────────────────────────────────────────────────────────────────────

PARITY = [(name, options) for name in EVERY for options in OPTIONS if name in MAIN or options in ("plain", "modern")]


@pytest.mark.parametrize(("placement", "options"), PARITY)
def test_the_model_is_the_reference(placement: str, options: str):
    """Logits and every forward statistic (M01, M02, M03, M04, M22), with no bias at 0 and no gain at 1."""
    m = model(placement, **OPTIONS[options])
    trace = ref.forward(flat(m.params), np.asarray(some_batch().inputs), spec(m.config, m.static, m.hyper))
    logits, seen = forward(placement, options)(some_batch().inputs)
    close(logits, trace.logits)
    expected = probed.statistics(trace)
    inputs = expected.pop("norm_input")
    measured = seen["norm_input"]
    assert set(seen) == {*expected, "norm_input"}
    for field, values in expected.items():
        np.testing.assert_allclose(seen[field], values, rtol=2e-5, atol=1e-7, err_msg=field)
    assert set(measured) == {site.split(".")[-1] for site in inputs}
    for site in measured:
        kinds = [site] if site in ("embed", "final") else [f"attention.{site}", f"ffn.{site}"]
        in_order = np.stack([inputs[kind] for kind in kinds], axis=-1).ravel()
        np.testing.assert_allclose(np.ravel(measured[site]), in_order, rtol=2e-5, err_msg=site)


@pytest.mark.parametrize(("placement", "options"), LOOPED)
def test_the_scan_is_a_python_loop(placement: str, options: str):
    """Outputs, and the gradient of every parameter; the loop stores q, k and v apart, so fused = apart as well."""
    scan, loop = gradients(placement, **OPTIONS[options]), looped(placement, **OPTIONS[options])
    close(forward(placement, options)(some_batch().inputs)[0], loop.logits)
    np.testing.assert_allclose(scan.loss, loop.loss, rtol=1e-6)
    assert scan.params.keys() == loop.params.keys()
    largest = max(np.abs(g).max() for g in loop.params.values())
    for name, expected in loop.params.items():
        zero = name == "attention.k_bias"  # it moves all scores of a query alike, unless keys are turned
        scale = largest if zero else np.abs(expected).max()
        np.testing.assert_allclose(scan.params[name], expected, rtol=0, atol=2e-5 * scale, err_msg=name)
        assert zero or np.abs(expected).max() > 0


@pytest.mark.parametrize("remat", ["full", "none"])
@pytest.mark.parametrize("placement", TABLE)
def test_what_is_computed_again_changes_nothing(placement: str, remat: str):
    """A-09: loss, gradients and statistics of every rematerialisation policy are those of the default."""
    default, other = gradients(placement), gradients(placement, model__remat=remat)
    np.testing.assert_allclose(other.loss, default.loss, rtol=1e-6)
    largest = max(np.abs(g).max() for g in default.params.values())
    for name, expected in default.params.items():
        np.testing.assert_allclose(other.params[name], expected, rtol=1e-6, atol=1e-6 * largest, err_msg=name)
    np.testing.assert_allclose(other.squares, default.squares, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), other.seen, default.seen)


# ── Causality ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("placement", "options"), [*itertools.product(PLACEMENTS, ["plain", "modern"])])
def test_a_changed_token_leaves_earlier_logits_bit_identical(placement: str, options: str):
    """A-12: token 3 of 5 is changed, and the first one."""
    run, tokens = forward(placement, options), some_batch().inputs
    before = run(tokens)[0]
    for place in (3, 0):
        after = run(tokens.at[:, place].set((tokens[:, place] + 1) % 8))[0]
        np.testing.assert_array_equal(before[:, :place], after[:, :place])
        assert (np.abs(before - after)[:, place:].max(axis=-1) > 0).all()


@every_placement
def test_the_gradient_in_later_tokens_is_exactly_zero(placement: str):
    """Of the loss at position t alone, in the embeddings of five different tokens and in the positions."""
    m, tokens = model(placement), jnp.arange(5, dtype=jnp.int32)[None]
    for t in range(5):
        batch = Batch(tokens, jnp.full((1, 5), 6, jnp.int32), jnp.arange(5)[None] == t)
        grads = flat(backward(placement)(m.params, m.hyper, batch)[1])
        for name in ("embed.tokens", "embed.positions"):
            size = np.abs(grads[name]).max(axis=-1)
            assert (size[t + 1 :] == 0).all() and (size[: t + 1] > 0).all(), (name, t)


# ── Edges ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@every_placement
def test_a_batch_without_a_valid_target_has_loss_and_gradients_zero(placement: str):
    """A-13."""
    m, batch = model(placement), some_batch()
    loss, grads, (_, squares) = backward(placement)(m.params, m.hyper, batch._replace(mask=jnp.zeros_like(batch.mask)))
    assert loss == 0 and (squares == 0).all() and all((g == 0).all() for g in flat(grads).values())


@every_placement
def test_the_head_reads_a_normalised_stream_unless_the_last_write_was(placement: str):
    """A-05: seven times the last state changes no logit below a final norm, and multiplies them where there is none."""
    m = model(placement)
    built, x = nnx.merge(m.graph, m.params), jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 8)), jnp.float32)
    close(built.logits(built.readout(7 * x)), (1 if find(placement).final else 7) * built.logits(built.readout(x)), 1e-4)


def test_more_tokens_than_positions_are_refused():
    """A-14."""
    with pytest.raises((TypeError, ValueError), match=r"\(2, 9, 8\)"):
        forward("pre")(jnp.zeros((2, 9), jnp.int32))


# ── The start of a run ──────────────────────────────────────────────────────────────────────────────────────────────

START: dict[str, Any] = {"model__width": 64, "model__heads": 4, "data__vocab": 256, "train__tokens": 32}


@cache
def program(static):
    """A new model's loss over ln V, with and without the logit of the input token, and its statistics."""

    def run(hyper):
        tokens = jax.random.randint(jax.random.key(1), (8, 32), 0, 256, jnp.int32)
        graph, params = nnx.split(transformer(static, hyper))
        logits, seen = observed(graph, params, hyper, tokens)
        own = jax.nn.one_hot(tokens, 256) > 0
        # The mean of the loss over all targets: what random targets give on average, and never below ln V.
        excess = jax.nn.logsumexp(logits, axis=-1) - jnp.mean(logits, axis=-1) - jnp.log(256.0)
        others = jax.nn.logsumexp(logits, axis=-1, where=~own) - jnp.mean(logits, axis=-1, where=~own) - jnp.log(255.0)
        return jnp.mean(excess), jnp.mean(others), seen

    return quick(run)


@cache
def start(placement: str, embed_std: float = 1.0, **changes: Any) -> tuple:
    config, static, _ = settings(placement, **START, **changes)
    return jax.device_get(program(static)(hyper_part(change(config, model__embed_std=embed_std))))


FORMS = [*itertools.product([False, True], ["learned", "rope"], [2, 24])]
CHEAP = [(False, "learned", 24), (True, "rope", 2)]
slow_forms = [pytest.param(*form, marks=() if form in CHEAP else pytest.mark.slow) for form in FORMS]


@pytest.mark.parametrize("embed_std", [1.0, 0.02])
@pytest.mark.parametrize(("tied", "positions", "depth"), slow_forms)
@pytest.mark.parametrize("placement", TABLE)
def test_the_first_loss_is_that_of_guessing(placement: str, tied: bool, positions: str, depth: int, embed_std: float):
    """l_0 - ln V in [0, 0.6]: logits of variance one at most.

    The input token is left out of a tied head over unit embeddings: its own embedding is still in the stream there, so
    its logit is of the order of √D.
    """
    excess, others, _ = start(placement, embed_std, model__tied=tied, model__positions=positions, model__depth=depth)
    found = others if tied and embed_std == 1 else excess
    assert -1e-5 <= found <= 0.6
    assert found >= (0.4 if embed_std == 1 or not tied else 0.0)


@pytest.mark.parametrize("placement", [name for name, entry in PLACEMENTS.items() if entry.post])
@pytest.mark.parametrize("embed_std", [1.0, 0.02])
def test_after_every_post_norm_the_stream_has_unit_size(placement: str, embed_std: float):
    """The embedding's output excepted, which no norm has seen."""
    _, _, seen = start(placement, embed_std, model__depth=24)
    assert len(seen["second_moment"]) == 49
    np.testing.assert_allclose(seen["second_moment"][1:], 1.0, rtol=2e-3)
    np.testing.assert_allclose(seen["variance"][1:], 1.0, rtol=2e-3)
    np.testing.assert_allclose(seen["second_moment"][0], embed_std**2 + 0.02**2, rtol=0.05)


def test_deepnorms_norms_read_alpha():
    """Its branches are small, so the norm's input is the skip: alpha = 48^(1/4) = 2.632 times a unit stream."""
    _, _, seen = start("deepnorm", model__depth=24)
    np.testing.assert_allclose(seen["norm_input"]["post"], 2.632148, rtol=0.01)
    assert seen["branch_ratio"].max() < 0.1


def test_post_norms_read_the_sum_of_two_unit_streams_at_most():
    _, _, seen = start("post", model__depth=24)
    assert (seen["norm_input"]["post"] > 1.0).all() and (seen["norm_input"]["post"] < 1.5).all()


def test_the_stream_of_sandwich_grows_by_two_a_block():
    """Each of its two branches ends in a norm and adds a second moment of about one."""
    q = start("sandwich", model__depth=24)[2]["second_moment"]
    np.testing.assert_allclose(np.diff(q[:9]), 1.0, rtol=0.3)
    np.testing.assert_allclose((q[-1] - q[0]) / 24, 2.0, rtol=0.15)


def test_the_stream_of_pre_grows_with_depth_and_not_with_its_exponential():
    q = start("pre", model__depth=24)[2]["second_moment"]
    assert (np.diff(q[:9]) > 0.1).all() and 0.3 < (q[24] - q[0]) / (q[48] - q[0]) < 0.7
