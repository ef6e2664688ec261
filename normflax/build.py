"""How everything meets: from settings to compiled programs, on one page.

    config ─┬─ static   what selects a program: shapes, placement, optimiser family, fields    ─► programs(static), compiled once
            └─ hyper    every number that may differ without compiling: rate, seed, scales, …  ─► their argument

Two runs with equal `static` share their programs, so a sweep over rates, warm-ups and seeds compiles once.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from normflax import coefficients
from normflax import config as settings
from normflax.data.batches import Batch, Task
from normflax.model.init import named
from normflax.model.placements import Placement, find, fitted
from normflax.model.transformer import Transformer
from normflax.probes.fields import at_start, on_batch
from normflax.train import initial, optim, step
from normflax.train.step import State

TRACED_MODEL = {"init_std": 0.0, "embed_std": 0.0, "embed_scale": 0.0, "position_std": 0.0, "residual_scaling": False}
"""The numbers of `model.*` that are traced: they don't select a program."""


@dataclass(frozen=True)
class Static:
    """What selects a compiled program. Hashable."""

    placement: str
    model: settings.Model
    norm: settings.Norm
    optimiser: str
    schedule: str
    task: Task
    batch: int
    tokens: int
    accumulate: int
    windows: int
    seeds: int
    fields: tuple[str, ...]
    every_step: tuple[str, ...]

    @property
    def entry(self) -> Placement:
        """The placement's entry in the table, with the norms that `model.*` adds to it."""
        m = self.model
        return fitted(find(self.placement), self.norm.kind, embed_norm=m.embed_norm, qk_norm=m.qk_norm)

    @property
    def base(self) -> str:
        """The base initialiser in use: the config's, else the placement's, else Xavier-normal."""
        return self.model.init or self.entry.base or "xavier_normal"


