"""Runs from settings: their programs, their rows, their records."""

import json
from pathlib import Path

import jax
import numpy as np
import pyarrow.parquet as pq

from normflax.build import hyper_part, programs, static_part
from normflax.config import Config, check
from normflax.data import batches
from normflax.records.store import RunFolder
from normflax.train import loop
from normflax.train.loop import train
from normflax.train.reader import Reader


def parts(config: Config):
    """Programs, numbers, first state and data of a run."""
    loaded = batches.load(check(config).data)
    static, hyper = static_part(config, loaded.task), hyper_part(config)
    windows = batches.heldout(loaded, config.data.windows, config.train.tokens)
    reader = Reader(programs(static), hyper, windows, config.probe.fields, config.train.steps - 1)
    return static, programs(static), programs(static).init(hyper), hyper, loaded.arrays, reader


def trained(config: Config) -> tuple[list[dict], dict[int, dict], object]:
    """The rows, the layers by step and the last state of a run."""
    rows, layers, state = [], {}, None
    for new, probed, now in loop.updates(config, *parts(config)):
        rows, layers, state = rows + new, layers | dict(probed), now
    return rows, layers, jax.device_get(state)


def recorded(config: Config, path: Path) -> tuple[dict, list[dict], list[dict]]:
    """Status, scalar rows and layer rows of a run that was trained into `path`."""
    status = train(config if config.optim.eps == 0 else check(config), RunFolder.create(path))
    rows = [json.loads(line) for line in (path / "scalars.jsonl").read_text().splitlines()]
    layers = [row for part in sorted((path / "layers").glob("*")) for row in pq.read_table(part).to_pylist()]
    return status, rows, layers


def same(a, b) -> bool:
    """The same tree, bit for bit."""
    return all(np.array_equal(x, y, equal_nan=True) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))
