"""Models of every entry with uniform attention, at small size and deep and wide, against their theory curves."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import EVERY
from tiny import tiny

from normflax import theory
from normflax.build import hyper_part, programs, static_part
from normflax.config import change
from normflax.data import batches

FORMS = {
    "plain": {"model__ffn": "relu", "model__init": "xavier_normal"},
    "bidirectional": {"model__ffn": "gelu", "model__init": "xavier_normal", "model__mask": "bidirectional", "norm__kind": "rms"},
    "lecun": {"model__ffn": "gelu", "model__init": "lecun", "model__embed_std": 0.5, "model__embed_norm": True},
    "swiglu": {
        "model__ffn": "swiglu",
        "model__init": "normal",
        "model__init_std": 0.1,
        "model__positions": "sinusoidal",
        "norm__kind": "rms",
    },
    "scaled": {
        "model__ffn": "relu",
        "model__init": "lecun",
        "norm__gain": 0.8,
        "coef__beta": 0.6,
        "model__heads": 4,
        "model__kv_heads": 2,
    },
}
FIELDS = ["second_moment", "token_cosine", "rank_one_residual", "norm_input", "branch_ratio", "grad_frobenius", "grad_rms"]
FIELDS += ["grad_matrix", "grad_block"]


def read(placement: str, seeds: int, fields: list[str], **settings):
    """What models with W_Q = W_K = 0 show, and the curves for the batch they saw."""
    config = tiny(placement=placement, train__steps=0, data__vocab=64, probe__fields=fields, probe__seeds=seeds)
    config = change(config, coef__qk_gain=0.0, **settings)
    loaded = batches.load(config.data)
    static, hyper = static_part(config, loaded.task), hyper_part(config)
    found = programs(static).initial(hyper, {}, jnp.arange(seeds, dtype=jnp.uint32))[1]
    batch = batches.draw(loaded.task, {}, hyper["data_seed"], 0, config.train.batch, config.train.tokens)
    return jax.device_get(found), theory.of_config(config, theory.Inputs(*(np.asarray(x) for x in batch), vocab=64)).fields


@cache
def measured(placement: str, form: str):
    """Width 96, 4 blocks, 64 seeds."""
    size = {"model__width": 96, "model__depth": 4, "train__tokens": 8, "data__seed": 5}
    return read(placement, 64, FIELDS, **size, **FORMS[form])


def held(name: str, values: np.ndarray, theory: np.ndarray, bound: float, power: int):
    """Theory lies within `bound`, or three standard errors, of the rms over seeds (power 2) or of the mean (power 1)."""
    mean = np.mean(values**power, axis=0)
    error = np.std(values**power, axis=0, ddof=1) / np.sqrt(len(values)) / mean / power
    ratio = (mean / theory**power) ** (1 / power)
    assert (np.abs(ratio - 1) <= np.maximum(bound, 3 * error)).all(), f"{name}: {ratio.round(3)}, errors {error.round(3)}"


CASES = [
    *((name, "plain") for name in EVERY),
    ("post", "bidirectional"),
    *(
        pytest.param(name, form, marks=pytest.mark.slow)
        for name in ("post", "sandwich", "lns")
        for form in FORMS
        if form != "plain" and (name, form) != ("post", "bidirectional")
    ),
]


@pytest.mark.parametrize(("placement", "form"), CASES)
def test_theory_is_what_models_show(placement: str, form: str):
    """5 % or 3 standard errors for the stream, 10 % or 3 for root-mean-square gradients."""
    fields, expected = measured(placement, form)
    held("second_moment", fields["second_moment"], expected["second_moment"], 0.05, 1)
    held("branch_ratio", fields["branch_ratio"], expected["branch_ratio"], 0.05, 1)
    for site, values in expected["norm_input"].items():
        held(f"norm_input {site}", fields["norm_input"][site], values, 0.05, 1)
    np.testing.assert_allclose(fields["token_cosine"].mean(0), expected["token_cosine"], atol=0.03)
    np.testing.assert_allclose(fields["rank_one_residual"].mean(0), expected["rank_one_residual"], atol=0.03)
    for name in ("grad_frobenius", "grad_rms", "grad_block"):
        held(name, fields[name], expected[name], 0.1, 2)
    assert set(expected["grad_matrix"]) == set(fields["grad_matrix"]) - {"q", "k"}
    for role, values in expected["grad_matrix"].items():
        held(role, fields["grad_matrix"][role], values, 0.1, 2)


DEEP = [
    *(
        (name, *form)
        for name in ("post", "pre", "sandwich", "deepnorm")
        for form in (("layer", "relu", "bidirectional"), ("rms", "gelu", "causal"))
    ),
    ("lns", "layer", "gelu", "causal"),
    ("scaled_init", "rms", "relu", "bidirectional"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("placement", "norm", "ffn", "mask"), DEEP)
def test_theory_is_what_deep_and_wide_models_show(placement: str, norm: str, ffn: str, mask: str):
    """Width 256, 32 blocks, 16 seeds: the bounds that the theory promises."""
    fields, expected = read(
        placement,
        16,
        ["second_moment", "grad_frobenius", "grad_block"],
        model__width=256,
        model__heads=4,
        model__depth=32,
        model__ffn=ffn,
        model__mask=mask,
        model__bias=False,
        model__init="xavier_normal",
        norm__kind=norm,
        train__tokens=32,
        data__seed=1234,
    )
    held("second_moment", fields["second_moment"], expected["second_moment"], 0.05, 1)
    for name in ("grad_frobenius", "grad_block"):
        held(name, fields[name], expected[name], 0.1, 2)
