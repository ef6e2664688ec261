"""Optimisers against NumPy written from the papers and against optax's own; who is decayed; clipping."""

from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny import TINY, filled, tiny

from normflax.build import hyper_part
from normflax.checks import CHOICES
from normflax.train import loop, optim

ROLES = ("up", "gain", "bias", "embed")


class Toy(nnx.Module):
    """One parameter of each role that is treated in its own way; stacked norms have rank 2, as matrices have."""

    def __init__(self, layers: int = 3, seed: int = 0):
        for i, role in enumerate(ROLES):
            shape = (layers, 4, 5) if role == "up" else (layers, 5)
            setattr(self, role, nnx.Param(jax.random.normal(jax.random.key(10 * seed + i), shape), role=role))


def params_of(layers: int = 3, seed: int = 0) -> nnx.State:
    return nnx.State({"blocks": nnx.split(Toy(layers, seed))[1]})


def numbers(tree: nnx.State) -> dict[str, np.ndarray]:
    return {name: np.asarray(tree["blocks"][name][...]) for name in tree["blocks"]}


def hyper_of(**settings) -> dict:
    return hyper_part(tiny(**{f"optim__{name}": value for name, value in settings.items()}))


def run(family: str, hyper: dict, rates: list[float], params: nnx.State, gradients: list[nnx.State]) -> nnx.State:
    """The parameters after one update for each rate, every number traced."""

    @jax.jit
    def one(hyper, rate, gradient, memory, params):
        change, memory = optim.update(family, hyper, rate, gradient, memory, params)
        return jax.tree.map(jnp.add, params, change), memory

    memory = optim.FAMILIES[family](hyper).init(params)
    for rate, gradient in zip(rates, gradients, strict=True):
        params, memory = one(hyper, jnp.float32(rate), gradient, memory, params)
    return params


def reference(family: str, rates: list[float], p: np.ndarray, gradients: list[np.ndarray], decay: float, **h: float) -> np.ndarray:
    """One matrix or vector in float64, from the papers' algorithms."""
    p, state = p.astype(np.float64), {}
    for t, (rate, g) in enumerate(zip(rates, gradients, strict=True), start=1):
        p = p - rate * (DIRECTIONS[family](t, g.astype(np.float64), state, h) + decay * p)
    return p


def sgd(t: int, g: np.ndarray, s: dict, h: dict) -> np.ndarray:
    s["m"] = h["momentum"] * s.get("m", 0) + g
    return s["m"]


def adam(t: int, g: np.ndarray, s: dict, h: dict) -> np.ndarray:
    """Kingma and Ba's algorithm 1; with decay it is Loshchilov and Hutter's algorithm 2."""
    s["m"] = h["beta1"] * s.get("m", 0) + (1 - h["beta1"]) * g
    s["v"] = h["beta2"] * s.get("v", 0) + (1 - h["beta2"]) * g**2
    return (s["m"] / (1 - h["beta1"] ** t)) / (np.sqrt(s["v"] / (1 - h["beta2"] ** t)) + h["eps"])


def lion(t: int, g: np.ndarray, s: dict, h: dict) -> np.ndarray:
    """Chen et al.'s algorithm 2."""
    m = s.get("m", 0)
    s["m"] = h["beta2"] * m + (1 - h["beta2"]) * g
    return np.sign(h["beta1"] * m + (1 - h["beta1"]) * g)


def adafactor(t: int, g: np.ndarray, s: dict, h: dict) -> np.ndarray:
    """Shazeer and Stern's algorithms 4 (matrices) and 5 (vectors), with constant instead of relative steps."""
    past, square = 1 - t ** -h["memory"], g**2 + h["eps"]
    if g.ndim == 1:
        s["v"] = past * s.get("v", 0) + (1 - past) * square
        u = g / np.sqrt(s["v"])
    else:
        s["r"] = past * s.get("r", 0) + (1 - past) * square.mean(1)
        s["c"] = past * s.get("c", 0) + (1 - past) * square.mean(0)
        u = g / np.sqrt(np.outer(s["r"], s["c"]) / s["r"].mean())
    return u / max(1, np.sqrt(np.mean(u**2)) / h["update_clip"])


def muon(t: int, g: np.ndarray, s: dict, h: dict) -> np.ndarray:
    """Nesterov's momentum, each part of it without the bias of its start; five quintic Newton-Schulz steps; Liu et al.'s scale."""
    if g.ndim == 1:
        return adam(t, g, s, h)
    b = h["momentum"]
    s["m"] = b * s.get("m", 0) + (1 - b) * g
    x = b * s["m"] / (1 - b ** (t + 1)) + (1 - b) * g / (1 - b**t)
    x = x / np.linalg.norm(x)
    x = x.T if x.shape[0] > x.shape[1] else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return 0.2 * np.sqrt(max(g.shape)) * (x if x.shape == g.shape else x.T)


DIRECTIONS = {"sgd": sgd, "adam": adam, "adamw": adam, "lion": lion, "adafactor": adafactor, "muon": muon}


