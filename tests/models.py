"""Models of every placement with no parameter at 0 or 1, their numbers for the NumPy reference, the stack as a loop.

A parameter's numbers depend on its name alone, so models that store q, k and v fused and apart hold the same weights.
"""

from functools import cache, partial
from typing import Any, NamedTuple
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref
from flax import nnx
from tiny import tiny

from normflax.build import Static, hyper_part, static_part, transformer
from normflax.config import Config, check
from normflax.data import batches
from normflax.data.batches import Batch
from normflax.model.placements import KINDS, PLACEMENTS, N, Placement, Scales
from normflax.probes.fields import on_batch
from normflax.train import step
from normflax.train.losses import mean_loss

minimax = Placement(embed=N, pre=N, final=N, skip_from="u", skip=1.3, branch=0.7)
two_hop = Placement(out=N, post=N, skip_from="block", skip=lambda kind, block, depths: block + 0.5 * (kind == "ffn"))
scaled_input = Placement(pre=N, final=N, skip_from="u", input=lambda kind, block, depths: 0.6 * block + 0.2 * (kind == "ffn"))

MAIN = ("post", "pre", "sandwich", "deepnorm")
"""The four whose wirings differ: every option is tried with these, the common ones with every entry."""

TABLE = [*MAIN, *(pytest.param(name, marks=pytest.mark.slow) for name in PLACEMENTS if name not in MAIN)]
"""The whole table, as a parameter of laws that compile much: the others of the table in the slow suite."""

EVERY = (*PLACEMENTS, "models:minimax", "models:two_hop", "models:scaled_input")
"""The table, and entries of our own for what the table does not use yet."""

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "modern": {
        "norm__kind": "rms",
        "norm__bias": False,
        "norm__gain_form": "1+w",
        "model__ffn": "swiglu",
        "model__positions": "rope",
        "model__bias": False,
        "model__tied": True,
        "model__fused_qkv": False,
    },
    "bare": {
        "norm__scale": False,
        "norm__bias": False,
        "norm__eps": 0.01,
        "model__fused_qkv": False,
        "model__ffn": "swiglu",
        "coef__alpha": 1.7,
        "coef__beta": 0.6,
    },
    "grouped": {
        "model__heads": 4,
        "model__kv_heads": 2,
        "model__qk_norm": True,
        "model__ffn": "relu",
        "model__positions": "sinusoidal",
        "model__mask": "bidirectional",
        "model__embed_scale": 3.0,
        "model__embed_norm": True,
    },
    "inner": {
        "norm__kind": "rms",
        "norm__gain_form": "1+w",
        "model__qk_norm": True,
        "model__ffn": "swiglu",
        "model__positions": "rope",
        "model__embed_scale": 0.5,
    },
    "bagged": {"model__positions": "none", "model__ffn": "relu", "model__mask": "bidirectional", "model__tied": True},
    "none": {"norm__kind": "none", "model__positions": "rope", "model__tied": True, "coef__beta": 0.3},
}

quick = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
"""jit for tests that look at numbers and not at bits: compiling takes half the time."""


class Model(NamedTuple):
    config: Config
    static: Static
    hyper: dict
    graph: nnx.GraphDef
    params: nnx.State


@cache
def settings(placement: str, **changes: Any) -> tuple[Config, Static, dict]:
    # A cache takes no list, and settings take no tuple.
    config = check(tiny(placement=placement, **{k: [*v] if isinstance(v, tuple) else v for k, v in changes.items()}))
    return config, static_part(config, batches.load(config.data).task), hyper_part(config)


@cache
def model(placement: str, **changes: Any) -> Model:
    """A tiny model whose weights, biases and gains are all random."""
    config, static, hyper = settings(placement, **changes)
    graph, shapes = nnx.split(nnx.eval_shape(lambda: transformer(static, hyper)))
    offset = 1.0 if config.norm.gain_form == "1+w" else 0.0

    def drawn(path: tuple, shape: tuple[int, ...]) -> np.ndarray:
        if "qkv" in path[-1]:
            apart = [drawn((*path[:-1], path[-1].replace("qkv", role)), (*shape[:-2], shape[-1])) for role in "qkv"]
            return np.stack(apart, axis=-2)
        x = np.random.default_rng(crc32(name(path).encode())).normal(size=shape)
        match path[-1]:
            case "scale":
                return 1 + 0.2 * x - offset
            case "token_table" | "position_table":
                return x
            case leaf:
                return 0.2 * x if "bias" in leaf else x / np.sqrt(shape[-2])

    flat = nnx.to_flat_state(shapes)
    filled = [(path, v.replace(jnp.asarray(drawn(path, v.shape), jnp.float32))) for path, v in flat]
    return Model(config, static, hyper, graph, nnx.from_flat_state(filled))


def scales_of(m: Model) -> Scales:
    """The model's scales, each [L, kinds]."""
    return Scales(*(m.hyper[path] for path in Scales._fields))


TOP = {"token_table": "embed.tokens", "position_table": "embed.positions", "head": "head"}


