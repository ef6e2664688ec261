"""Optimisers on stacked parameters: every matrix as if it were alone."""

from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from optimisers import CASES, MODELS, WEIGHTS, by_path, hyper_of, numbers, params_of, program, reference, run
from tiny import filled, tiny

from normflax.model.transformer import matrices
from normflax.train import optim


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


def drawn(seed: int, **settings) -> nnx.State:
    """Parameters of a tiny model; each is drawn by its name, q, k and v by their own however they are stored."""

    def draw(path: tuple, shape: tuple[int, ...]) -> np.ndarray:
        if "qkv" in path[-1]:
            parts = [draw((*path[:-1], path[-1].replace("qkv", role)), (*shape[:-2], shape[-1])) for role in "qkv"]
            return np.stack(parts, axis=-2)
        return np.random.default_rng([seed, crc32(".".join(map(str, path)).encode())]).normal(size=shape).astype(np.float32)

    flat = nnx.to_flat_state(filled(tiny(**settings)))
    return nnx.from_flat_state([(path, v.replace(jnp.asarray(draw(path, v.shape)))) for path, v in flat])


@pytest.mark.parametrize("case", CASES)
def test_q_k_and_v_are_updated_as_three_matrices_however_they_are_stored(case):
    """The whole model, twice: with one array for q, k and v, and with three that hold the same numbers."""
    family, hyper, ends = case.split("-")[0], hyper_of(**CASES[case]), []
    for fused in (True, False):
        start, *gradients = (drawn(seed, model__fused_qkv=fused) for seed in range(4))
        ends.append(unfused(run(family, hyper, [0.1, 0.05, 0.2], start, gradients)))
    assert ends[0].keys() == ends[1].keys()
    for name, value in ends[0].items():
        np.testing.assert_allclose(value, ends[1][name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", [pytest.param(m, marks=() if m == "swiglu" else pytest.mark.slow) for m in MODELS])
def test_every_parameter_of_a_model_is_updated_as_the_papers_matrix_or_vector(model, case):
    """Layers, q, k and v one by one, embeddings and head whole; Muon's matrices are those of the branches, the head Adam's."""
    family, settings = case.split("-")[0], CASES[case]
    rates, states = [0.1, 0.05, 0.2], [drawn(seed, **MODELS[model]) for seed in range(4)]
    start, *gradients = map(unfused, states)
    end = unfused(run(family, hyper_of(**settings), rates, states[0], states[1:]))
    rest = {name: value for name, value in settings.items() if name != "decay"}
    for name, found in end.items():
        in_branch = ".branch." in name and name.split(".")[-1] in WEIGHTS
        method = "adam" if family == "muon" and not in_branch else family
        decay = settings.get("decay", 0.0) if in_branch or name == "head" else 0.0
        layers = range(len(found)) if name.startswith("blocks.") else [...]
        for layer in layers:
            path = [gradient[name][layer] for gradient in gradients]
            right = reference(method, rates, start[name][layer], path, decay, **rest)
            np.testing.assert_allclose(found[layer], right, rtol=1e-4, atol=1e-4 if family == "muon" else 1e-5, err_msg=name)


@pytest.mark.parametrize("model", MODELS)
def test_an_update_of_muon_is_as_large_as_one_of_adam(model):
    """Rms about 0.2 for every matrix of a branch, square or not."""
    start, gradient = drawn(0, **MODELS[model]), drawn(1, **MODELS[model])
    end = run("muon", hyper_of(momentum=0.95), [1.0], start, [gradient])
    change = matrices(jax.tree.map(jnp.subtract, end, start))
    for role, value in change.items():
        for layer in np.asarray(value):
            assert 0.15 < np.sqrt(np.mean(layer**2)) < 0.25, role


@pytest.mark.parametrize("family", optim.FAMILIES)
def test_other_numbers_compile_nothing(family):
    """One program for three updates, and for three more with every setting another."""
    program.cache_clear()
    params, gradients = params_of(), [params_of(seed=i) for i in (1, 2, 3)]
    settings = {"decay": 0.2, "beta1": 0.7, "beta2": 0.8, "eps": 1e-3, "momentum": 0.6, "memory": 0.5, "update_clip": 0.4}
    for hyper in (hyper_of(), hyper_of(**settings)):
        run(family, hyper, [0.1, 0.2, 0.3], params, gradients)
    assert program(family)._cache_size() == 1
