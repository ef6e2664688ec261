"""The depth coordinate check: whether models of every depth move alike in their first updates."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from normflax.figures.captions import listing, text, values
from normflax.figures.frames import floats, numbers, only
from normflax.figures.propagation import over_seeds, settings
from normflax.figures.style import Plot, context, display_name, grid, legend, order, title

DASHES: dict[str, Any] = {"mean_abs": "solid", "mean_abs_change": "dashed"}
"""The two halves of the coordinate check."""


def coordinates(layers: pd.DataFrame, runs: pd.DataFrame) -> Plot:
    """The depth coordinate check (M29): mean |x| of the last block's output, and of its change, against depth after each step.

    A panel per placement; a line is a step, dark the later, and its band the 95 % interval over seeds. Flat lines train alike at
    every depth. Raises ValueError where no run recorded them.
    """
    found = layers[layers["field"].isin(["mean_abs", "mean_abs_change"])].merge(runs[["run", "placement", "model.depth"]], on="run")
    found = found[(found["block"] == found["model.depth"]) & (found["value"] > 0)]
    if found.empty:
        raise ValueError("no run recorded mean_abs and mean_abs_change, which the depth coordinate check shows")
    table = over_seeds(found.assign(theory=np.nan), ["placement", "field", "step", "model.depth"])
    names, steps = order(table["placement"]), numbers(table, "step")
    shades = dict(zip(steps, ("#BBBBBB", "#88AACC", "#4477AA", "#113366"), strict=False))
    with context():
        plot, panels = grid(len(names), heights=(3.0, 2.5, 2.2))
        for panel, name in zip(panels, names, strict=True):
            for field, dash in DASHES.items():
                for step in steps:
                    cells = (table["placement"] == name) & (table["field"] == field) & (table["step"] == step)
                    part, colour = only(table, cells), shades.get(step, "black")
                    x = floats(part, "model.depth")
                    panel.plot(x, floats(part, "mean"), marker="o", markersize=3, color=colour, linestyle=dash)
                    panel.fill_between(x, floats(part, "low"), floats(part, "high"), color=colour, alpha=0.2, linewidth=0)
            depths = numbers(table, "model.depth")
            panel.set(xscale="log", yscale="log", xlabel="depth (blocks)")
            panel.set_xticks(depths, [str(depth) for depth in depths], minor=False)
            panel.set_xticks([], minor=True)
            title(panel, display_name(name), len(names))
        plot.supylabel("last block's output")
        marks = [Line2D([], [], color=shades.get(step, "black"), label=f"after {step} updates") for step in steps]
        words = {"mean_abs": "size: mean |x(t)|", "mean_abs_change": "change: mean |x(t) - x(0)|"}
        legend(plot, {}, marks + [Line2D([], [], color="0.3", linestyle=DASHES[field], label=words[field]) for field in words])
    plot.data = table
    how = f"{listing(map(text, values(runs['optim.name'])))} at rate {listing(map(text, values(runs['optim.rate'])))}"
    plot.caption = (
        f"Depth coordinate check: the last block's output against depth, before and after the first updates with {how}, on held-out"
        f" windows. Geometric mean over {runs['seed'].nunique()} seeds with its 95 % interval. {settings(runs)}"
    )
    return plot