def name(path: tuple) -> str:
    """The reference's name of the parameter at `path`."""
    match path:
        case ("blocks", kind, "branch", norm, "affine", leaf):
            return f"{kind}.{norm}.{leaf}"
        case ("blocks", kind, "branch", leaf):
            return f"{kind}.{leaf}"
        case ("blocks", kind, site, "affine", leaf):
            return f"{kind}.norm_{site}.{leaf}"
        case (norm, "affine", leaf):
            return f"{norm.removesuffix('_norm')}.{leaf}"
    return TOP[path[0]]


def flat(params: nnx.State) -> dict[str, np.ndarray]:
    """Parameters, or their gradients, under the reference's names; q, k and v always apart."""
    out = {name(path): np.asarray(variable[...]) for path, variable in nnx.to_flat_state(params)}
    for leaf in ("qkv", "qkv_bias"):
        if (fused := out.pop(f"attention.{leaf}", None)) is not None:
            out |= {f"attention.{leaf.replace('qkv', role)}": fused[..., i, :] for i, role in enumerate("qkv")}
    return out


def spec(config: Config, static: Static, hyper: dict) -> ref.Spec:
    """The reference's words for the model."""
    c, entry = config.model, static.entry
    sites = {site: getattr(entry, site) is not None for site in ("pre", "out", "post", "final", "embed")}
    inner = {"groups": c.groups, "qk_norm": c.qk_norm, "embed_scale": c.embed_scale, "causal": c.mask == "causal"}
    scales = {"a": np.ravel(hyper["skip"]), "b": np.ravel(hyper["branch"]), "c": np.ravel(hyper["input"])}
    norm = {"norm": config.norm.kind, "eps": config.norm.eps, "gain_form": config.norm.gain_form}
    form = {"ffn": c.ffn, "positions": c.positions, "tied": c.tied, "skip_from": entry.skip_from}
    return ref.Spec(depth=c.depth, width=c.width, heads=c.heads, **form, **inner, **norm, **sites, **scales)


def some_batch(tokens: int = 5) -> Batch:
    """Two sequences; the first target and two more are not valid."""
    rng = np.random.default_rng(0)
    inputs, targets = rng.integers(0, 8, (2, 2, tokens))
    mask = np.ones((2, tokens), bool)
    mask[0, 0] = mask[1, 2] = mask[1, 3] = False
    return Batch(jnp.asarray(inputs, jnp.int32), jnp.asarray(targets, jnp.int32), jnp.asarray(mask))


class Gradients(NamedTuple):
    """What one observed backward pass gives; `params` are the gradients by the reference's names."""

    loss: float
    params: dict[str, np.ndarray]
    tree: nnx.State
    seen: dict
    squares: np.ndarray


@cache
def backward(placement: str, **changes: Any):
    """The product's scanned, observed pass as one compiled function of (params, hyper, batch)."""
    graph = model(placement, **changes).graph
    return quick(lambda params, hyper, batch: step.gradients(graph, params, hyper, batch, fields=on_batch(["all"])))


@cache
def gradients(placement: str, **changes: Any) -> Gradients:
    """That pass on `some_batch`."""
    m = model(placement, **changes)
    loss, tree, (seen, squares) = backward(placement, **changes)(m.params, m.hyper, some_batch())
    return Gradients(float(loss), flat(tree), tree, jax.device_get(seen), np.asarray(squares))


class Loop(NamedTuple):
    """What autodiff of the loop gives; `states` holds the gradient of every state [S + 1, B, T, D]."""

    loss: float
    logits: np.ndarray
    params: dict[str, np.ndarray]
    states: np.ndarray


@cache
def looped(placement: str, **changes: Any) -> Loop:
    """The product's blocks one after another in Python, their parameters sliced from the stack, q, k, v stored apart.

    Something that is zero is added to every state, so that its gradient is the state's, by plain autodiff.
    """
    m = model(placement, **{**changes, "model__fused_qkv": False})
    batch, scales = some_batch(), scales_of(m)

    def loss(params, zeros):
        built = nnx.merge(m.graph, params)
        x = built.embed_norm(built.embed(batch.inputs, m.hyper["embed_scale"])) + zeros[0]
        blocks, weights = nnx.split(built.blocks)
        for l in range(m.config.model.depth):
            block, entry = nnx.merge(blocks, jax.tree.map(lambda w, l=l: w[l], weights)), x
            for i, kind in enumerate(KINDS):
                x = getattr(block, kind)(x, entry, Scales(*(scale[l, i] for scale in scales)))[0] + zeros[2 * l + i + 1]
        logits = built.logits(built.readout(x))
        return mean_loss(logits, batch.targets, batch.mask), logits

    zeros = jnp.zeros((scales.skip.size + 1, *batch.inputs.shape, m.config.model.width))
    (value, logits), (params, states) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(m.params, zeros)
    return Loop(float(value), np.asarray(logits), flat(params), np.asarray(states))


def close(actual: Any, expected: Any, tolerance: float = 2e-5) -> None:
    """Equal up to a share of the largest expected entry: float32 against float64, or two orders of float32 sums."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max(initial=1e-12))
