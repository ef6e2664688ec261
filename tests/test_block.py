"""One sublayer and one block: worked by hand, and equalities between entries."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import EVERY, settings

from normflax.model import norms
from normflax.model.block import Sublayer
from normflax.model.placements import (
    PLACEMENTS,
    Depths,
    N,
    Norm,
    Placement,
    Scales,
    find,
    norm_count,
    path_scales,
)

every_entry = pytest.mark.parametrize("entry", PLACEMENTS.values(), ids=PLACEMENTS)

# ── One sublayer, one block ─────────────────────────────────────────────────────────────────────────────────────────


class StandIn(nnx.Module):
    """A branch that is a function."""

    def __init__(self, f):
        self.f = f

    def __call__(self, x, dropout=None):
        return self.f(x)


def sublayer(f, entry: Placement, kind: str = "layer", **options: Any) -> Sublayer:
    def make(site: Norm | None):
        return norms.Identity() if site is None else norms.make(site.kind or kind, 4, **{"eps": 0.0} | options)

    return Sublayer(StandIn(f), entry, make)


def shift(v):
    return jnp.roll(v, 1, axis=-1)


def sparse(v):
    return v * jnp.array([1.0, 0.0, -1.0, 2.0]).reshape(1, 1, 4)


def block(entry: Placement, x=(1, 2, 3, 4), *, depth=6, kind: str = "layer", branches=(shift, sparse), **options):
    """The stream after attention and FFN stand-ins, in block 1 of `depth`."""
    scales = path_scales(entry, Depths(decoder=depth))
    x = entry_x = jnp.array(x, jnp.float32).reshape(1, 1, 4)
    for i, f in enumerate(branches):
        x, _ = sublayer(f, entry, kind, **options)(x, entry_x, Scales(*(jnp.float32(scale[0][i]) for scale in scales)))
    return np.asarray(x[0, 0])


OUT_ONLY = Placement(out=N, final=N)


@pytest.mark.parametrize(
    ("entry", "depth", "expected"),
    [
        pytest.param("post", 6, [-1 / 3, -1, -1 / 3, 5 / 3], id="post"),
        pytest.param("pre", 6, [2.223698, 0.658359, 2.513472, 7.347704], id="pre"),
        pytest.param("sandwich", 6, [1.713392, 0.122300, 1.985998, 6.178310], id="sandwich"),
        pytest.param("deepnorm", 6, [-0.712797, -0.832922, -0.122556, 1.668275], id="deepnorm-6"),
        pytest.param("deepnorm", 12, [-0.799227, -0.790406, -0.063387, 1.653020], id="deepnorm-12"),
        pytest.param("deepnorm", 100, [-1.007646, -0.678036, 0.099822, 1.585860], id="deepnorm-100"),
        pytest.param("deepnorm", 1000, [-1.151188, -0.589334, 0.232788, 1.507734], id="deepnorm-1000"),
        pytest.param(OUT_ONLY, 6, [2.381831, 0.147617, 1.441434, 6.029118], id="reordered"),
        pytest.param(Placement(pre=N, post=N, skip=12.0), 6, [-1.245632, -0.519060, 0.324714, 1.439978], id="keel-6"),
        pytest.param(
            Placement(pre=N, final=N, skip_from="u", skip=2.0),
            6,
            [-1.963961, -2.182179, 0.218218, 6.110101],
            id="minimax",
        ),
        pytest.param(Placement(pre=N, final=N, skip_from="block"), 6, [0.882057, 2, 2.960686, 6.900491], id="two-hop"),
        pytest.param(
            Placement(pre=N, final=N, branch=lambda kind, l, depths: 1.4 * depths.blocks**-0.5),
            12,
            [1.193564, 1.457782, 2.703043, 5.404391],
            id="minicpm-12",
        ),
    ],
)
def test_one_block_gives_the_worked_numbers(entry: str | Placement, depth: int, expected: list[float]):
    entry = find(entry) if isinstance(entry, str) else entry
    np.testing.assert_allclose(block(entry, depth=depth), expected, atol=2e-5)


def test_pre_rmsnorm_gives_the_worked_numbers():
    expected = [3.146164, 2.365148, 2.690962, 7.934829]
    np.testing.assert_allclose(block(PLACEMENTS["pre"], kind="rms"), expected, atol=2e-5)


def test_an_out_norm_without_gain_makes_the_block_the_identity():
    np.testing.assert_array_equal(block(OUT_ONLY, gain=0.0), [1, 2, 3, 4])


def added(entry: Placement, x: list[float], y: list[float], a: float, b: float) -> np.ndarray:
    """x' of one sublayer whose branch gives y."""
    x_, y_ = (jnp.array(v, jnp.float32).reshape(1, 1, 4) for v in (x, y))
    return np.asarray(sublayer(lambda _: y_, entry)(x_, x_, Scales(jnp.float32(a), jnp.float32(b), jnp.float32(1)))[0][0, 0])


@pytest.mark.parametrize(
    ("name", "x", "y", "a", "b", "expected"),
    [
        ("post", [2, 4, 6, 8], [1, -1, 1, -1], 1.0, 1.0, [-1, -1, 1, 1]),
        ("deepnorm", [2, 4, 6, 8], [1, -1, 1, -1], 2.0, 0.5, [-1.287453, -0.585206, 0.585206, 1.287453]),
        ("deepnorm", [1, -1, 1, -1], [1, 1, -1, -1], 2.0, 1.0, [1.341641, -0.447214, 0.447214, -1.341641]),
    ],
)
def test_one_sublayer_gives_the_worked_numbers(name: str, x: list, y: list, a: float, b: float, expected: list):
    """A-04: the skip is scaled by alpha and the branch by beta, not the other way round."""
    np.testing.assert_allclose(added(PLACEMENTS[name], x, y, a, b), expected, atol=2e-6)


