"""The NumPy reference against hand-worked numbers, scalar loops and laws, so that it may judge the package."""

import math
from typing import Any

import numpy as np
import pytest
import reference as ref

B, T, V, D = 2, 5, 7, 8
PLACEMENTS: dict[str, dict[str, Any]] = {
    "post": {"post": True},
    "pre": {"pre": True, "final": True},
    "sandwich": {"pre": True, "out": True, "final": True},
    "deepnorm": {"post": True, "a": 4**0.25},
    "keel": {"pre": True, "post": True, "a": 4.0},
    "minimax": {"pre": True, "final": True, "skip_from": "u", "a": 4**0.25, "b": 0.7},
    "two_hop": {"pre": True, "final": True, "skip_from": "block", "embed": True},
}


def make_spec(**options: Any) -> ref.Spec:
    defaults: dict[str, Any] = {"depth": 2, "width": D, "heads": 2}
    return ref.Spec(**defaults | options)


def random_params(depth: int = 2) -> dict[str, np.ndarray]:
    """Every parameter an architecture may have, gains and biases away from 1 and 0."""
    rng, F = np.random.default_rng(0), 3 * D
    weights = {f"attention.{role}": (D, D) for role in ("q", "k", "v", "out")}
    weights |= {"ffn.up": (D, F), "ffn.gate": (D, F), "ffn.down": (F, D)}
    params = {name: rng.normal(size=(depth, *shape)) / math.sqrt(shape[0]) for name, shape in weights.items()}
    params |= {f"{name}_bias": 0.1 * rng.normal(size=(depth, shape[1])) for name, shape in weights.items()}
    norms = [(f"{kind}.norm_{site}", (depth, D)) for kind in ("attention", "ffn") for site in ("pre", "out", "post")]
    for name, shape in [*norms, ("final", (D,)), ("embed", (D,))]:
        params[f"{name}.scale"] = 1 + 0.2 * rng.normal(size=shape)
        params[f"{name}.bias"] = 0.2 * rng.normal(size=shape)
    params |= {"embed.tokens": rng.normal(size=(V, D)), "embed.positions": rng.normal(size=(T + 3, D))}
    return params | {"head": rng.normal(size=(D, V)) / math.sqrt(D)}


