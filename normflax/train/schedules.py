"""Learning rates as pure functions of the update's number, all of whose numbers may be traced."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from normflax.axes import Count, Scalar


class Clock(NamedTuple):
    """Where update t stands, as float32: t (at most `total`), the warm-up's length (0: none), the run's, and the share `done`
    (0 … 1) of the updates after the warm-up."""

    t: Scalar
    warmup: Scalar
    total: Scalar
    done: Scalar


Hyper = Mapping[str, Array]


def _linear(c: Clock, h: Hyper) -> Scalar:
    return h["final"] + (1 - h["final"]) * (1 - c.done)


def _cosine(c: Clock, h: Hyper) -> Scalar:
    return h["final"] + (1 - h["final"]) * 0.5 * (1 + jnp.cos(jnp.pi * c.done))


def _inverse_sqrt(c: Clock, h: Hyper) -> Scalar:
    return jnp.minimum(1.0, jnp.sqrt(jnp.maximum(c.warmup, 1.0) / (c.t + 1)))


def _wsd(c: Clock, h: Hyper) -> Scalar:
    falling = h["decay_share"] * c.total
    return 1 - (1 - h["final"]) * jnp.clip((c.t - (c.total - falling)) / falling, 0.0, 1.0)


def _climbed(c: Clock) -> Scalar:
    """0 at update 0 and 1 at the last one."""
    return jnp.minimum(1.0, c.t / jnp.maximum(c.total - 1, 1.0))


SHAPES: dict[str, Callable[[Clock, Hyper], Scalar]] = {
    "constant": lambda c, h: jnp.ones_like(c.done),
    "linear": _linear,
    "cosine": _cosine,
    "inverse_sqrt": _inverse_sqrt,
    "wsd": _wsd,
    "ramp": lambda c, h: h["start"] + (1 - h["start"]) * _climbed(c),
    "geometric_ramp": lambda c, h: h["start"] ** (1 - _climbed(c)),
}
"""Name -> share of the peak, the warm-up aside:

constant        1
linear          from 1 to `final` over the updates after the warm-up
cosine          the same along half a cosine; Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5
inverse_sqrt    √(W/(t + 1)) after W warm-up updates; Vaswani et al. 2017, arXiv:1706.03762, equation 3
wsd             1, then from 1 to `final` over the last `decay_share` of all updates; Hu et al. 2024, arXiv:2404.06395, equation 1
ramp            from `start` at the first update to 1 at the last, which shows the largest rate a model bears
geometric_ramp  the same by equal factors
"""


def rate(name: str, update: Count, hyper: Hyper) -> Scalar:
    """The rate that update t (first t = 0) uses:

        peak · min(1, (t + 1)/W) · shape

    with the peak `rate` and W = `warmup` updates counted inside `total`; W = 0 means none and equals W = 1. Past the total the
    shape stays at its end.
    """
    w, total = jnp.where(hyper["warmup"] > 1, hyper["warmup"], 0).astype(jnp.float32), hyper["total"].astype(jnp.float32)
    t = update.astype(jnp.float32)
    rising = jnp.minimum(1.0, (t + 1) / jnp.maximum(w, 1.0))
    done = jnp.clip((t - w) / jnp.maximum(total - w, 1.0), 0.0, 1.0)
    return hyper["rate"] * rising * SHAPES[name](Clock(jnp.minimum(t, total), w, total, done), hyper)