CASES = {
    "adam": {"beta1": 0.8, "beta2": 0.97, "eps": 1e-3},
    "adamw": {"beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "decay": 0.3},
    "sgd": {"momentum": 0.9, "decay": 0.2},
    "sgd-plain": {"momentum": 0.0},
    "lion": {"beta1": 0.9, "beta2": 0.99, "decay": 0.2},
    "adafactor": {"memory": 0.8, "eps": 1e-30, "update_clip": 1.0, "decay": 0.2},
    "adafactor-clipped": {"memory": 0.5, "eps": 1e-3, "update_clip": 0.3},
    "muon": {"momentum": 0.95, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "decay": 0.2},
}


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


@pytest.mark.parametrize("family", ["adam", "adamw", "lion", "adafactor", "muon"])
def test_a_zero_gradient_moves_nothing(family):
    """A-18: 0 / (√0 + eps) is 0, not NaN, also in one row of many."""
    row = jnp.ones((3, 4, 5)).at[1].set(0.0)
    gradient = jax.tree.map(lambda g: row if g.shape == row.shape else jnp.zeros(g.shape), params_of())
    start, end = params_of(), run(family, hyper_of(), [0.1] * 3, params_of(), [gradient] * 3)
    assert (numbers(end)["up"][1] == numbers(start)["up"][1]).all()
    assert (numbers(end)["up"][0] != numbers(start)["up"][0]).all()
    assert all((numbers(end)[role] == numbers(start)[role]).all() for role in ROLES if role != "up")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layers", [3, 200])
def test_a_stacked_update_is_every_layers_own(case, layers):
    """A-34: nothing is shared along the layer axis."""
    family, hyper = case.split("-")[0], hyper_of(**CASES[case])
    gradients = [params_of(layers, seed=i + 1) for i in range(3)]
    together = numbers(run(family, hyper, [0.1, 0.2, 0.1], params_of(layers), gradients))

    def one_layer(tree, layer):
        return jax.tree.map(lambda x: x[layer : layer + 1], tree)

    for layer in (0, 1, layers - 1):
        own = [one_layer(gradient, layer) for gradient in gradients]
        alone = run(family, hyper, [0.1, 0.2, 0.1], one_layer(params_of(layers), layer), own)
        for role, found in numbers(alone).items():
            np.testing.assert_allclose(found[0], together[role][layer], rtol=1e-6, atol=1e-8)


def unfused(params: nnx.State) -> dict[str, np.ndarray]:
    """Every parameter by its path, q, k and v apart."""
    found = {}
    for name, value in by_path(params).items():
        stem, _, leaf = name.rpartition(".")
        if leaf in ("qkv", "qkv_bias"):
            found |= {f"{stem}.{leaf.replace('qkv', role)}": value[..., i, :] for i, role in enumerate("qkv")}
        else:
            found[name] = value
    return found


@pytest.mark.parametrize("case", CASES)
def test_q_k_and_v_are_updated_as_three_matrices_however_they_are_stored(case):
    """The whole model, twice: with one array for q, k and v, and with three that hold the same numbers."""
    family, hyper, ends = case.split("-")[0], hyper_of(**CASES[case]), []
    for fused in (True, False):
        shapes = filled(tiny(model__fused_qkv=fused))

        def drawn(seed: int, shapes=shapes) -> nnx.State:
            return nnx.from_flat_state(
                [(path, v.replace(jnp.asarray(numbers_of(path, v.shape, seed)))) for path, v in nnx.to_flat_state(shapes)]
            )

        ends.append(unfused(run(family, hyper, [0.1, 0.05], drawn(0), [drawn(1), drawn(2)])))
    assert ends[0].keys() == ends[1].keys()
    for name, value in ends[0].items():
        np.testing.assert_allclose(value, ends[1][name], rtol=1e-4, atol=1e-5, err_msg=name)


def numbers_of(path: tuple, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Numbers that belong to a parameter's name; those of a fused array are its three parts'."""
    if "qkv" in path[-1]:
        parts = [numbers_of((*path[:-1], path[-1].replace("qkv", role)), (*shape[:-2], shape[-1]), seed) for role in "qkv"]
        return np.stack(parts, axis=-2)
    return np.random.default_rng([seed, crc32(".".join(map(str, path)).encode())]).normal(size=shape).astype(np.float32)


def test_an_update_of_muon_is_as_large_as_one_of_adam():
    """Rms about 0.2 for the matrices of the branches, whatever their shape."""
    params = params_of(seed=1)
    change = jax.tree.map(
        lambda new, old: new - old, run("muon", hyper_of(momentum=0.95), [1.0], params_of(), [params]), params_of()
    )
    assert 0.15 < np.sqrt(np.mean(numbers(change)["up"] ** 2)) < 0.25


@pytest.mark.parametrize("case", CASES)
def test_the_memory_is_a_tree_of_arrays_that_can_be_chosen_from(case):
    """What a skipped update relies on: every leaf is an array, and float32 or a count."""
    family, hyper = case.split("-")[0], hyper_of(**CASES[case])
    memory = optim.FAMILIES[family](hyper).init(params_of())
    kept = jax.tree.map(lambda x: jnp.where(True, x, x), memory)
    assert all(isinstance(x, jax.Array) and x.dtype in (jnp.float32, jnp.int32) for x in jax.tree.leaves(kept))
    assert jax.tree.structure(kept) == jax.tree.structure(memory)


# ── Who is decayed ──────────────────────────────────────────────────────────────────────────────────────────────────


def model_params(**settings) -> nnx.State:
    return filled(tiny(**settings), 0.5)


def by_path(params: nnx.State) -> dict[str, np.ndarray]:
    return {
        ".".join(str(key.key) for key in path if hasattr(key, "key") and key.key != "value"): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


MODELS = {
    "gelu": {},
    "swiglu": {"model__ffn": "swiglu", "model__fused_qkv": False, "model__positions": "rope"},
    "sandwich": {"placement": "sandwich", "model__tied": True, "norm__kind": "rms"},
    "no bias": {"placement": "deepnorm", "model__bias": False},
}
WEIGHTS = ("q", "k", "v", "qkv", "out", "up", "gate", "down")


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


def test_the_names_of_the_config_are_those_of_the_table():
    assert set(CHOICES["optim.name"]) == set(optim.FAMILIES)