def test_a_norm_that_is_none_is_no_norm():
    """Nothing is counted, and the equation has none: for the whole run, or for one site."""
    for placement in PLACEMENTS:
        static = settings(placement, norm__kind="none")[1]
        assert norm_count(static.entry, Depths(decoder=3)) == 0 and static.entry.sites == ()


def test_wires_are_what_each_norm_reads_and_what_is_added():
    entry = Placement(pre=N, out=N, post=N, skip_from="u")
    layer = sublayer(shift, entry)
    x = jnp.array([[[1.0, 5.0, 2.0, 7.0]]])
    state, wires = layer(x, x, Scales(jnp.float32(3), jnp.float32(0.5), jnp.float32(1)))
    u = layer.pre(x)
    y = shift(u)
    expected = {"pre": x, "u": u, "out": y, "skip": 3 * u, "written": 0.5 * layer.out(y), "post": 3 * u + 0.5 * layer.out(y)}
    assert set(wires) == set(expected)
    for wire, value in expected.items():
        np.testing.assert_allclose(wires[wire], value, rtol=1e-6, err_msg=wire)
    np.testing.assert_allclose(state, layer.post(wires["post"]), rtol=1e-6)


def test_a_site_may_fix_its_kind_of_norm():
    layer = sublayer(shift, Placement(pre=Norm("rms"), out=N, final=N), kind="layer")
    assert isinstance(layer.pre, norms.RMSNorm) and isinstance(layer.out, norms.LayerNorm)
    assert isinstance(layer.post, norms.Identity)


# ── Equalities between entries ──────────────────────────────────────────────────────────────────────────────────────

MATRIX = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), jnp.float32)


def linear(v):
    return v @ MATRIX


def cubic(v):
    return jnp.tanh(v @ MATRIX.T)


SOME = (linear, cubic)


def test_deepnorm_without_its_constants_is_post():
    entry = replace(PLACEMENTS["deepnorm"], skip=1.0)
    np.testing.assert_array_equal(block(entry, branches=SOME), block(PLACEMENTS["post"], branches=SOME))


def test_keel_without_its_inner_norm_is_deepnorm_at_its_alpha():
    keel, deepnorm = Placement(post=N, skip=12.0), replace(PLACEMENTS["deepnorm"], skip=12.0)
    np.testing.assert_array_equal(block(keel, branches=SOME), block(deepnorm, branches=SOME))


def test_a_skip_from_the_normalised_tensor_is_post_shifted_by_one_norm():
    """minimax: norm of the input, post, and its last norm is the final one."""
    first, last = norms.make("layer", 4, eps=0.0), norms.make("layer", 4, eps=0.0)
    shifted = block(Placement(pre=N, final=N, skip_from="u", skip=1.7), branches=SOME)
    start = first(jnp.array([[[1.0, 2.0, 3.0, 4.0]]]))[0, 0].tolist()
    np.testing.assert_allclose(
        last(jnp.asarray(shifted)), block(Placement(post=N, skip=1.7), start, branches=SOME), rtol=1e-5, atol=1e-6
    )


def test_sandwich_with_a_linear_branch_and_rmsnorm_needs_no_pre_norm():
    """RMS(F(RMS(x))) = RMS(F(x)) for a homogeneous F, and not with LayerNorm and a branch that moves the mean."""
    branches, sandwich = (linear, shift), PLACEMENTS["sandwich"]
    np.testing.assert_allclose(
        block(sandwich, kind="rms", branches=branches), block(OUT_ONLY, kind="rms", branches=branches), rtol=1e-5
    )
    assert np.abs(block(sandwich, branches=branches) - block(OUT_ONLY, branches=branches)).max() > 0.01


@pytest.mark.parametrize("c", [0.1, 7.0])
def test_only_the_ratio_of_skip_and_branch_counts_below_a_post_norm(c: float):
    whole = block(Placement(post=N, skip=1.7, branch=0.6), branches=SOME)
    np.testing.assert_allclose(block(Placement(post=N, skip=1.7 * c, branch=0.6 * c), branches=SOME), whole, rtol=1e-5)
    np.testing.assert_allclose(block(Placement(post=N, branch=0.6 / 1.7), branches=SOME), whole, rtol=1e-5)


@pytest.mark.parametrize("name", EVERY)
def test_a_block_with_no_branch_keeps_the_stream_up_to_its_norms(name: str):
    """F = 0: Pre-LN and Sandwich-LN are the identity; what has a post norm gives a normalised stream."""
    entry = find(name)
    x = block(entry, branches=(jnp.zeros_like, jnp.zeros_like), eps=1e-12)
    if entry.post or entry.skip_from == "u":
        scale = np.std(x) if entry.post else np.std(x) / path_scales(entry, Depths(decoder=6))[0][0][0]
        np.testing.assert_allclose(scale, 1.0, rtol=1e-5)
    else:
        np.testing.assert_array_equal(x, np.array([1, 2, 3, 4]) * path_scales(entry, Depths(decoder=6))[0][0][0])
