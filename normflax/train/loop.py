"""A run from its first step to its record."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from normflax.build import Programs, Static, hyper_part, programs, static_part
from normflax.config import Config
from normflax.data import batches, levels
from normflax.model.transformer import matrices
from normflax.probes.fields import besides
from normflax.probes.schedule import probed_steps
from normflax.probes.tidy import tidy
from normflax.records import spikes, stability
from normflax.records.store import RunFolder
from normflax.train import health, optim
from normflax.train.about import about
from normflax.train.reader import Reader
from normflax.train.step import CHUNK

INITIAL_WINDOWS = 256
"""Held-out windows that the untrained model is measured on at most: they know its loss to a few thousandths of a nat."""

SHORT = 500
"""A run of at most so many steps makes every step with the probing program: its few per cent cost less than compiling another."""

FLUSH = 30.0
"""Seconds between two parts of the layer record: what a kill can lose."""

Progress = Callable[[int, dict[str, float]], None]


def train(config: Config, folder: RunFolder, progress: Progress = lambda step, scalars: None) -> dict[str, Any]:
    """Run `config` and record it in `folder`; the last status is returned.

    Divergence is a result. An update that is not finite is not made, and the run ends there; its parameters, held-out loss and
    layer record are those before it.
    """
    start = time.perf_counter()
    loaded = batches.load(config.data)
    static, hyper = static_part(config, loaded.task), hyper_part(config)
    compiled = programs(static)
    spent = compiled.seconds
    windows = batches.heldout(loaded, config.data.windows, config.train.tokens)
    padded = pad(windows, static)
    known = levels.levels(loaded.source, *(np.asarray(x) for x in windows))
    compiled.prepare(hyper, loaded.arrays, padded, steps_with(config, static))
    state = compiled.init(hyper)
    folder.update_status(**about(config, static, loaded), levels=asdict(known), parameters=parameter_counts(state.params))

    prepared = time.perf_counter()
    initial = evaluate(compiled, state.params, hyper, padded, min(INITIAL_WINDOWS, config.data.windows))
    evaluated, began = time.perf_counter(), compiled.seconds
    losses, norms, diverged_at, reason, bad = [], [], None, None, None
    flushed = time.perf_counter()
    reader = Reader(compiled, hyper, windows, besides(config.probe.fields), config.train.steps - 1)
    for rows, layers, now in updates(config, static, compiled, state, hyper, loaded.arrays, reader):
        state = now
        folder.scalars(rows)
        losses += [row["loss"] for row in rows]
        norms += [row["grad_norm"] for row in rows]
        for step, measured in layers:
            folder.layers(step, config.seed, tidy(measured))
        if rows[-1]["skipped"]:
            diverged_at = rows[-1]["step"]
            bad = health.first_bad(layers[-1][1]) if layers else None
            reason = f"update {diverged_at} is not finite" + (f"; first in {bad}" if bad else "")
        if time.perf_counter() - flushed > FLUSH:
            folder.flush()
            flushed = time.perf_counter()
        progress(rows[-1]["step"], rows[-1])
    trained = time.perf_counter()
    final = evaluate(compiled, state.params, hyper, padded, config.data.windows)
    measured = time.perf_counter()
    made = len(losses) - (diverged_at is not None)
    if diverged_at is None and not np.isfinite(final[0]):
        diverged_at, reason = made - 1, f"the held-out loss after update {made - 1}, the last, is not finite"

    verdict = stability.run_verdict(
        np.array(losses),
        np.array(norms),
        l0=initial[0],
        l0_se=initial[1],
        heldout=final[0],
        unigram=known.unigram,
        bigram=known.bigram,
        floor=known.floor,
    )
    compiling = compiled.seconds - began
    training = trained - evaluated - compiling
    status = {
        "verdict": str(stability.Verdict.NONFINITE if diverged_at is not None else verdict),
        "step": made,
        "diverged_at": diverged_at,
        "first_bad": bad,
        "reason": reason,
        "spikes": spikes.of_run(np.array(losses), np.array(norms)),
        "heldout": {
            "initial": initial[0],
            "initial_se": initial[1],
            "final": final[0],
            "final_se": final[1],
            "windows": config.data.windows,
        },
        "tokens_per_second": len(losses) * config.train.batch * config.train.tokens / training,
        "timings": {
            "compile": compiled.seconds - spent,
            "train": training,
            "evaluate": evaluated - prepared + measured - trained,
            "total": time.perf_counter() - start,
        },
    }
    folder.finish(**status)
    return folder.status


def updates(
    config: Config, static: Static, compiled: Programs, state, hyper, arrays, reader: Reader
) -> Iterator[tuple[list[dict], list[tuple[int, dict]], Any]]:
    """Train to the end or to the first update that is not finite, in pieces of about a second.

    Each piece is its scalars, one row a step; the layers of its probed steps; and the state after it.
    """
    steps, with_probe = config.train.steps, "advance" not in steps_with(config, static)
    probed = [*(probed_steps(config.probe.grid, steps) if config.probe.fields else ()), steps]
    t, piece = 0, 8
    while t < steps:
        start = time.perf_counter()
        aside = reader(state.params, t) if t == probed[0] else {}
        if with_probe or t == probed[0]:
            state, scalars, measured = compiled.probe(state, hyper, arrays, jnp.int32(t))
            scalars, measured = jax.device_get((scalars, measured))
            rows = [{"step": t, **{name: float(value) for name, value in scalars.items()}}]
            if t == probed[0]:
                probed.pop(0)
            elif not rows[0]["skipped"]:
                measured = {name: measured[name] for name in static.every_step}
            measured |= aside
            layers = [(t, measured)] if measured else []
        else:
            last = min(t + piece, probed[0], steps)
            state, scalars, dense, made = compiled.advance(state, hyper, arrays, jnp.int32(t), jnp.int32(last))
            scalars, dense, made = jax.device_get((scalars, dense, made))
            rows = [{"step": t + i, **{name: float(value[i]) for name, value in scalars.items()}} for i in range(made)]
            layers = [(t + i, jax.tree.map(itemgetter(i), dense)) for i in range(made)] if dense else []
            piece = min(CHUNK, max(1, round(made / (time.perf_counter() - start))))
            if rows[-1]["skipped"] and static.fields:
                # The update was not made, so the same step can be read again with every field.
                state, _, measured = compiled.probe(state, hyper, arrays, jnp.int32(t + int(made) - 1))
                layers = [*layers[:-1], (rows[-1]["step"], jax.device_get(measured))]
        t = rows[-1]["step"] + 1
        yield rows, layers, state
        if rows[-1]["skipped"]:
            return


def steps_with(config: Config, static: Static) -> tuple[str, ...]:
    """The programs that a run makes its steps with: `probe` for those whose layers are recorded, `advance` for the others."""
    if not config.probe.fields or config.probe.grid == "none":
        return ("advance",)
    return ("probe",) if config.probe.grid == "all" or config.train.steps <= SHORT else ("probe", "advance")


def pad(windows: batches.Batch, static: Static) -> batches.Batch:
    """The windows, the first of them repeated at the end until they fill whole batches [static.windows, T]."""
    index = jnp.arange(static.windows) % len(windows.inputs)
    return jax.tree.map(lambda x: x[index], windows)


def evaluate(compiled: Programs, params, hyper, padded: batches.Batch, windows: int) -> tuple[float, float]:
    """Mean held-out loss over the valid targets of the first `windows` windows, and its standard error, nats per token.

    A window counts as many times as it has targets, as in the reference levels; the error takes windows for independent.
    """
    batch = compiled.static.batch
    losses = np.asarray(compiled.evaluate(params, hyper, padded, jnp.int32(-(-windows // batch) * batch)))[:windows]
    targets = np.asarray(padded.mask)[:windows].sum(-1).astype(np.float64)
    share = targets / max(targets.sum(), 1.0)
    mean = float(share @ losses.astype(np.float64))
    # Of n windows with equal targets this is the standard deviation (divisor n - 1) over √n.
    spread = float(np.sqrt(np.sum((share * (losses - mean)) ** 2) * windows / (windows - 1))) if windows > 1 else np.inf
    return mean, spread


def parameter_counts(params) -> dict[str, int]:
    """How many numbers are trained, how many of them are decayed when decay is on, and how many lie in branch matrices."""
    sizes, decayed = (jax.tree.leaves(tree) for tree in (jax.tree.map(lambda x: x.size, params), optim.decayed(params)))
    count = {"decayed": 0, "undecayed": 0}
    for size, is_decayed in zip(sizes, decayed, strict=True):
        count["decayed" if is_decayed else "undecayed"] += int(size)
    return {
        "total": sum(count.values()),
        **count,
        "matrices": sum(int(w.size) for w in matrices(params).values()),
    }
