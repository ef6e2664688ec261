"""Optimisers against NumPy written from the papers and against optax's own; who is decayed; clipping."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimisers import CASES, MODELS, ROLES, WEIGHTS, by_path, hyper_of, model_params, numbers, params_of, reference, run
from tiny import TINY, tiny

from normflax.checks import CHOICES, ConfigError
from normflax.config import check
from normflax.train import loop, optim


@pytest.mark.parametrize("case", CASES)
def test_several_updates_are_the_papers(case):
    """Parameters after seven updates at changing rates, those that are decayed and those that are not."""
    family, settings = case.split("-")[0], CASES[case]
    rates = [0.1, 0.05, 0.2, 0.1, 0.01, 0.3, 0.1]
    gradients = [params_of(seed=i + 1) for i in range(len(rates))]
    start, end = params_of(), run(family, hyper_of(**settings), rates, params_of(), gradients)
    for role, found in numbers(end).items():
        decay = settings.get("decay", 0.0) if role == "up" else 0.0
        rest = {name: value for name, value in settings.items() if name != "decay"}
        for layer in range(3):
            path = [numbers(gradient)[role][layer] for gradient in gradients]
            right = reference(family, rates, numbers(start)[role][layer], path, decay, **rest)
            np.testing.assert_allclose(found[layer], right, rtol=2e-5, atol=2e-5 if family == "muon" else 2e-6, err_msg=role)


def test_adamw_is_optax_adamw_and_tracing_its_numbers_changes_nothing():
    """A-18: ten updates with the numbers as traced arrays and as Python constants."""
    gradients = [params_of(seed=i + 1) for i in range(10)]
    mask = jax.tree.map(lambda role: role == "up", optim.roles(params_of()))
    theirs = optax.adamw(1e-2, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.1, mask=mask)
    params = params_of()
    memory = theirs.init(params)
    update = jax.jit(theirs.update)
    for gradient in gradients:
        with jax.numpy_dtype_promotion("standard"):
            change, memory = update(gradient, memory, params)
        params = optax.apply_updates(params, change)
    ours = run("adamw", hyper_of(beta2=0.999, decay=0.1), [1e-2] * 10, params_of(), gradients)
    for role, found in numbers(ours).items():
        np.testing.assert_allclose(found, numbers(params)[role], rtol=1e-5, atol=1e-7, err_msg=role)


def test_hyperparameters_are_float32_and_exact_to_its_digits():
    """A-18: beta2 is not 1, eps is not 0, the rate is the rate."""
    hyper = hyper_of(rate=1e-3, beta2=0.999, eps=1e-8, decay=0.1)
    assert {hyper[name].dtype for name in ("rate", "beta1", "beta2", "eps", "decay", "momentum", "clip")} == {jnp.dtype("float32")}
    assert abs(float(hyper["beta2"]) - 0.999) < 1e-6 and abs(float(hyper["rate"]) - 1e-3) < 1e-9
    assert abs(float(hyper["eps"]) - 1e-8) < 1e-15
    assert np.isinf(hyper["clip"]) and float(hyper_of(clip=0.5)["clip"]) == 0.5


@pytest.mark.parametrize("case", CASES)
def test_a_zero_gradient_moves_nothing(case):
    """A-18: 0 / (√0 + eps) is 0, not NaN, also in one layer of three; decay aside."""
    row = jnp.ones((3, 4, 5)).at[1].set(0.0)
    gradient = jax.tree.map(lambda g: row if g.shape == row.shape else jnp.zeros(g.shape), params_of())
    family, hyper = case.split("-")[0], hyper_of(**CASES[case] | {"decay": 0.0})
    start, end = params_of(), run(family, hyper, [0.1] * 3, params_of(), [gradient] * 3)
    assert (numbers(end)["up"][1] == numbers(start)["up"][1]).all()
    assert (numbers(end)["up"][0] != numbers(start)["up"][0]).all()
    assert all((numbers(end)[role] == numbers(start)[role]).all() for role in ROLES if role != "up")


@pytest.mark.parametrize("case", CASES)
def test_the_memory_is_a_tree_of_arrays_that_can_be_chosen_from(case):
    """What a skipped update relies on: every leaf is an array, and float32 or a count."""
    family, hyper = case.split("-")[0], hyper_of(**CASES[case])
    memory = optim.FAMILIES[family](hyper).init(params_of())
    kept = jax.tree.map(lambda x: jnp.where(True, x, x), memory)
    assert all(isinstance(x, jax.Array) and x.dtype in (jnp.float32, jnp.int32) for x in jax.tree.leaves(kept))
    assert jax.tree.structure(kept) == jax.tree.structure(memory)


# ── Who is decayed ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", ["adamw", "sgd", "lion", "adafactor", "muon"])
@pytest.mark.parametrize("model", MODELS)
def test_decay_shrinks_matrices_and_leaves_every_other_bit(model, family):
    """A-17: with a zero gradient, rate 0.1 and decay 0.1 one update makes matrices 0.99 of what they were."""
    params = model_params(**MODELS[model])
    zero = jax.tree.map(jnp.zeros_like, params)
    end = by_path(run(family, hyper_of(decay=0.1), [0.1], params, [zero]))
    shrunk = {name for name, value in end.items() if not (value == 0.5).all()}
    matrices = {name for name in end if ".branch." in name and name.split(".")[-1] in WEIGHTS} | ({"head"} & set(end))
    assert shrunk == matrices and len(matrices) == {"gelu": 5, "swiglu": 8, "sandwich": 4, "no bias": 5}[model]
    for name in matrices:
        np.testing.assert_allclose(end[name], 0.5 * 0.99, rtol=1e-6)


def test_adam_has_no_decay():
    params = model_params()
    end = run("adam", hyper_of(decay=0.1), [0.1], params, [jax.tree.map(jnp.zeros_like, params)])
    assert all((value == 0.5).all() for value in by_path(end).values())


@pytest.mark.parametrize("model", MODELS)
def test_decayed_and_undecayed_parameters_add_up(model):
    params = model_params(**MODELS[model])
    counts = loop.parameter_counts(params)
    assert counts["decayed"] + counts["undecayed"] == counts["total"] == sum(x.size for x in by_path(params).values())
    head = 0 if "model__tied" in MODELS[model] else 8 * 8
    assert counts["decayed"] == counts["matrices"] + head


def test_parameter_counts_by_hand():
    """Width 8, FFN width 32, vocabulary 8, 8 positions, 2 blocks of Pre-LN with biases."""
    assert (TINY.model.width, TINY.model.hidden, TINY.data.vocab, TINY.train.tokens, TINY.model.depth) == (
        8,
        32,
        8,
        8,
        2,
    )
    matrices = 2 * (4 * 8 * 8 + 2 * 8 * 32)
    biases = 2 * (4 * 8 + 32 + 8)
    norms = (2 * 2 + 1) * 2 * 8
    embeddings, head = 8 * 8 + 8 * 8, 8 * 8
    assert loop.parameter_counts(model_params()) == {
        "total": matrices + biases + norms + embeddings + head,
        "decayed": matrices + head,
        "undecayed": biases + norms + embeddings,
        "matrices": matrices,
    }


# ── Clipping ────────────────────────────────────────────────────────────────────────────────────────────────────────


def factor(norm: float, limit: float) -> float:
    return float(jax.jit(optim.clip_factor)(jnp.float32(norm), jnp.float32(limit)))


@pytest.mark.parametrize(("norm", "limit", "right"), [(5, 1, 0.2), (5, 2.5, 0.5), (1e-3, 1e-6, 1e-3), (7, 0, 0)])
def test_above_the_limit_gradients_are_scaled_down_to_it(norm, limit, right):
    """A-20: [3, 4] has length 5; at limit 1 a fifth of it is left."""
    assert factor(norm, limit) == pytest.approx(right)


@pytest.mark.parametrize(("norm", "limit"), [(5, 5), (5, 7), (5, np.inf), (0, 1), (0, 0), (0, np.inf)])
def test_below_the_limit_and_without_one_they_are_multiplied_by_exactly_one(norm, limit):
    assert factor(norm, limit) == 1.0


@pytest.mark.parametrize("key", ["eps", "update_clip"])
def test_adafactor_divides_by_no_zero(key):
    """Where a gradient is 0, as of a token that no batch holds, either would give NaN: a divergence that is none."""
    with pytest.raises(ConfigError) as caught:
        check(tiny(optim__name="adafactor", **{f"optim__{key}": 0.0}))
    assert f"optim.{key}=0.0" in str(caught.value) and "\n" not in str(caught.value)
    assert check(tiny(optim__name="lion", **{f"optim__{key}": 0.0}))


def test_the_names_of_the_config_are_those_of_the_table():
    assert set(CHOICES["optim.name"]) == set(optim.FAMILIES)
