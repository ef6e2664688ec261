"""The table of placements: constants, what follows from an entry, and what is refused."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flax import nnx
from models import EVERY, settings, spec
from tiny import tiny

from normflax.build import hyper_part, transformer
from normflax.model import norms
from normflax.model.bases import DEVIATIONS
from normflax.model.placements import (
    FFN_ROLES,
    KINDS,
    PLACEMENTS,
    Depths,
    N,
    Norm,
    Placement,
    branch_roles,
    deepnorm_alpha,
    deepnorm_beta,
    find,
    norm_count,
    path_scales,
    role_gains,
)

every_entry = pytest.mark.parametrize("entry", PLACEMENTS.values(), ids=PLACEMENTS)

# ── Constants ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("blocks", "alpha", "beta"),
    [
        (6, 1.861210, 0.379918),
        (12, 2.213364, 0.319472),
        (24, 2.632148, 0.268642),
        (100, 3.760603, 0.188030),
        (1000, 6.687403, 0.105737),
    ],
)
def test_deepnorm_of_one_stack(blocks: int, alpha: float, beta: float):
    assert alpha * beta == pytest.approx(4**-0.25, abs=2e-6)
    for depths in (Depths(decoder=blocks), Depths(encoder=blocks, stack="encoder")):
        for kind in KINDS:
            assert deepnorm_alpha(kind, 1, depths) == deepnorm_alpha(kind, blocks, depths)
            assert deepnorm_alpha(kind, 1, depths) == pytest.approx(alpha, abs=1e-6)
            assert deepnorm_beta(kind, 1, depths) == pytest.approx(beta, abs=1e-6)


@pytest.mark.parametrize(
    ("n", "m", "encoder", "decoder"),
    [
        (6, 6, (1.417938, 0.496989), (2.059767, 0.343295)),
        (12, 12, (1.760878, 0.400198), (2.449490, 0.288675)),
        (100, 100, (3.415742, 0.206310), (4.161791, 0.169904)),
        (1000, 1000, (7.014311, 0.100466), (7.400828, 0.095544)),
        (12, 3, (0.81 * (12**4 * 3) ** (1 / 16), 0.87 * (12**4 * 3) ** (-1 / 16)), (9**0.25, 36**-0.25)),
    ],
)
def test_deepnorm_of_an_encoder_and_a_decoder(n: int, m: int, encoder: tuple, decoder: tuple):
    for depths, (alpha, beta) in (
        (Depths(encoder=n, decoder=m, stack="encoder"), encoder),
        (Depths(encoder=n, decoder=m, stack="decoder"), decoder),
    ):
        assert deepnorm_alpha("ffn", 1, depths) == pytest.approx(alpha, abs=1e-6)
        assert deepnorm_beta("ffn", 1, depths) == pytest.approx(beta, abs=1e-6)


def test_a_decoder_with_an_encoder_has_three_sublayers_a_block():
    assert Depths(decoder=5).sublayers == 10
    assert Depths(encoder=4, decoder=5).sublayers == 15
    assert Depths(encoder=4, decoder=5, stack="encoder").sublayers == 8


# ── The table ───────────────────────────────────────────────────────────────────────────────────────────────────────

WIRING: dict[str, dict[str, Any]] = {
    "post": {"post": True},
    "pre": {"pre": True, "final": True},
    "sandwich": {"pre": True, "out": True, "final": True},
    "deepnorm": {"post": True, "a": 6**0.25},
}


@pytest.mark.parametrize("name", WIRING)
def test_the_four_placements_are_the_published_ones(name: str):
    """The wiring that every parity test takes from the entry, written down once more by hand, at three blocks."""
    config, static, hyper = settings(name, model__depth=3)
    found = vars(spec(config, static, hyper))
    declared = {"pre": False, "out": False, "post": False, "final": False, "embed": False, "skip_from": "x"}
    for key, value in (declared | {"a": 1.0, "b": 1.0} | WIRING[name]).items():
        assert np.allclose(found[key], value) if key in "ab" else found[key] == value, key
    gain = 24**-0.25 if name == "deepnorm" else 1.0
    for role in ("q", "k", "v", "out", "up", "down"):
        np.testing.assert_allclose(hyper["gains"][role], [1.0 if role in "qk" else gain] * 3, rtol=1e-6)


@every_entry
def test_an_entry_is_complete(entry: Placement):
    """Every later entry too: a label, a source with its year, gains for every FFN form, a known base initialiser."""
    assert entry.label and any(str(year) in entry.source for year in range(2017, 2030))
    assert entry.base is None or entry.base in DEVIATIONS
    for ffn in FFN_ROLES:
        gains = role_gains(entry, Depths(decoder=4), branch_roles(ffn))
        assert set(gains) == {"q", "k", "v", "out", *FFN_ROLES[ffn]}
        assert all(len(values) == 4 and all(math.isfinite(v) and v >= 0 for v in values) for values in gains.values())
    for scales in path_scales(entry, Depths(decoder=4)):
        assert np.shape(scales) == (4, 2) and np.isfinite(scales).all()


def test_labels_are_told_apart():
    assert len({entry.label for entry in PLACEMENTS.values()}) == len(PLACEMENTS)


def built_norms(name: str, depth: int) -> int:
    """Norm layers of the model itself: a stacked one counts once a block."""
    static, hyper = settings(name, model__depth=depth)[1:]
    built = nnx.eval_shape(lambda: transformer(static, hyper))
    found = [module for _, module in nnx.iter_graph(built) if isinstance(module, norms.LayerNorm | norms.RMSNorm)]
    return sum(1 if norm.affine.scale.ndim == 1 else norm.affine.scale.shape[0] for norm in found)


@pytest.mark.parametrize(("name", "count"), [("post", 6), ("deepnorm", 6), ("pre", 7), ("sandwich", 13)])
def test_norms_of_a_model_of_three_blocks(name: str, count: int):
    """A-05: a final norm where the last write has no norm, and no second one where it has."""
    assert built_norms(name, 3) == count


@pytest.mark.parametrize("name", EVERY)
def test_norms_are_counted_from_the_entry_as_in_the_model(name: str):
    assert built_norms(name, 3) == norm_count(find(name), Depths(decoder=3))


def test_coefficients_know_their_branch_block_and_depth():
    entry = Placement(
        post=N,
        skip=lambda kind, block, depths: 100 * depths.blocks + 10 * block + KINDS.index(kind),
        branch=lambda kind, block, depths: -block,
        gain=dict.fromkeys(("q", "k", "v", "out"), lambda kind, block, depths: block + (kind == "ffn") * 10.0)
        | dict.fromkeys(("up", "down"), lambda kind, block, depths: block + (kind == "ffn") * 10.0),
    )
    skip, branch, read = path_scales(entry, Depths(decoder=2))
    assert skip == [[210, 211], [220, 221]] and branch == [[-1, -1], [-2, -2]] and read == [[1, 1], [1, 1]]
    gains = role_gains(entry, Depths(decoder=2), branch_roles("gelu"))
    assert gains["q"] == gains["out"] == [1.0, 2.0] and gains["up"] == gains["down"] == [11.0, 12.0]


@pytest.mark.parametrize("name", PLACEMENTS)
def test_alpha_and_beta_replace_what_is_declared(name: str):
    """`coef.alpha` is every skip scale, `coef.beta` every branch scale, and without them the declaration stays."""
    skip, branch, read = path_scales(find(name), Depths(decoder=2))
    plain, alpha = hyper_part(tiny(placement=name)), hyper_part(tiny(placement=name, coef__alpha=3.0))
    beta = hyper_part(tiny(placement=name, coef__beta=0.25))
    np.testing.assert_allclose(plain["skip"], skip, rtol=1e-6)
    np.testing.assert_allclose(plain["branch"], branch, rtol=1e-6)
    np.testing.assert_allclose(plain["input"], read, rtol=1e-6)
    assert (alpha["skip"] == 3).all() and (alpha["branch"] == plain["branch"]).all()
    assert (beta["branch"] == 0.25).all() and (beta["skip"] == plain["skip"]).all()


# ── Refused ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_unknown_placement_is_named_with_its_nearest():
    with pytest.raises(ValueError, match=r"'pree' is unknown: .*post, pre, .*; did you mean 'pre'\?") as error:
        find("pree")
    assert "package.module:name" in str(error.value)
    with pytest.raises(ValueError, match="'zzz' is unknown") as error:
        find("zzz")
    assert "did you mean" not in str(error.value)


def test_an_import_path_is_a_placement(tmp_path, monkeypatch):
    lines = ["from normflax.model.placements import N, Placement", "mine = Placement(post=N, skip=2.0)", "other = 3"]
    (tmp_path / "my_lab.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    assert find("my_lab:mine") == Placement(post=N, skip=2.0)
    with pytest.raises(ValueError, match="'my_lab:other' is int, not a normflax Placement"):
        find("my_lab:other")
    with pytest.raises(ValueError, match=r"'my_lab:mime' can't be imported: .*mime"):
        find("my_lab:mime")
    with pytest.raises(ValueError, match=r"'my_lib:mine' can't be imported: .*my_lib"):
        find("my_lib:mine")


@pytest.mark.parametrize("role", ["q", "k", "v", "out", "up", "gate", "down"])
def test_gains_with_a_role_left_out_are_refused(role: str):
    """A-07, and the guard that makes a new role an explicit choice: `gate` matters only where there is one."""
    whole = PLACEMENTS["deepnorm"]
    assert whole.gain is not None
    entry = replace(whole, gain={name: gain for name, gain in whole.gain.items() if name != role})
    with pytest.raises(ValueError, match=f"none for role '{role}'"):
        role_gains(entry, Depths(decoder=2), branch_roles("swiglu"))
    if role == "gate":
        assert role not in role_gains(entry, Depths(decoder=2), branch_roles("gelu"))


@pytest.mark.parametrize("sites", [{"pre": N}, {"out": N}, {"pre": N, "out": N}])
def test_a_stream_that_reaches_the_head_unnormalised_is_refused(sites: dict[str, Norm]):
    with pytest.raises(ValueError, match="'final' norm before the head"):
        Placement(**sites)
    Placement(**sites, final=N)
    Placement(**sites, post=N)


def test_an_entry_without_norms_needs_no_final_norm():
    assert Placement().sites == ()
