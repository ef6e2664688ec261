"""What the NumPy reference measures, against hand-worked numbers and laws."""

import math

import numpy as np
import pytest
import reference as ref
import reference_probes as probed
from test_reference import PLACEMENTS, D, T, V, make_spec, random_batch, random_params


def test_statistics_give_the_worked_numbers():
    x, f = np.array([[[1.0, 3.0], [-4.0, 0.0]]]), np.array([[[0.0, 1.0], [6.0, 8.0]]])
    logits, scores = np.log([[[1.0, 3.0], [2.0, 6.0]]]), np.array([[[[0.0, -np.inf], [math.log(3), 0.0]]]])
    seen = {"logits": logits, "scores": [scores]}
    found = probed.statistics(ref.Trace(states=[x, f], branch=[(f, x)], norm_inputs={"ffn.pre": [x, f]}, **seen))
    assert found["second_moment"] == pytest.approx([26 / 4, 101 / 4])
    assert found["variance"] == pytest.approx([(1 + 4) / 2, (1 / 4 + 1) / 2])
    assert found["peak"] == pytest.approx([4, 8])
    assert found["norm_input"]["ffn.pre"] == pytest.approx([(10**0.5 + 4) / 2 / 2**0.5, 11 / 2 / 2**0.5])
    assert found["branch_ratio"] == pytest.approx([(1 / 10**0.5 + 10 / 4) / 2])
    assert (found["log_z"], found["log_z_rms"]) == pytest.approx((2.5 * math.log(2), math.log(2) * math.sqrt(6.5)))
    assert found["mean_logit"] == pytest.approx(math.log(36) / 4)
    assert found["max_logit"] == pytest.approx([math.log(3)])
    assert found["attention_entropy"] == pytest.approx([0.562335 / 2], abs=1e-6)
    assert found["attention_entropy_share"] == pytest.approx([0.811278], abs=1e-6)
    gradient = probed.gradient_statistics(x, np.array([[True, True, True]]))
    assert gradient == pytest.approx({"grad_rms": 3 * math.sqrt(26 / 4), "grad_frobenius": math.sqrt(26)})


def test_numerical_gradient_of_a_cubic():
    x = np.array([[1.0, 2.0], [3.0, 4.0]])
    slopes = probed.numerical_gradient(lambda x: float(np.sum(x**3) + x[0, 0] * x[1, 1]), x, [(1, 1), (0, 1)])
    np.testing.assert_allclose(slopes, [49, 12], rtol=1e-8)
    np.testing.assert_array_equal(x, [[1, 2], [3, 4]])


def test_last_activation_gradient_is_the_analytic_one():
    """Post-norm has no final norm: G_S = (softmax - onehot) W_head^T / valid, and 0 where there is no target."""
    spec, params, (tokens, targets, mask) = make_spec(post=True), random_params(), random_batch()
    odds = np.exp(ref.forward(params, tokens, spec).logits)
    errors = odds / odds.sum(-1, keepdims=True) - np.eye(V)[targets]
    expected = errors * mask[..., None] @ params["head"].T / mask.sum()
    found = probed.activation_gradient(params, tokens, targets, mask, spec, 2 * spec.depth)
    np.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_activation_gradients_agree_with_gradients_of_biases(name: str):
    """A bias that is added to state s, times b where no norm follows, has the sum of G_s over tokens as gradient."""
    spec, params, (tokens, targets, mask) = make_spec(**PLACEMENTS[name]), random_params(), random_batch()

    def slopes(parameter: str, indices) -> np.ndarray:
        def changed(w: np.ndarray) -> float:
            return ref.loss(ref.forward({**params, parameter: w}, tokens, spec), targets, mask)

        return probed.numerical_gradient(changed, params[parameter], indices)

    gradients = [probed.activation_gradient(params, tokens, targets, mask, spec, s) for s in range(2 * spec.depth + 1)]
    if spec.embed:
        np.testing.assert_allclose(slopes("embed.bias", np.ndindex(D)), gradients[0].sum((0, 1)), atol=1e-8)
    else:
        by_position = slopes("embed.positions", np.ndindex(T, D)).reshape(T, D)
        np.testing.assert_allclose(by_position, gradients[0].sum(0), atol=1e-8)
    for s in range(1, 2 * spec.depth + 1):
        kind, role = ("attention", "out") if s % 2 else ("ffn", "down")
        site = "post" if spec.post else "out" if spec.out else None
        found = slopes(f"{kind}.norm_{site}.bias" if site else f"{kind}.{role}_bias", [((s - 1) // 2, i) for i in range(D)])
        expected = gradients[s].sum((0, 1)) * (1.0 if spec.post else spec.b)
        np.testing.assert_allclose(found, expected, atol=1e-8, err_msg=f"state {s}")


def test_how_alike_tokens_are_by_hand():
    """East and north-east: cosine 1/√2. Their mean (1, 1/2) is half a unit of north from each; XᵀX = [[2, 1], [1, 1]]."""
    found = probed.alike(np.array([[[1.0, 0.0], [1.0, 1.0]]]))
    sigma = np.sqrt([(3 + 5**0.5) / 2, (3 - 5**0.5) / 2])
    p = sigma / sigma.sum()
    expected = {
        "token_cosine": 2**-0.5,
        "rank_one_residual": math.sqrt(0.5 / 3),
        "stable_rank": 3 / sigma[0] ** 2,
        "effective_rank": math.exp(-np.sum(p * np.log(p))),
    }
    assert found == pytest.approx(expected)
    assert probed.alike(np.ones((2, 3, 4)))["effective_rank"] == pytest.approx(1)


def test_amplification_of_a_linear_change_by_hand():
    """With no skip, norm or bias the first FFN's state is down(relu(up(u))): moving both matrices along themselves scales it, and
    x/std(x) stays; moving one across does not."""
    spec, params = make_spec(a=0.0, positions="none", ffn="relu"), random_params()
    params = {name: w for name, w in params.items() if "bias" not in name}
    tokens = random_batch()[0]
    along = {name: w for name, w in params.items() if name in ("ffn.up", "ffn.down")}
    assert probed.amplification(params, tokens, spec, along)[1] == pytest.approx(0, abs=1e-12)
    across = {"ffn.down": np.roll(params["ffn.down"], 1, axis=-1)}
    assert probed.amplification(params, tokens, spec, across)[1] > 0.1


@pytest.mark.parametrize("name", PLACEMENTS)
def test_the_parts_of_a_state_are_what_sublayers_wrote(name: str):
    """The part of the last sublayer is its own output, under a norm that keeps the whole's statistics; later ones are 0."""
    spec, params = make_spec(**PLACEMENTS[name]), random_params()
    trace = ref.forward(params, random_batch()[0], spec)
    found = probed.dependency(params, trace, spec)
    assert found.shape == (4, 5) and not np.triu(found, 2).any()
    if not spec.post:
        own = [np.mean(f.std(-1) / x.std(-1)) for (f, _), x in zip(trace.branch, trace.states[1:], strict=True)]
        np.testing.assert_allclose(np.diagonal(found, 1), own, rtol=1e-12)
