"""A run of no updates: models at initialisation on one batch, many seeds in one program, and what theory expects of them."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from normflax import theory
from normflax.build import hyper_part, programs, static_part
from normflax.config import Config
from normflax.data import batches
from normflax.probes.tidy import COLUMNS, tidy
from normflax.records.store import RunFolder
from normflax.train.about import about
from normflax.train.initial import GRADIENTS


def read(config: Config, folder: RunFolder) -> dict[str, Any]:
    """Read the models of the seeds `seed` … `seed + probe.seeds - 1` and record them in `folder`; the last status is returned.

    All of them see the batch of update 0 of data.seed (the run's seed where that is null). Scalars and layer rows carry their seed.
    """
    start = time.perf_counter()
    loaded = batches.load(config.data)
    static, hyper = static_part(config, loaded.task), hyper_part(config)
    compiled = programs(static)
    spent = compiled.seconds
    seeds = config.seed + np.arange(config.probe.seeds)
    scalars, layers = jax.device_get(compiled.initial(hyper, loaded.arrays, jnp.asarray(seeds, jnp.uint32)))
    read_at = time.perf_counter()
    batch = batches.draw(loaded.task, loaded.arrays, hyper["data_seed"], 0, config.train.batch, config.train.tokens)
    curves, uncovered = expected(config, theory.Inputs(*(np.asarray(x) for x in batch), vocab=loaded.source.vocab), static.fields)
    for i, seed in enumerate(map(int, seeds)):
        folder.scalars([{"step": 0, "seed": seed, **{name: float(value[i]) for name, value in scalars.items()}}])
        folder.layers(0, seed, beside(tidy(jax.tree.map(lambda x, i=i: x[i], layers)), tidy(curves)))
    losses = np.array(scalars["loss"], float)
    folder.finish(
        step=0,
        reason=f"no theory: {uncovered}" if uncovered else None,
        initial={"seeds": len(seeds), "loss": losses.mean().item(), "low": losses.min().item(), "high": losses.max().item()},
        **about(config, static, loaded),
        timings={
            "compile": compiled.seconds - spent,
            "read": read_at - start - (compiled.seconds - spent),
            "theory": time.perf_counter() - read_at,
            "total": time.perf_counter() - start,
        },
    )
    return folder.status


def expected(config: Config, inputs: theory.Inputs, fields: tuple[str, ...]) -> tuple[dict[str, Any], str | None]:
    """The theory curves of the fields that were read; where there is no theory, none and the reason."""
    try:
        curves = theory.of_config(config, inputs, gradients=bool(GRADIENTS & set(fields)))
    except theory.Uncovered as error:
        return {}, str(error)
    return {name: values for name, values in curves.fields.items() if name in fields}, None


def beside(measured: dict[str, list], curves: dict[str, list]) -> dict[str, list]:
    """The measured rows with a column `theory`: the value of the curves' row of the same field and place, or None."""

    def places(rows: dict[str, list]) -> list[tuple]:
        return list(zip(*(rows[name] for name in COLUMNS if name != "value"), strict=True))

    known = dict(zip(places(curves), curves["value"], strict=True))
    return {**measured, "theory": [known.get(place) for place in places(measured)]}
