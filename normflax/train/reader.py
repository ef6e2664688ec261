"""Reads what is recorded beside the steps, on held-out windows."""

from collections.abc import Collection

import jax
import numpy as np

from normflax.build import Programs
from normflax.data.batches import Batch
from normflax.probes import beside


class Reader:
    """Called with the parameters after t updates at every probed step t, from 0 to `last`, before update t is made."""

    def __init__(self, compiled: Programs, hyper: dict, windows: Batch, fields: Collection[str], last: int):
        self.compiled, self.hyper, self.windows, self.fields, self.last = compiled, hyper, windows, fields, last
        self.start: jax.Array | None = None
        self.outputs: jax.Array | None = None

    def __call__(self, params, t: int) -> dict[str, np.ndarray]:
        """The values of the fields that are read at step t."""
        found = {}
        if "model_update" in self.fields:
            now = self.compiled.represent(params, self.hyper, self.windows)
            start = self.start = now if self.start is None else self.start
            found["model_update"] = beside.model_update(now, start)
        if {"mean_abs", "mean_abs_change"} & set(self.fields):
            outputs = self.compiled.outputs(params, self.hyper, self.windows)
            start = self.outputs = outputs if self.outputs is None else self.outputs
            sizes = beside.sizes(outputs, start)
            found |= {name: sizes[name] for name in sizes if name in self.fields}
        if "angle" in self.fields and t in (0, self.last):
            found["angle"] = self.compiled.angles(params, self.hyper, self.windows)
        return jax.device_get(found)
