"""Theory curves: the recursion written out for the papers' placements, closed forms, and models of every entry at small size."""

import numpy as np
import pytest
from models import EVERY
from tiny import tiny

from normflax import theory
from normflax.checks import ConfigError
from normflax.config import Coef
from normflax.model.attention import MASKS as MODEL_MASKS
from normflax.model.placements import FFN_ROLES, PLACEMENTS, N, Norm, Placement, deepnorm_alpha
from normflax.theory import branches, curves, gram
from normflax.theory.placement_curves import normed

# ── The recursion, by hand ──────────────────────────────────────────────────────────────────────────────────────────


def normalised(K):
    return K / np.sqrt(np.outer(np.diag(K), np.diag(K)))


def relu_pair(r):
    """(E of the product of two rectified unit Gaussians, of their slopes), each over its value at r = 1."""
    r = np.clip(r, -1, 1)
    return (np.sqrt(1 - r**2) + r * (np.pi - np.arccos(r))) / np.pi, 1 - np.arccos(r) / np.pi


@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
@pytest.mark.parametrize("name", ["post", "pre", "sandwich", "deepnorm", "lns", "scaled_init"])
def test_curves_are_the_recursion_written_out(name: str, mask: str):
    """Wang et al., Xiong et al.: each placement's own equations, for Xavier weights, ReLU of ratio 4, six blocks, five tokens."""
    L, n, D, V = 6, 5, 16, 64
    A = np.tril(np.ones((n, n))) if mask == "causal" else np.ones((n, n))
    A /= A.sum(1, keepdims=True)
    scale = {"deepnorm": 1 / (8 * L), "scaled_init": 1 / (2 * L)}.get(name, 1.0)  # of a branch's variance
    alpha = (2 * L) ** 0.25 if name == "deepnorm" else 1.0
    K, forward = np.eye(n) * (1 + 0.02**2), []
    q = [np.trace(K) / n]
    for s in range(2 * L):
        U = normalised(K) if name not in ("post", "deepnorm") else K
        u = U / (s // 2 + 1) if name == "lns" else U
        d = np.sqrt(np.outer(np.diag(u), np.diag(u)))
        # Xavier: 2/(5D) for both matrices of the FFN, so D·2/(5D) · 4D·2/(5D) / 2 = 0.32 of E relu².
        B = scale * (A @ u @ A.T if s % 2 == 0 else 0.32 * d * relu_pair(u / d)[0])
        Z = alpha**2 * K + (normalised(B) if name == "sandwich" else B)
        forward.append((K, u, B, Z))
        K = normalised(Z) if name in ("post", "deepnorm") else Z
        q.append(np.trace(K) / n)
    found = curves(name, L, tokens=n, vocab=V, width=D, heads=2, ffn="relu", init="xavier_normal", mask=mask, position_std=0.02)
    np.testing.assert_allclose(found.fields["second_moment"], q, rtol=1e-4)  # the norms' eps is left out above

    head = normalised(K)
    M = (gram.overlap(head, V) - 2 / V + np.where(np.eye(n), 1, 1 / V)) / n**2
    if name not in ("post", "deepnorm"):
        M = M / np.sqrt(np.outer(np.diag(K), np.diag(K)))
    squares, down, out = [np.trace(M)], [], []
    for s in reversed(range(2 * L)):
        K, u, B, Z = forward[s]
        divide = np.sqrt(np.outer(np.diag(Z), np.diag(Z)))
        M = M / divide if name in ("post", "deepnorm") else M
        inner = M / np.sqrt(np.outer(np.diag(B), np.diag(B))) if name == "sandwich" else M
        d = np.sqrt(np.outer(np.diag(u), np.diag(u)))
        back = scale * (A.T @ inner @ A if s % 2 == 0 else 0.32 * inner * relu_pair(u / d)[1])
        if s % 2:  # Σ R M with R = 4D · D w_1²/2 · k1, w_1² = 2/(5D) times beta² where the role has a gain
            w1 = 2 / (5 * D) * (scale**0.5 if name == "deepnorm" else 1)
            down.append(np.sum(4 * D * D * w1 / 2 * d * relu_pair(u / d)[0] * inner))
        else:
            out.append(np.sum(D * D * (1 / D) * (scale**0.5 if name == "deepnorm" else 1) * (A @ u @ A.T) * inner))
        read = back / (s // 2 + 1) if name == "lns" else back
        through = read if name in ("post", "deepnorm") else read / np.sqrt(np.outer(np.diag(K), np.diag(K)))
        M = alpha**2 * M + through
        squares.append(np.trace(M))
    np.testing.assert_allclose(found.fields["grad_frobenius"], np.sqrt(squares[::-1]), rtol=1e-4)
    np.testing.assert_allclose(found.fields["grad_matrix"]["down"], np.sqrt(down[::-1]), rtol=1e-4)
    np.testing.assert_allclose(found.fields["grad_matrix"]["out"], np.sqrt(out[::-1]), rtol=1e-4)


# ── Closed forms ────────────────────────────────────────────────────────────────────────────────────────────────────

SQUARE = {"ffn": "relu", "init": "xavier_normal", "mask": "bidirectional", "position_std": 0.0}


def test_the_streams_that_have_a_closed_form():
    for name in ("post", "deepnorm"):
        np.testing.assert_allclose(curves(name, 20, **SQUARE).fields["second_moment"], 1.0, rtol=1e-5)
    np.testing.assert_allclose(curves("sandwich", 20, **SQUARE).fields["second_moment"], 1 + np.arange(41), rtol=1e-4)
    q = curves("pre", 20, **SQUARE).fields["second_moment"][::2]
    l = np.arange(21)
    assert (q >= 1 + l * (0.32 + 1 / 32) - 1e-6).all() and (q <= 1 + l * 1.32 + 1e-6).all()  # between aligned never and always


def test_deepnorms_norms_read_alpha():
    """Sublayer inputs of its norms: √(alpha² + beta⁴·(s_A or f)); and its gradients are level to O(1/L)."""
    found = curves("deepnorm", 100, **SQUARE).fields
    alpha = deepnorm_alpha("ffn", 1, depths(100))
    np.testing.assert_allclose(found["norm_input"]["post"], alpha, rtol=1e-3)
    np.testing.assert_allclose(found["grad_frobenius"], found["grad_frobenius"][-1], rtol=5e-3)


def depths(blocks: int):
    from normflax.model.placements import Depths

    return Depths(decoder=blocks)


def test_the_last_ffn_gradient_has_the_published_laws():
    """K0/√(1 + f) at every depth for Post-LN, K0/(2√L) for DeepNorm, 1/√L for Pre-LN and Sandwich-LN; K0 = 1.272 where tokens
    are apart (D = 64, T = 32, V = 64)."""
    last = {name: [curves(name, L, **SQUARE).fields["grad_matrix"]["down"][-1] for L in (32, 128)] for name in PLACEMENTS}
    np.testing.assert_allclose(last["deepnorm"], [1.272 / (2 * np.sqrt(L)) for L in (32, 128)], rtol=0.03)
    for name in ("pre", "sandwich"):
        assert last[name][1] / last[name][0] == pytest.approx(0.5, abs=0.06)
    assert last["post"][1] == pytest.approx(last["post"][0], rel=1e-3)
    assert last["lns"][1] / last["lns"][0] == pytest.approx(0.5, abs=0.1)


def test_post_lns_gradient_has_a_floor_of_one_over_the_root_of_the_tokens():
    """Its part that tokens don't share halves in square with every block; what they share stays."""
    for tokens in (8, 32):
        g = curves("post", 40, tokens=tokens, **SQUARE).fields["grad_frobenius"]
        assert 0.5 / np.sqrt(tokens) < g.min() / g[-1] < 3 / np.sqrt(tokens)
        np.testing.assert_allclose((g[-7] ** 2 - g[40] ** 2) / (g[-3] ** 2 - g[40] ** 2), 0.25, rtol=0.2)


def test_tokens_align_by_a_law():
    """Post-LN's attention alone: rho -> 2 rho/(1 + rho) as T grows, so the odds double per block; DeepNorm's stay."""
    apart = 1 - curves("post", 30, tokens=256, gradients=False, **SQUARE).fields["token_cosine"][::2]
    np.testing.assert_allclose(apart[16:24] / apart[15:23], 0.5, rtol=0.03)
    assert curves("deepnorm", 30, gradients=False, **SQUARE).fields["token_cosine"][-1] < 0.05


def test_post_ln_is_deepnorm_at_alpha_and_beta_of_one():
    coef = Coef(alpha=1.0, gain=1.0)
    post, deepnorm = (curves(name, 12, coef=coef, **SQUARE) for name in ("post", "deepnorm"))
    for field in ("grad_frobenius", "grad_block", "token_cosine"):
        np.testing.assert_allclose(post.fields[field], deepnorm.fields[field], rtol=1e-12)


def test_with_a_post_norm_only_the_ratio_of_the_scales_counts():
    one, other = (curves(Placement(post=N, skip=a, branch=b), 6) for a, b in ((2.0, 0.5), (4.0, 1.0)))
    for field in ("second_moment", "grad_frobenius", "grad_block"):
        np.testing.assert_allclose(one.fields[field], other.fields[field], rtol=1e-5)


# ── The interface ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_entry_has_a_curve_at_any_depth():
    for name in EVERY:
        for depth in (1, 3):
            found = curves(name, depth)
            assert all(np.isfinite(np.ravel(values)).all() for values in found.fields.values() if not isinstance(values, dict))
            assert len(found.table()) and f"{depth} blocks" in str(found)


def test_without_gradients_the_stream_alone():
    found = curves("pre", 4, gradients=False)
    assert not any(name.startswith("grad") for name in found.fields)
    np.testing.assert_array_equal(found.fields["second_moment"], curves("pre", 4).fields["second_moment"])


def test_an_entry_of_ones_own_is_the_same_as_its_name():
    assert curves("pre", 2).placement == "Pre-LN" and curves(Placement(post=N), 2).placement == "a placement of your own"
    for field in ("second_moment", "grad_block"):
        np.testing.assert_array_equal(curves(PLACEMENTS["sandwich"], 3).fields[field], curves("sandwich", 3).fields[field])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: curves("pre", 0), ["model.depth=0", "at least 1"]),
        (lambda: curves("pre", 2, tokens=1), ["train.tokens=1"]),
        (lambda: curves("pre", 2, ffn="swish"), ["model.ffn", "swish", "swiglu"]),
        (lambda: curves("pree", 2), ["placement", "pree", "pre"]),
        (lambda: curves("pre", 2, init="xavier"), ["model.init", "xavier_normal"]),
        (lambda: curves("pre", 2, widht=8), ["widht", "width"]),
    ],
)
def test_what_can_not_be_is_one_sentence(call, words):
    with pytest.raises(ConfigError) as error:
        call()
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: curves("pre", 2, tied=True), "model.tied"),
        (lambda: curves("pre", 2, dropout=0.1), "dropout"),
        (lambda: curves("pre", 2, norm="none", embed_std=2.0), "variance"),
        (lambda: curves("pre", 2, positions="sinusoidal"), "sinusoidal"),
    ],
)
def test_what_theory_does_not_cover_says_why(call, reason):
    with pytest.raises(theory.Uncovered, match=reason):
        call()


def test_a_norm_that_theory_does_not_know_says_so():
    with pytest.raises(theory.Uncovered, match="norm 'tanh'"):
        normed(Norm("tanh"), tiny().norm)


def test_tables_of_theory_are_those_of_the_model():
    assert set(branches.MASKS) == set(MODEL_MASKS) and set(branches.KERNELS) == set(FFN_ROLES)
    for mask, weights in branches.MASKS.items():
        seen = np.asarray(MODEL_MASKS[mask](5))
        np.testing.assert_allclose(weights(5), seen / seen.sum(1, keepdims=True))