def random_batch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, targets and a mask without the first two targets."""
    tokens, targets = np.random.default_rng(1).integers(0, V, (2, B, T))
    return tokens, targets, np.tile(np.arange(T) >= 2, (B, 1))


def one_block(x: list[float], attention, ffn, params: ref.Params | None = None, **placement: Any) -> ref.Trace:
    """A block on one token with stand-in branches, functions of the features; eps 0."""
    spec = make_spec(depth=1, **{"eps": 0.0} | placement)

    def stand_in(f):
        return lambda p, u, spec: np.array(f(*u[0, 0]), float)[None, None]

    branches = {"attention": stand_in(attention), "ffn": stand_in(ffn)}
    return ref.stack(params or {}, spec, np.array(x, float)[None, None], branches=branches)


@pytest.mark.parametrize(
    ("kind", "x", "options", "expected"),
    [
        ("layer", [2, 4, 4, 6], {}, [-1.414214, 0, 0, 1.414214]),
        ("rms", [2, 4, 4, 6], {}, np.array([2, 4, 4, 6]) / math.sqrt(18)),
        ("layer", [2, 4, 6, 8], {}, [-1.341641, -0.447214, 0.447214, 1.341641]),
        (
            "layer",
            [2, 4, 6, 8],
            {"scale": [1, 2, 1, 2], "bias": [0, 1, 0, -1]},
            [-1.341641, 0.105573, 0.447214, 1.683282],
        ),
        ("rms", [2, 4, 6, 8], {}, np.array([2, 4, 6, 8]) / math.sqrt(30)),
        ("rms", [2, 4, 6, 8], {"scale": [1, 2, 1, 2]}, [0.365148, 1.460593, 1.095445, 2.921187]),
        ("rms", [1, 2, 3, 4], {"scale": [0.5] * 4, "gain_form": "1+w"}, [0.547723, 1.095445, 1.643168, 2.190890]),
        ("layer", [1, 0, 0, 0], {"eps": 1e-6}, [1.732047, -0.577349, -0.577349, -0.577349]),
        ("rms", [3, 4], {"eps": 1e-6}, [0.848528, 1.131371]),
        ("layer", [1e-3, -1e-3, 1e-3, -1e-3], {"eps": 1e-6}, [0.707107, -0.707107, 0.707107, -0.707107]),
        ("layer", [1e-3, -1e-3, 1e-3, -1e-3], {"eps": 1e-5}, [0.301511, -0.301511, 0.301511, -0.301511]),
        ("rms", [1e-3, -1e-3, 1e-3, -1e-3], {"eps": 1e-6}, [0.707107, -0.707107, 0.707107, -0.707107]),
        ("layer", [10_000, 10_001, 10_002, 10_003], {}, [-1.341641, -0.447214, 0.447214, 1.341641]),
        ("layer", [3, 3, 3, 3], {"eps": 1e-5, "bias": [1, 2, 3, 4]}, [1, 2, 3, 4]),
        ("none", [2, 4, 4, 6], {"scale": [9] * 4, "bias": [9] * 4}, [2, 4, 4, 6]),
    ],
)
def test_norm_layer_gives_the_worked_numbers(kind: str, x: list[float], options: dict[str, Any], expected):
    arrays = {name: np.array(options[name]) for name in ("scale", "bias") if name in options}
    arguments: dict[str, Any] = {"eps": 0.0} | options | arrays
    y = ref.normalize(np.array(x, float), kind, **arguments)
    np.testing.assert_allclose(y, expected, atol=2e-6)


def shift(i, j, k, m):
    return [m, i, j, k]


def sparse(i, j, k, m):
    return [i, 0, -k, 2 * m]


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        pytest.param({"post": True}, [-0.333333, -1, -0.333333, 1.666667], id="post"),
        pytest.param({"pre": True}, [2.223698, 0.658359, 2.513472, 7.347704], id="pre"),
        pytest.param({"pre": True, "norm": "rms"}, [3.146164, 2.365148, 2.690962, 7.934829], id="pre-rms"),
        pytest.param({"pre": True, "out": True}, [1.713392, 0.122300, 1.985998, 6.178310], id="sandwich"),
        pytest.param({"out": True}, [2.381831, 0.147617, 1.441434, 6.029118], id="reordered"),
        pytest.param({"post": True, "a": 12**0.25}, [-0.712797, -0.832922, -0.122556, 1.668275], id="deepnorm-6"),
        pytest.param({"post": True, "a": 24**0.25}, [-0.799227, -0.790406, -0.063387, 1.653020], id="deepnorm-12"),
        pytest.param({"post": True, "a": 200**0.25}, [-1.007646, -0.678036, 0.099822, 1.585860], id="deepnorm-100"),
        pytest.param({"post": True, "a": 2000**0.25}, [-1.151188, -0.589334, 0.232788, 1.507734], id="deepnorm-1000"),
        pytest.param({"pre": True, "post": True, "a": 12}, [-1.245632, -0.519060, 0.324714, 1.439978], id="keel-6"),
        pytest.param({"pre": True, "skip_from": "u", "a": 2}, [-1.963961, -2.182179, 0.218218, 6.110101], id="minimax"),
        pytest.param({"pre": True, "skip_from": "block"}, [0.882057, 2, 2.960686, 6.900491], id="two-hop"),
        pytest.param({"pre": True, "b": 1.4 / 12**0.5}, [1.193564, 1.457782, 2.703043, 5.404391], id="minicpm-12"),
    ],
)
def test_block_gives_the_worked_numbers(placement: dict[str, Any], expected: list[float]):
    trace = one_block([1, 2, 3, 4], shift, sparse, **placement)
    np.testing.assert_allclose(trace.states[-1][0, 0], expected, atol=1e-6)
    np.testing.assert_array_equal(trace.readout, trace.states[-1])


def test_gain_of_the_branch_output_norm_is_applied():
    gain = {f"{kind}.norm_out.scale": np.full((1, 4), 6**-0.5) for kind in ("attention", "ffn")}
    trace = one_block([1, 2, 3, 4], shift, sparse, gain, pre=True, out=True)
    np.testing.assert_allclose(trace.states[-1][0, 0], [1.188128, 1.324662, 2.612484, 4.874725], atol=1e-6)


@pytest.mark.parametrize(
    ("x", "branch", "scales", "expected"),
    [
        ([2, 4, 6, 8], [1, -1, 1, -1], {}, [-1, -1, 1, 1]),
        ([2, 4, 6, 8], [1, -1, 1, -1], {"a": 2.0, "b": 0.5}, [-1.287, -0.585, 0.585, 1.287]),
        ([1, -1, 1, -1], [1, 1, -1, -1], {"a": 2.0}, [1.34164, -0.44721, 0.44721, -1.34164]),
    ],
)
def test_post_norm_sublayer_with_skip_and_branch_scale(x, branch, scales, expected):
    trace = one_block(x, lambda *u: branch, lambda *u: branch, post=True, **scales)
    np.testing.assert_allclose(trace.states[1][0, 0], expected, atol=5e-4)


def test_scales_are_read_by_sublayer():
    trace = one_block([1, 2], lambda *u: [1, 1], lambda *u: [1, 1], a=np.array([2.0, 3.0]), b=np.array([5.0, 7.0]))
    np.testing.assert_allclose([x[0, 0] for x in trace.states], [[1, 2], [7, 9], [28, 34]])
    np.testing.assert_allclose([f[0, 0] for f, _ in trace.branch], [[5, 5], [7, 7]])
    np.testing.assert_allclose([x[0, 0] for _, x in trace.branch], [[2, 4], [21, 27]])


def test_skip_from_the_normalized_stream_is_post_norm_with_an_embedding_norm():
    """x' = a N(x) + F(N(x)) read through a final norm equals y' = N(a y + F(y)) from y_0 = N(x_0)."""
    params = {name: w for name, w in random_params().items() if name.split(".")[-1] not in ("scale", "bias")}
    shifted = ref.forward(params, random_batch()[0], make_spec(pre=True, skip_from="u", a=1.4, final=True))
    post = ref.forward(params, random_batch()[0], make_spec(embed=True, post=True, a=1.4))
    np.testing.assert_allclose(shifted.logits, post.logits, rtol=1e-10)


def test_unknown_choice_raises():
    with pytest.raises(ValueError, match=r"norm='layr' is not one of .*'rms'"):
        make_spec(norm="layr")


@pytest.mark.parametrize("positions", ["learned", "rope"])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_equals_a_scalar_loop(positions: str, causal: bool):
    spec, K = make_spec(positions=positions, causal=causal), D // 2
    p = {name.removeprefix("attention."): w[0] for name, w in random_params().items() if name.startswith("attention.")}
    u = np.random.default_rng(3).normal(size=(B, T, D))
    found = ref.attention(p, u, spec)

    def project(role: str, row) -> list[float]:
        return [sum(row[i] * p[role][i, j] for i in range(D)) + p[f"{role}_bias"][j] for j in range(D)]

    def score(q: list[float], k: list[float], distance: int) -> float:
        """A head is K/2 complex numbers; turning both by their positions leaves exp(i distance frequency)."""
        turns = [distance * 10_000 ** (-2 * i / K) if positions == "rope" else 0.0 for i in range(K // 2)]
        pairs = [(complex(q[i], q[i + K // 2]), complex(k[i], k[i + K // 2])) for i in range(K // 2)]
        turned = [x * y.conjugate() * complex(math.cos(w), math.sin(w)) for (x, y), w in zip(pairs, turns, strict=True)]
        return sum(z.real for z in turned) / math.sqrt(K)

    for b in range(B):
        q, k, v = ([project(role, row) for row in u[b]] for role in "qkv")
        for t in range(T):
            context = []
            for part in (slice(0, K), slice(K, D)):
                weight = [math.exp(score(q[t][part], k[s][part], t - s)) for s in range(t + 1 if causal else T)]
                context += [sum(w * v[s][part][i] for s, w in enumerate(weight)) / sum(weight) for i in range(K)]
            np.testing.assert_allclose(found[b, t], project("out", context), rtol=1e-9)


def test_rope_turns_known_angles_and_keeps_lengths():
    x = np.zeros((1, 3, 1, 4))
    x[..., 0], x[..., 3] = 1.0, 2.0
    expected = [[math.cos(t), -2 * math.sin(t / 100), math.sin(t), 2 * math.cos(t / 100)] for t in range(3)]
    np.testing.assert_allclose(ref.rotate(x)[0, :, 0], expected, atol=1e-12)
    x = np.random.default_rng(0).normal(size=(B, T, 2, 6))
    np.testing.assert_allclose(np.linalg.norm(ref.rotate(x), axis=-1), np.linalg.norm(x, axis=-1))


def test_rope_products_depend_only_on_the_distance():
    q, k = (ref.rotate(np.tile(x, (1, 9, 1, 1)))[0, :, 0] for x in np.random.default_rng(0).normal(size=(2, 1, 1, 1, 6)))
    np.testing.assert_allclose((q @ k.T)[1:, 1:], (q @ k.T)[:-1, :-1], atol=1e-12)
    assert not np.allclose(q[1] @ k.T, q[0] @ k.T)


def test_activations_and_ffn():
    expected = [-0.158808009392, 0, 0.841191990608, 2.996362607918]
    np.testing.assert_allclose(ref.gelu(np.array([-1.0, 0, 1, 3])), expected, atol=1e-11)
    np.testing.assert_array_equal(ref.softmax(np.array([5e3, 5e3, -np.inf])), [0.5, 0.5, 0])
    np.testing.assert_allclose(ref.silu(np.array([-1.0, 0, 1])), [-0.268941, 0, 0.731059], atol=1e-6)
    p = {"up": np.array([[1.0, 2.0]]), "gate": np.array([[3.0, 0.5]]), "down": np.array([[2.0], [10.0]])}
    p |= {"up_bias": np.array([0.5, 0.0]), "gate_bias": np.array([0.0, 0.5]), "down_bias": np.array([7.0])}
    gelu, silu = ref.gelu(np.array([1.5, 2.0])), ref.silu(np.array([3.0, 1.0]))
    plain, gated = (ref.feedforward(p, np.ones((1, 1, 1)), make_spec(ffn=ffn)).item() for ffn in ("gelu", "swiglu"))
    assert plain == pytest.approx(2 * gelu[0] + 10 * gelu[1] + 7)
    assert gated == pytest.approx(2 * silu[0] * 1.5 + 10 * silu[1] * 2.0 + 7)


@pytest.mark.parametrize("positions", ["learned", "rope"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_token_changes_nothing_before_it(name: str, positions: str):
    spec, params, tokens = make_spec(positions=positions, **PLACEMENTS[name]), random_params(), random_batch()[0]
    changed = np.where(np.arange(T) == 3, (tokens + 1) % V, tokens)
    before, after = ref.forward(params, tokens, spec).logits, ref.forward(params, changed, spec).logits
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert (np.abs(before - after)[:, 3:].max(-1) > 1e-6).all()


def test_one_token_model_written_out():
    """With one token attention is linear in v; Pre-LN, one block, final norm, every bias and gain in use."""
    spec, w = make_spec(depth=1, pre=True, final=True, a=np.array([1.5, 0.5]), b=np.array([0.3, 2.0])), random_params(1)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return (x - x.mean()) / math.sqrt(x.var() + 1e-5) * np.ravel(w[f"{name}.scale"]) + np.ravel(w[f"{name}.bias"])

    x = w["embed.tokens"][4] + w["embed.positions"][0]
    value = norm(x, "attention.norm_pre") @ w["attention.v"][0] + w["attention.v_bias"][0]
    x = 1.5 * x + 0.3 * (value @ w["attention.out"][0] + w["attention.out_bias"][0])
    hidden = ref.gelu(norm(x, "ffn.norm_pre") @ w["ffn.up"][0] + w["ffn.up_bias"][0])
    x = 0.5 * x + 2.0 * (hidden @ w["ffn.down"][0] + w["ffn.down_bias"][0])
    trace = ref.forward(w, np.array([[4]]), spec)
    np.testing.assert_allclose(trace.states[2][0, 0], x)
    np.testing.assert_allclose(trace.readout[0, 0], norm(x, "final"))
    np.testing.assert_allclose(trace.logits[0, 0], norm(x, "final") @ w["head"])


def test_tied_head_is_the_embedding_over_root_width():
    params, tokens = random_params(), random_batch()[0]
    untied = {**params, "head": params["embed.tokens"].T / math.sqrt(D)}
    tied = ref.forward(params, tokens, make_spec(post=True, tied=True))
    np.testing.assert_allclose(tied.logits, ref.forward(untied, tokens, make_spec(post=True)).logits)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_trace_is_consistent_and_resuming_gives_the_logits(name: str):
    spec, params = make_spec(**PLACEMENTS[name]), random_params()
    trace = ref.forward(params, random_batch()[0], spec)
    sites = [site for site in ("pre", "out", "post") if getattr(spec, site)]
    expected = {f"{kind}.{site}": spec.depth for kind in ("attention", "ffn") for site in sites}
    expected |= {site: 1 for site in ("embed", "final") if getattr(spec, site)}
    assert {site: len(inputs) for site, inputs in trace.norm_inputs.items()} == expected
    assert len(trace.states) == 2 * spec.depth + 1
    for s in range(2 * spec.depth):
        kind, block = ("attention", "ffn")[s % 2], s // 2
        if spec.pre:
            np.testing.assert_array_equal(trace.norm_inputs[f"{kind}.pre"][block], trace.states[s])
        if spec.post:
            np.testing.assert_array_equal(trace.norm_inputs[f"{kind}.post"][block], sum(trace.branch[s]))
        if spec.out:
            gain, bias = (params[f"{kind}.norm_out.{part}"][block] for part in ("scale", "bias"))
            y = ref.normalize(trace.norm_inputs[f"{kind}.out"][block], "layer", spec.eps, gain, bias)
            np.testing.assert_array_equal(trace.branch[s][0], y)
    if spec.final:
        np.testing.assert_array_equal(trace.norm_inputs["final"][0], trace.states[-1])
    for s, x in enumerate(trace.states):
        again = ref.resume(params, spec, s, x, trace.states[s - 1] if s % 2 else None)
        np.testing.assert_array_equal(again, trace.logits)


def test_resuming_inside_a_block_needs_its_input():
    with pytest.raises(ValueError, match="block_input is needed"):
        ref.resume(random_params(), make_spec(**PLACEMENTS["two_hop"]), 1, np.zeros((B, T, D)))


def test_parameters_are_used_in_double_precision_and_gains_may_be_stored_as_their_distance_from_one():
    tokens = random_batch()[0]
    single = {name: w.astype(np.float32) for name, w in random_params().items()}
    double = {name: w.astype(np.float64) for name, w in single.items()}
    shifted = {name: w - name.endswith("scale") for name, w in double.items()}
    for placement in (PLACEMENTS["sandwich"], PLACEMENTS["keel"]):
        logits = ref.forward(single, tokens, make_spec(**placement)).logits
        assert logits.dtype == np.float64
        np.testing.assert_array_equal(logits, ref.forward(double, tokens, make_spec(**placement)).logits)
        one_plus = ref.forward(shifted, tokens, make_spec(gain_form="1+w", **placement))
        np.testing.assert_allclose(one_plus.logits, logits, rtol=1e-9)


def test_loss_is_the_mean_over_valid_targets():
    logits = np.log(np.array([[[1.0, 3.0], [1.0, 1.0], [7.0, 1.0]]]))
    targets = np.array([[1, 0, -1]])
    assert ref.cross_entropy(logits, targets, targets >= 0) == pytest.approx(math.log(8 / 3) / 2)
    assert ref.cross_entropy(logits + 1e4, targets, targets == 1) == pytest.approx(math.log(4 / 3))
    assert ref.loss(ref.Trace(logits=logits), targets, targets > 9) == 0.0
    assert ref.loss(ref.Trace(logits=np.zeros((1, 3, 7))), targets, targets >= 0) == pytest.approx(math.log(7))
