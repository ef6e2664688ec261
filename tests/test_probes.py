"""What is measured: against autodiff and the NumPy reference, and that measuring changes no bit and costs no memory."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_probes as probed
from flax import nnx
from models import EVERY, MAIN, OPTIONS, TABLE, flat, gradients, looped, model, quick, settings, some_batch, spec

from normflax.build import Programs, transformer
from normflax.model.placements import PLACEMENTS
from normflax.model.transformer import matrices
from normflax.probes import updates
from normflax.probes.backward import activation_gradients, watch
from normflax.probes.fields import FIELDS, on_batch
from normflax.probes.tidy import ROLE_BRANCH
from normflax.train import optim, step
from normflax.train.step import State

CASES = [*((name, "plain") for name in EVERY), ("post", "modern"), ("sandwich", "modern")]
cases = pytest.mark.parametrize(("placement", "options"), CASES)

# ── Gradients of the stream: M05 ────────────────────────────────────────────────────────────────────────────────────


def test_a_watched_stream_is_itself_and_leaves_the_square_of_its_gradient():
    x, slot = jnp.array([[[1.0, -2.0], [3.0, 0.5]]]), jnp.float32(7)
    assert (watch(x, slot) == x).all()
    through, square = jax.grad(lambda x, slot: jnp.sum(jnp.square(watch(x, slot))), argnums=(0, 1))(x, slot)
    np.testing.assert_array_equal(through, 2 * x)
    np.testing.assert_allclose(square, 4 * (1 + 4 + 9 + 0.25))


@cases
def test_slots_hold_the_gradients_of_every_state(placement: str, options: str):
    """Against autodiff of a loop in which every state is there to be differentiated in."""
    expected = np.sum(looped(placement, **OPTIONS[options]).states.astype(np.float64) ** 2, axis=(1, 2, 3))
    squares = gradients(placement, **OPTIONS[options]).squares
    assert squares.shape == (5,) and len(set(np.round(expected, 12))) == 5
    np.testing.assert_allclose(squares, expected, rtol=2e-5)


@pytest.mark.parametrize("placement", EVERY)
def test_activation_gradients_are_the_references(placement: str):
    """M05 of each state by central differences: the length of the whole gradient, and n · rms for n valid targets."""
    m, batch = model(placement), jax.tree.map(np.asarray, some_batch())
    p, words, states = flat(m.params), spec(m.config, m.static, m.hyper), range(5)
    valid = int(batch.mask.sum())
    assert valid == 7  # of ten
    found = activation_gradients(jnp.asarray(gradients(placement).squares), jnp.float32(valid), batch.inputs.size * 8)
    slopes = [probed.activation_gradient(p, batch.inputs, batch.targets, batch.mask, words, s) for s in states]
    expected = [probed.gradient_statistics(g, batch.mask) for g in slopes]
    for field in ("grad_rms", "grad_frobenius"):
        np.testing.assert_allclose(found[field], [e[field] for e in expected], rtol=1e-4, err_msg=field)


# ── Gradients of the matrices: M06, M06b, M09 ───────────────────────────────────────────────────────────────────────


@cases
def test_gradients_of_matrices_are_those_of_separately_stored_ones(placement: str, options: str):
    """By block and role, q, k and v apart although `plain` stores them fused; no bias and no norm is in the sums."""
    m = model(placement, **OPTIONS[options])
    assert m.config.model.fused_qkv == (options == "plain")
    loop = looped(placement, **OPTIONS[options]).params
    roles = {"q", "k", "v", "out", "up", "down"} | ({"gate"} if options == "modern" else set())
    expected = {role: np.linalg.norm(loop[f"{ROLE_BRANCH[role]}.{role}"], axis=(1, 2)) for role in roles}
    squares = updates.squares(matrices(gradients(placement, **OPTIONS[options]).tree))
    found = updates.of_gradients(squares, {role: 8 * (8 if ROLE_BRANCH[role] == "attention" else 32) for role in roles})
    assert set(found["grad_matrix"]) == set(found["grad_matrix_rms"]) == roles
    for role in roles:
        np.testing.assert_allclose(found["grad_matrix"][role], expected[role], rtol=2e-5, err_msg=role)
        mean_square = np.mean(loop[f"{ROLE_BRANCH[role]}.{role}"] ** 2, axis=(1, 2))
        np.testing.assert_allclose(found["grad_matrix_rms"][role], np.sqrt(mean_square), rtol=2e-5, err_msg=role)
    by_block = np.sqrt(sum(norm**2 for norm in expected.values()))
    np.testing.assert_allclose(found["grad_block"], by_block, rtol=2e-5)
    np.testing.assert_allclose(updates.norm_of(squares), np.sqrt(np.sum(by_block**2)), rtol=2e-5)


# ── A probed step ───────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def stepping(placement: str, **changes: Any):
    """One update of the product with the fields it is given, compiled as the product compiles it."""
    m = model(placement, **changes)
    return jax.jit(partial(step.step, m.static, m.graph, fields=m.static.fields)), jax.jit(
        partial(step.step, m.static, m.graph, fields=())
    )


def fresh(placement: str, writers: float = 1.0, **changes: Any) -> State:
    """Random parameters, the writers to the stream times `writers`, and an empty optimiser."""
    m = model(placement, **changes)
    params = jax.tree.map(
        lambda v: v.replace(v[...] * (writers if v.role in ("out", "down") else 1.0)),
        m.params,
        is_leaf=lambda v: isinstance(v, nnx.Variable),
    )
    return State(params, optim.FAMILIES[m.config.optim.name](m.hyper).init(params))


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


SHAPES = [
    pytest.param(placement, remat, marks=() if remat == "dots" and placement in MAIN else pytest.mark.slow)
    for placement in PLACEMENTS
    for remat in ("dots", "full", "none")
]


@pytest.mark.parametrize(("placement", "remat"), SHAPES)
def test_probes_change_no_bit(placement: str, remat: str):
    """Loss, gradient norms, parameters and optimiser memory of three updates; A-19: and of one with idle branches."""
    changes = {"model__remat": remat, "optim__name": "adamw", "optim__decay": 0.1, "optim__clip": 1.0, "probe__fields": ("all",)}
    m, (probed, bare) = model(placement, **changes), stepping(placement, **changes)
    on = off = fresh(placement, **changes)
    for t in range(3):
        on, seen, layers = probed(on, m.hyper, {}, jnp.int32(t))
        off, unseen, nothing = bare(off, m.hyper, {}, jnp.int32(t))
        assert set(layers) == set(on_batch(["all"])) and nothing == {} and seen.keys() == unseen.keys()
        assert bits(seen) == bits(unseen) and bits(on) == bits(off), t
        assert (layers["grad_block"] > 0).all() and bits(on) != bits(fresh(placement, **changes))
    idle = fresh(placement, writers=0.0, **changes)
    first, after = (run(idle, m.hyper, {}, jnp.int32(0)) for run in (probed, bare))
    assert bits(first[:2]) == bits(after[:2])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(first[0]))


def test_updates_are_read_against_the_matrix_before_them():
    """M26: rate, decay and clipping included, and the matrix before the update below."""
    changes = {"optim__name": "sgd", "optim__rate": 0.3, "optim__decay": 0.2, "optim__clip": 0.1}
    changes |= {"model__ffn": "swiglu"}
    m, start = model("pre", **changes), fresh("pre", **changes)
    run = quick(partial(step.step, m.static, m.graph, fields=("update_ratio", "update_rms")))
    after, _, layers = run(start, m.hyper, {}, jnp.int32(0))
    old, new = flat(start.params), flat(after.params)
    for role in ("q", "k", "v", "out", "up", "gate", "down"):
        before, moved = (x[f"{ROLE_BRANCH[role]}.{role}"].astype(np.float64) for x in (old, new))
        change, size = (np.linalg.norm(x, axis=(1, 2)) for x in (moved - before, before))
        np.testing.assert_allclose(layers["update_ratio"][role], change / size, rtol=1e-4)
        np.testing.assert_allclose(layers["update_rms"][role], change / np.sqrt(before[0].size), rtol=1e-4)


# ── Cost in depth: A-10 ─────────────────────────────────────────────────────────────────────────────────────────────


@cache
def lowered(placement: str, depth: int, probed: bool):
    """The lowered program of one update, from shapes alone."""
    _, static, hyper = settings(placement, model__depth=depth, probe__fields=("all",))
    graph, params = nnx.split(nnx.eval_shape(lambda: transformer(static, hyper)))
    state = State(params, jax.eval_shape(optim.FAMILIES[static.optimiser](hyper).init, params))
    run = jax.jit(partial(step.step, static, graph, fields=static.fields if probed else ()))
    return run.lower(state, hyper, {}, jax.ShapeDtypeStruct((), jnp.int32))


@pytest.mark.parametrize("probed", [True, False])
@pytest.mark.parametrize("placement", TABLE)
def test_the_program_of_an_update_does_not_grow_with_depth(placement: str, probed: bool):
    shallow, deep = (len(lowered(placement, depth, probed).as_text()) for depth in (8, 64))
    assert deep == pytest.approx(shallow, rel=0.05)
    assert shallow > 10_000


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_fields_have_a_number_for_each_layer_and_no_more(placement: str):
    """Nothing that comes back of a probed update is as large as one state [L, B, T, D], whatever the field."""
    _, scalars, layers = lowered(placement, 64, True).out_info
    assert {s.shape for s in scalars.values()} == {()} and set(layers) == set(on_batch(["all"]))
    lengths = {
        "state": (129,),
        "sublayer": (128,),
        "block": (64,),
        "matrix": (64,),
        "norm": (128,),
        "attention": (64,),
        "model": (),
    }
    for field, found in layers.items():
        for path, leaf in jax.tree.leaves_with_path(found):
            alone = path and path[-1].key in ("embed", "final")
            assert leaf.shape == (() if alone else lengths[FIELDS[field].axis]), (field, path)
    sites = ("pre", "out", "post", "embed", "final")
    assert set(layers["norm_input"]) == {site for site in sites if getattr(PLACEMENTS[placement], site)}


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["dots", "full", "none"])
def test_a_probed_update_keeps_nothing_per_token(remat: str):
    """It needs less memory over a bare one than one state of each of its 64 blocks would take."""
    changes = {"model__remat": remat, "model__depth": 64, "model__width": 32, "train__batch": 8, "train__tokens": 64}
    _, static, hyper = settings("pre", **changes)
    graph, params = nnx.split(nnx.eval_shape(lambda: transformer(static, hyper)))
    state = State(params, jax.eval_shape(optim.FAMILIES[static.optimiser](hyper).init, params))

    def needed(fields) -> int:
        run = jax.jit(partial(step.step, static, graph, fields=fields))
        compiled = run.lower(state, hyper, {}, jax.ShapeDtypeStruct((), jnp.int32)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert needed(static.fields) - needed(()) < 64 * 8 * 64 * 32 * 4 / 4


@pytest.mark.slow
def test_a_thousand_blocks_take_a_probed_step():
    m = model("deepnorm", model__depth=1000)
    state, scalars, layers = quick(partial(step.step, m.static, m.graph, fields=m.static.fields))(
        fresh("deepnorm", model__depth=1000), m.hyper, {}, jnp.int32(0)
    )
    assert layers["grad_rms"].shape == (2001,) and scalars["skipped"] == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state, scalars, layers)))


def test_steps_of_a_run_share_a_program():
    """A-21: three probed steps have the same shapes, and only the first of them compiles."""
    m, seconds, shapes = model("pre"), set(), set()
    compiled = Programs(replace(m.static, fields=("variance", "branch_ratio")))
    state = jax.tree.map(jnp.copy, fresh("pre"))  # a program uses up the state it is given
    for t in range(3):
        state, _, layers = compiled.probe(state, m.hyper, {}, jnp.int32(t))
        seconds.add(compiled.seconds)
        shapes.add(tuple(sorted((field, found.shape) for field, found in layers.items())))
    assert len(seconds) == 1 and shapes == {(("branch_ratio", (4,)), ("variance", (5,)))}
