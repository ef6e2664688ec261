"""Initialisation: the standard deviation of every matrix, which gains reach which roles, what draws them."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import flat, quick, settings

from normflax.build import transformer
from normflax.model.bases import DEVIATIONS
from normflax.model.placements import PLACEMENTS, N, Placement
from normflax.model.transformer import matrices, roles

WEIGHTS = ("attention.q", "attention.k", "attention.v", "attention.out", "ffn.up", "ffn.gate", "ffn.down")
WIDE: dict[str, Any] = {"model__depth": 12, "model__width": 8, "model__ffn_ratio": 4.0}
SQUARE, FFN = (2 / 16) ** 0.5, (2 / 40) ** 0.5  # Xavier-normal of 8 x 8 and of 8 x 32


def scaled(gain) -> dict:
    return dict.fromkeys(("v", "out", "up", "down"), gain) | {"q": 1.0, "k": 1.0, "gate": 1.0}


gpt2 = Placement(
    pre=N,
    final=N,
    gain=dict.fromkeys(("q", "k", "v", "up"), 1.0)
    | dict.fromkeys(("out", "down"), lambda kind, block, depths: depths.sublayers**-0.5),
    base="normal",
)
growing = Placement(pre=N, final=N, gain=scaled(lambda kind, block, depths: float(block)))


@cache
def initial(placement: str, **changes: Any) -> dict[str, np.ndarray]:
    """The parameters of a run that has made no update, by the reference's names."""
    _, static, hyper = settings(placement, **changes)
    return flat(program(static)(hyper))


@cache
def program(static):
    """Every number of `hyper` is traced, so settings with one static part share this."""
    return quick(lambda hyper: nnx.split(transformer(static, hyper))[1])


def deviations(placement: str, seeds: int = 50, **changes: Any) -> dict[str, np.ndarray]:
    """The standard deviation of every role in every block [L], over many seeds."""
    _, static, hyper = settings(placement, **WIDE, **changes)

    @quick
    def draw(seeds):
        return jax.vmap(lambda seed: matrices(nnx.split(transformer(static, hyper | {"seed": seed}))[1]))(seeds)

    return {role: np.asarray(w).std(axis=(0, 2, 3)) for role, w in draw(jnp.arange(seeds, dtype=jnp.uint32)).items()}


# ── Standard deviations ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("placement", "options", "expected"),
    [
        pytest.param(
            "deepnorm",
            {"model__ffn": "swiglu"},
            {"qk": 0.353553, "v": 0.112950, "out": 0.112950, "up": 0.071436, "down": 0.071436, "gate": FFN},
            id="deepnorm",
        ),
        pytest.param(
            "test_init:gpt2",
            {},
            {"qk": 0.02, "v": 0.02, "out": 0.00408248, "up": 0.02, "down": 0.00408248},
            id="gpt2",
        ),
        pytest.param(
            "deepnorm",
            {"model__init": "normal", "model__init_std": 0.5, "model__fused_qkv": False},
            {"qk": 0.5, "v": 0.159736, "out": 0.159736, "up": 0.159736, "down": 0.159736},
            id="another-base",
        ),
    ],
)
def test_every_role_has_its_standard_deviation(placement: str, options: dict, expected: dict[str, float]):
    """Twelve blocks, D 8, F 32, decoder-only. A-06 and A-07: the gain reaches its roles, and no other."""
    found = deviations(placement, **options)
    assert set(found) == {role for roles in expected for role in (roles if roles == "qk" else [roles])}
    for role, std in found.items():
        right = expected["qk"] if role in ("q", "k") else expected[role]
        np.testing.assert_allclose(std, right, rtol=0.08, err_msg=role)
        np.testing.assert_allclose(np.sqrt(np.mean(std**2)), right, rtol=0.02, err_msg=role)


def test_a_gain_belongs_to_its_block():
    found = deviations("test_init:growing")
    np.testing.assert_allclose(found["v"], SQUARE * np.arange(1, 13), rtol=0.08)
    np.testing.assert_allclose(found["q"], SQUARE, rtol=0.08)


@pytest.mark.parametrize(
    ("placement", "init", "base"),
    [
        ("pre", None, "xavier_normal"),
        ("deepnorm", None, "xavier_normal"),
        ("deepnorm", "normal", "normal"),
        ("test_init:gpt2", None, "normal"),
        ("test_init:gpt2", "xavier_normal", "xavier_normal"),
    ],
)
def test_the_base_is_the_settings_then_the_placements_then_xavier(placement: str, init: str | None, base: str):
    assert settings(placement, model__init=init)[1].base == base


