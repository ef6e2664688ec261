"""Optimisers written from the papers in float64, and the parameters that tests update."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tiny import filled, tiny

from normflax.build import hyper_part
from normflax.train import optim

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


@cache
def program(family: str):
    """One update of the named optimiser, every number traced: the next parameters and memory."""

    @jax.jit
    def one(hyper, rate, gradient, memory, params):
        change, memory = optim.update(family, hyper, rate, gradient, memory, params)
        return jax.tree.map(jnp.add, params, change), memory

    return one


def run(family: str, hyper: dict, rates: list[float], params: nnx.State, gradients: list[nnx.State]) -> nnx.State:
    """The parameters after one update for each rate."""
    memory = optim.FAMILIES[family](hyper).init(params)
    for rate, gradient in zip(rates, gradients, strict=True):
        params, memory = program(family)(hyper, jnp.float32(rate), gradient, memory, params)
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
