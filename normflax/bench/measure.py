"""Timers: alternating, so that a slow phase of the machine falls on every side."""

import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from normflax import config as settings
from normflax.build import hyper_part, programs, static_part
from normflax.data import batches
from normflax.probes.beside import WINDOWS
from normflax.probes.fields import on_batch


@dataclass(frozen=True)
class Shape:
    """What is stepped: depth/width with a batch of sequences."""

    depth: int
    width: int
    batch: int = 16
    tokens: int = 128
    updates: int = 4
    """What one timed call makes: several, as training does, where they don't take seconds each."""

    def __str__(self) -> str:
        return f"{self.depth}/{self.width}"


SHAPES = (Shape(24, 64), Shape(12, 128), Shape(96, 64), Shape(1000, 32, 8, 64, updates=1))


def alternate(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every call in every round; in each round all are made, in turn.

    Each round starts with the next of them, so that none is always measured after the same other.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for round_ in range(rounds):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            jax.block_until_ready(calls[name]())
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: Mapping[str, list[float]], one: str, other: str) -> float:
    """Median over the rounds of the ratio of two calls of the same round."""
    return statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True))


def run_config(shape: Shape, placement: str = "pre", **changes) -> settings.Config:
    """Settings of a run of this shape on synthetic tokens of 256 kinds."""
    config = settings.change(
        settings.Config(placement=placement),
        model__depth=shape.depth,
        model__width=shape.width,
        data__name="copy",
        data__vocab=256,
        data__windows=shape.batch,
        train__batch=shape.batch,
        train__tokens=shape.tokens,
        train__steps=10**6,
        optim__name="adamw",
    )
    return settings.change(config, **changes)


class Stepper:
    """A run that makes some more updates whenever it is called, in one program as training does."""

    def __init__(self, config: settings.Config, updates: int):
        loaded = batches.load(config.data)
        self.arrays, self.hyper, self.updates = loaded.arrays, hyper_part(config), updates
        self.programs = programs(static_part(config, loaded.task))
        self.state, self.t = self.programs.init(self.hyper), 0
        self()

    def __call__(self):
        first, last = jnp.int32(self.t), jnp.int32(self.t + self.updates)
        self.state, *rest = self.programs.advance(self.state, self.hyper, self.arrays, first, last)
        self.t += self.updates
        return rest


def steps(shape: Shape, rounds: int) -> dict[str, list[float]]:
    """normflax's plain step and the yardstick's, alternating."""
    from normflax.bench import yardstick

    step, state, text = yardstick.program(shape.depth, shape.width, 4, 256, shape.batch, shape.tokens)
    mutable = {"state": state, "t": 0}

    def plain():
        for _ in range(shape.updates):
            mutable["state"], mutable["out"] = step(mutable["state"], text, jnp.int32(mutable["t"]))
            mutable["t"] += 1
        return mutable["out"]

    plain()
    return alternate({"normflax": Stepper(run_config(shape), shape.updates), "yardstick": plain}, rounds)


CHEAP = ["second_moment", "variance", "grad_rms", "grad_frobenius", "grad_matrix", "grad_block"]
"""Fields that read one number from what the step computes anyway."""


def probes(shape: Shape, rounds: int) -> dict[str, list[float]]:
    """The plain step, the step that records the cheap fields every time, and the one that records all."""
    return alternate(
        {
            "none": Stepper(run_config(shape), shape.updates),
            "cheap": Stepper(run_config(shape, probe__every_step=CHEAP), shape.updates),
            "all": Stepper(run_config(shape, probe__every_step=["all"]), shape.updates),
        },
        rounds,
    )


def fields(shape: Shape, rounds: int) -> dict[str, float]:
    """What each field costs that is read on a step's batch: its share of a plain step, when it alone is read at every step.

    `nothing` is the plain step a second time: how far it is from 0 is the noise. `core` is all core fields at once.
    """
    calls = {name: Stepper(run_config(shape), shape.updates) for name in ("", "nothing")}
    calls["core"] = Stepper(run_config(shape, probe__every_step=["core"]), shape.updates)
    for name in on_batch(["all"]):
        calls[name] = Stepper(run_config(shape, probe__every_step=[name]), shape.updates)
    seconds = alternate(calls, rounds)
    return {name: ratio(seconds, name, "") - 1 for name in calls if name}


def besides(shape: Shape, rounds: int) -> dict[str, float]:
    """What is read on held-out windows, as a share of a step."""
    step = Stepper(run_config(shape, data__windows=WINDOWS), 1)
    windows = batches.heldout(batches.load(run_config(shape).data), WINDOWS, shape.tokens)
    represent, angles = (getattr(step.programs, name) for name in ("represent", "angles"))
    calls = {"": step} | {
        name: lambda read=read: read(step.state.params, step.hyper, windows)
        for name, read in {"model_update": represent, "angle": angles}.items()
    }
    for call in calls.values():
        call()
    seconds = alternate(calls, rounds)
    return {name: ratio(seconds, name, "") for name in calls if name}


def compile_cost(depth: int) -> dict[str, float]:
    """Seconds to compile init and the plain step at this depth (width 32, 8 x 64 tokens), the step's memory and the peak of this
    process, in MB; to be called in a fresh process."""
    config = run_config(Shape(depth, 32, 8, 64))
    loaded = batches.load(config.data)
    static, hyper = static_part(config, loaded.task), hyper_part(config)
    compiled = programs(static)
    state = compiled.init(hyper)
    before = compiled.seconds
    zero = jnp.int32(0)
    jax.block_until_ready(compiled.advance(state, hyper, loaded.arrays, zero, zero + 1))
    return {
        "init": before,
        "step": compiled.seconds - before,
        "temp": compiled.memory("advance") / 1e6,
        "peak": peak_memory() / 1e6,
    }


def peak_memory() -> float:
    """The most memory this process has held, in bytes.

    Linux's own account of it starts with what the process held that started this one; its table does not.
    """
    table = Path("/proc/self/status")
    if table.exists():
        return 1024 * int(table.read_text().split("VmHWM:")[1].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