def test_xavier_normal_is_glorots():
    assert DEVIATIONS["xavier_normal"](8, 32, None) == pytest.approx(0.223607, abs=1e-6)


@pytest.mark.parametrize(("tied", "positions"), [(False, "learned"), (True, "rope")])
def test_embeddings_and_head_have_their_standard_deviations(tied: bool, positions: str):
    """An untied head has D^-1/2, so that its logits have unit variance; a tied one is no parameter, nor is a rope."""
    wide = {"model__width": 64, "data__vocab": 500, "train__tokens": 300, "model__embed_std": 0.3, "model__depth": 1}
    found = initial("pre", **wide, model__position_std=0.07, model__tied=tied, model__positions=positions)
    np.testing.assert_allclose(found["embed.tokens"].std(), 0.3, rtol=0.02)
    assert ("head" in found, "embed.positions" in found) == (not tied, positions == "learned")
    if not tied:
        np.testing.assert_allclose(found["head"].std(), 1 / 8, rtol=0.02)
    if positions == "learned":
        np.testing.assert_allclose(found["embed.positions"].std(), 0.07, rtol=0.02)


def test_biases_start_at_zero_and_gains_at_the_setting():
    found = initial("sandwich", norm__gain=0.5, norm__gain_form="1+w")
    biases = [name for name in found if "bias" in name]
    scales = [name for name in found if name.endswith(".scale")]
    assert len(biases) == 11 and all((found[name] == 0).all() for name in biases)
    assert len(scales) == 5 and all((found[name] == -0.5).all() for name in scales)


# ── Gains ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("placement", "fused"), [*((name, True) for name in PLACEMENTS), ("deepnorm", False)])
def test_a_forced_gain_reaches_the_writers_exactly_and_nothing_else(placement: str, fused: bool):
    """A-06: 0.25 is a power of two, so the ratio is exact."""
    one = initial(placement, coef__gain=1.0, model__fused_qkv=fused)
    quarter = initial(placement, coef__gain=0.25, model__fused_qkv=fused)
    for name in one:
        writes = name in ("attention.v", "attention.out", "ffn.up", "ffn.down")
        np.testing.assert_array_equal(quarter[name], (0.25 if writes else 1.0) * one[name], err_msg=name)
    assert all((one[name] != 0).all() for name in set(one) & set(WEIGHTS))


# ── Randomness ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_weights_depend_on_the_seed_and_on_no_other_number():
    first, other = initial("deepnorm", seed=1), initial("deepnorm", seed=2)
    again = initial("deepnorm", seed=1, data__seed=7, optim__rate=0.1, train__steps=100, model__init_std=3.0)
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
        assert (first[name] != other[name]).all() or "bias" in name or "scale" in name


def test_no_two_matrices_start_alike():
    """A-08: blocks, roles and tables draw from keys of their own."""
    found = initial("pre", model__depth=3, model__ffn="swiglu", model__ffn_ratio=1.0, train__tokens=8)
    drawn = {f"{name}[{l}]": found[name][l] for name in WEIGHTS for l in range(3)}
    drawn |= {name: found[name] for name in ("embed.tokens", "embed.positions", "head")}
    assert {w.shape for w in drawn.values()} == {(8, 8)}
    for w in [*drawn.values()]:
        alike = [name for name, v in drawn.items() if abs(np.corrcoef(v.ravel(), w.ravel())[0, 1]) > 0.9]
        assert len(alike) == 1, alike


def test_a_role_draws_the_same_numbers_whatever_else_there_is():
    """Fused or apart, with biases or without, in any placement and for any FFN form."""
    plain = initial("pre")
    for options in ({"model__fused_qkv": False}, {"model__bias": False, "model__ffn": "swiglu", "model__tied": True}):
        found = initial("sandwich", **options)
        for name in set(WEIGHTS) & set(plain) & set(found) | {"embed.tokens", "embed.positions"}:
            np.testing.assert_array_equal(plain[name], found[name], err_msg=name)


def test_every_parameter_has_a_role():
    for options in ({}, {"model__ffn": "swiglu", "model__fused_qkv": False}):
        _, static, hyper = settings("sandwich", **options)
        shapes = nnx.split(nnx.eval_shape(lambda static=static, hyper=hyper: transformer(static, hyper)))[1]
        found = {path[-1]: role for path, role in nnx.to_flat_state(nnx.State(roles(shapes)))}
        branches = {"out", "up", "down"} | ({"gate", "q", "k", "v"} if options else {"qkv"})
        expected = {name: name for name in branches} | {f"{name}_bias": "bias" for name in branches}
        expected |= {"scale": "gain", "bias": "bias", "token_table": "embed", "position_table": "position"}
        assert found == expected | {"head": "head"}