def static_part(config: settings.Config, task: Task) -> Static:
    """The part of the settings that selects programs."""
    return Static(
        placement=config.placement,
        model=replace(config.model, **TRACED_MODEL, dropout=float(config.model.dropout > 0)),
        norm=config.norm,
        optimiser=config.optim.name,
        schedule=config.schedule.name,
        task=task,
        batch=config.train.batch,
        tokens=config.train.tokens,
        accumulate=config.train.accumulate,
        windows=-(-config.data.windows // config.train.batch) * config.train.batch,
        seeds=config.probe.seeds,
        fields=on_batch(config.probe.fields) if config.train.steps else at_start(config.probe.fields),
        every_step=on_batch(config.probe.every_step),
    )


def hyper_part(config: settings.Config) -> dict:
    """Every traced number as an array: scalars, path scales [L, kinds], gains {role: [L]}, standard deviations."""
    m, o, f = config.model, config.optim, jnp.float32
    entry = find(config.placement)
    scales, gains = coefficients.scales_of(config, entry), coefficients.gains_of(config, entry)
    return {
        "seed": jnp.uint32(config.seed),
        "data_seed": jnp.uint32(config.seed if config.data.seed is None else config.data.seed),
        **{path: jnp.asarray(scale, f) for path, scale in scales._asdict().items()},
        "gains": {role: jnp.asarray(values, f) for role, values in gains.items()},
        "std": {"weight": f(m.init_std), "embed": f(m.embed_std), "position": f(m.position_std)},
        "embed_scale": f(m.embed_scale),
        "dropout": f(m.dropout),
        "label_smoothing": f(config.train.label_smoothing),
        "z_loss": f(config.train.z_loss),
        "rate": f(o.rate),
        "warmup": jnp.int32(config.schedule.warmup_steps),
        "total": jnp.int32(config.train.steps),
        "final": f(config.schedule.final),
        "decay_share": f(config.schedule.decay_share),
        "start": f(config.schedule.start),
        "decay": f(o.decay),
        "beta1": f(o.beta1),
        "beta2": f(o.beta2),
        "eps": f(o.eps),
        "momentum": f(o.momentum),
        "memory": f(o.memory),
        "update_clip": f(o.update_clip),
        "clip": f(jnp.inf if o.clip is None else o.clip),
    }


def transformer(static: Static, hyper: dict) -> Transformer:
    """The model of a run, from its seed."""
    root = jax.random.key(hyper["seed"], impl="threefry2x32")
    return Transformer(
        named(root, "init"),
        hyper["gains"],
        hyper["std"],
        placement=static.entry,
        model=static.model,
        norm=static.norm,
        base=static.base,
        vocab=static.task.vocab,
        tokens=static.tokens,
    )


class Programs:
    """The compiled programs of one static key: init, advance, probe, evaluate, represent, outputs, angles and initial.

    Each is compiled once, at `prepare` or at its first use; `seconds` is the time spent on it.
    """

    def __init__(self, static: Static):
        self.static, self.seconds = static, 0.0
        self._compiled: dict[str, Any] = {}

    @cached_property
    def graph(self):
        """The model's structure, without its numbers."""
        hyper = jax.eval_shape(lambda: hyper_part(_any_config(self.static)))
        return nnx.split(nnx.eval_shape(lambda h: transformer(self.static, h), hyper))[0]

    def init(self, hyper: dict) -> State:
        """Parameters and optimiser memory of a run that has made no update."""
        return self._call("init", hyper)

    def advance(self, state: State, hyper: dict, arrays: dict, first: Array, last: Array):
        """See train.step.advance. The state that goes in is used up."""
        return self._call("advance", state, hyper, arrays, first, last)

    def probe(self, state: State, hyper: dict, arrays: dict, t: Array):
        """See train.step.probe. The state that goes in is used up."""
        return self._call("probe", state, hyper, arrays, t)

    def evaluate(self, params: nnx.State, hyper: dict, windows: Batch, count: Array):
        """See train.step.evaluate."""
        return self._call("evaluate", params, hyper, windows, count)

    def represent(self, params: nnx.State, hyper: dict, windows: Batch):
        """See train.step.represent."""
        return self._call("represent", params, hyper, windows)

    def outputs(self, params: nnx.State, hyper: dict, windows: Batch):
        """See train.step.outputs."""
        return self._call("outputs", params, hyper, windows)

    def angles(self, params: nnx.State, hyper: dict, windows: Batch):
        """See train.step.angles."""
        return self._call("angles", params, hyper, windows)

    def initial(self, hyper: dict, arrays: dict, seeds: Array) -> tuple[dict, dict]:
        """See train.initial.measure, with a leading axis of seeds [N]: the weights of each, on one batch."""
        return self._call("initial", hyper, arrays, seeds)

    def prepare(self, hyper: dict, arrays: dict, windows: Batch, steps: tuple[str, ...]) -> None:
        """Compile what a run will need side by side: init, evaluate, and those of `probe` and `advance` that `steps` names."""
        step_of = jax.ShapeDtypeStruct((), jnp.int32)
        state = jax.eval_shape(self._start, hyper)
        needed = {
            "probe": (state, hyper, arrays, step_of),
            "advance": (state, hyper, arrays, step_of, step_of),
            "init": (hyper,),
            "evaluate": (state.params, hyper, windows, step_of),
        }
        needed = {name: args for name, args in needed.items() if name in (*steps, "init", "evaluate")}
        start = time.perf_counter()
        missing = {name: self._lower(name, *args) for name, args in needed.items() if name not in self._compiled}
        with ThreadPoolExecutor(2) as pool:
            compiled = pool.map(lambda item: item[1].compile(OPTIONS.get(item[0])), missing.items())
            self._compiled |= dict(zip(missing, compiled, strict=True))
        self.seconds += time.perf_counter() - start

    def memory(self, name: str) -> int:
        """Bytes that a compiled program needs beside its arguments and results."""
        return self._compiled[name].memory_analysis().temp_size_in_bytes

    def _start(self, hyper: dict) -> State:
        params = nnx.split(transformer(self.static, hyper))[1]
        return State(params, optim.FAMILIES[self.static.optimiser](hyper).init(params))

    def _initial(self, hyper: dict, arrays: dict, seeds: Array):
        def of_seed(seed: Array):
            own = {**hyper, "seed": seed}
            params = nnx.split(transformer(self.static, own))[1]
            return initial.measure(self.static, self.graph, params, own, arrays)

        return jax.lax.map(of_seed, seeds, batch_size=min(SEEDS_AT_ONCE, len(seeds)))

    def _lower(self, name: str, *args):
        if name == "init":
            return jax.jit(self._start).lower(*args)
        if name == "initial":
            return jax.jit(self._initial).lower(*args)
        function, donated = getattr(step, name), (0,) if name in ("advance", "probe") else ()
        return jax.jit(lambda *args: function(self.static, self.graph, *args), donate_argnums=donated).lower(*args)

    def _call(self, name: str, *args):
        if name not in self._compiled:
            start = time.perf_counter()
            self._compiled[name] = self._lower(name, *args).compile(OPTIONS.get(name))
            self.seconds += time.perf_counter() - start
        return self._compiled[name](*args)


SEEDS_AT_ONCE = 8
"""Models of `initial` that lie in memory side by side; more seeds come in turn."""

OPTIONS: dict[str, Any] = {
    "init": {"xla_backend_optimization_level": 0},
    "initial": {"xla_backend_optimization_level": 1},
}
"""Compiler options by program. `init` runs once, and its random draws take longer to optimise than to run; `initial` runs once,
and takes half as long to compile at level 1, and as long to run (64 and 256 blocks of width 64, 8 seeds)."""


def _any_config(static: Static) -> settings.Config:
    """Settings with the shapes of a static key, for programs that need shapes alone."""
    return settings.Config(placement=static.placement, model=static.model, norm=static.norm)


@lru_cache(maxsize=32)
def programs(static: Static) -> Programs:
    """The programs of a static key, shared by every run of this process that has it."""
    return Programs(static)
