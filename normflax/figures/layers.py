"""What a probe measured inside the stack: against block at one step, and as maps of block x step."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from normflax.figures.captions import about, placed
from normflax.figures.edges import band, mark, reserve
from normflax.figures.frames import column, floats, numbers, only
from normflax.figures.rows import BAD, chosen, off_scale, over_seeds, select, without_data
from normflax.figures.style import (
    Plot,
    Style,
    context,
    display_name,
    grid,
    last_in_row,
    legend,
    order,
    spaced,
    styles,
    title,
)

LABELS = {
    "second_moment": "residual second moment",
    "variance": "residual variance",
    "peak": "peak activation (absolute value)",
    "grad_rms": "activation gradient (rms x valid targets)",
    "grad_frobenius": "activation gradient (Frobenius norm)",
    "norm_input": "rms of the norm's input",
    "branch_ratio": "branch norm / stream norm",
    "grad_matrix": "gradient norm of the matrix",
    "grad_block": "gradient norm of the block's matrices",
    "update_ratio": "update norm / weight norm",
    "update_rms": "rms of the update",
}
"""Axis labels; a field that is not here is labelled with its own name."""

EDGES = {"top": ("NaN, inf", ("nan", "infinite")), "bottom": ("≤ 0", ("zeros", "negative"))}
"""Where the values that a log axis can't show are marked: the label there, and the columns that count them."""

GAPS = {"none": "Grey, hatched, no finite positive value", "some": "Hatched in white, some seeds have none"}
NONE: dict[str, Any] = {"facecolor": "0.88", "edgecolor": "0.6", "hatch": "//////"}
SOME: dict[str, Any] = {"facecolor": "none", "edgecolor": "white", "hatch": "\\\\\\\\", "linewidth": 0}
"""Cells of a map without a value, and cells that lack that of some seed: the words, and how they are drawn."""


def by_block(layers: pd.DataFrame, runs: pd.DataFrame, field: str, step: int) -> Plot:
    """One field at one step against block: a panel per depth, a line per placement, log y.

    A line is the geometric mean over seeds and its band their range, both over finite positive values; the others are
    marked at the edges and counted in the caption. The result carries its `data` and `caption`.
    Raises ValueError for a field or a step without rows, for runs of one depth that differ in more than placement and
    seed, and for a field with several rows a block (select first: `layers[layers["site"] == "down"]`).
    """
    drawn = placed(runs)
    rows = select(layers, drawn, field)
    label = LABELS.get(field, field) + chosen(rows)
    if step not in set(rows["step"]):
        logged = ", ".join(map(str, numbers(rows, "step")))
        raise ValueError(f"step {step} of '{field}' was not logged: the steps are {logged}")
    rows = only(rows, rows["step"] == step)
    table = over_seeds(rows, ["placement", "model.depth", "block"])
    looks, depths, first = styles(drawn["placement"]), numbers(drawn, "model.depth"), numbers(rows, "block")[0]
    with context():
        plot, panels = grid(len(depths), heights=(2.8, 2.3, 2.1))
        for index, (axes, depth) in enumerate(zip(panels, depths, strict=True)):
            part = only(table, table["model.depth"] == depth)
            _bands(axes, table, looks, depth, named=last_in_row(index, len(depths)))
            _lines(axes, part, looks)
            axes.set_xlim(first - 0.04 * depth, depth + 0.04 * depth)
            axes.set_xticks(_ticks(first, depth))
            silent = _silent(part, only(drawn, drawn["model.depth"] == depth))
            notice = f"\nno finite data: {silent}" if silent else ""
            title(axes, f"{_depth(depth)}, step {step}{notice}", len(depths))
            axes.set_xlabel(_blocks(first))
        plot.supylabel(label)
        off = any(table[key].any() for key in BAD)
        cross = Line2D([], [], color="0.3", marker="x", linestyle="none", label="off the scale")
        legend(plot, looks, [cross] if off else [])
    sentences = [
        f"{label[0].upper()}{label[1:]} against block at step {step} (after {step} updates), a panel per depth.",
        "A line is the geometric mean over seeds, its band their range, over the finite positive values"
        + ("; an x in a grey band marks a block with a value that is not." if off else "."),
        *off_scale(table),
        *about(drawn, runs, without_data(rows, drawn)),
    ]
    plot.data, plot.caption = table, " ".join(sentences)
    return plot


def heat_maps(layers: pd.DataFrame, runs: pd.DataFrame, field: str, depth: int) -> Plot:
    """One field over blocks and steps at one depth: a map per placement, all on one log colour scale.

    A cell is the geometric mean over the seeds with a finite positive value; a cell with none is grey and hatched, one
    that lacks some is hatched in white. Columns are the logged steps in order, evenly spaced, labelled with the step.
    The result carries its `data` and `caption`. Raises ValueError as `by_block`, and for a depth without runs.
    """
    depths = numbers(placed(runs), "model.depth")
    if depth not in depths:
        raise ValueError(f"no run has {depth} blocks: the depths are {', '.join(map(str, depths))}")
    drawn = only(runs, runs["model.depth"] == depth)
    rows = select(layers, drawn, field)
    label = LABELS.get(field, field) + chosen(rows)
    names, steps = order(drawn["placement"]), numbers(rows, "step")
    first = numbers(rows, "block")[0]
    table = _cells(rows, drawn, names, range(first, depth + 1), steps)
    shown = floats(only(table, table["seeds"] > 0), "mean")
    low, high = (shown.min(), shown.max()) if shown.size else (1.0, 10.0)
    colours = LogNorm(low, high) if low < high else LogNorm(low / 2, low * 2)
    with context():
        plot, panels = grid(len(names), heights=(2.8, 2.2, 2.0))
        mesh = None
        for axes, name in zip(panels, names, strict=True):
            part = only(table, table["placement"] == name)
            mesh = _map(axes, part, steps, colours)
            notice = ": no finite data" if _silent(part, part) else ""
            title(axes, f"{display_name(name)}, {_depth(depth)}{notice}", len(names))
            axes.set_xlabel("step (not to scale)")
        plot.supylabel(_blocks(first))
        grounds = (
            Patch(**NONE, label="no finite data"),
            Patch(**{**SOME, "facecolor": "0.5"}, label="some seeds without"),
        )
        legend(plot, {}, [ground for ground, gap in zip(grounds, GAPS, strict=True) if gap in set(table["gap"])])
        if mesh and shown.size:
            plot.colorbar(mesh, ax=panels, label=label, aspect=30)
    sentences = [
        f"{label[0].upper()}{label[1:]} by block and step at {_depth(depth)}, a map per placement.",
        "A cell is the geometric mean over seeds; columns are the logged steps in order, not to scale.",
        *(_gaps(table, gap, words) for gap, words in GAPS.items() if gap in set(table["gap"])),
        *off_scale(table),
        *about(drawn, runs, without_data(rows, drawn)),
    ]
    plot.data, plot.caption = table, " ".join(sentences)
    return plot


def _bands(axes: Axes, table: pd.DataFrame, looks: dict[str, Style], depth: int, named: bool) -> None:
    """The log scale of the whole table, and at its edges the blocks of one depth whose values it can't show."""
    axes.set_yscale("log")
    off = {edge: only(table, pd.DataFrame(table[list(keys)]).sum(axis=1) > 0) for edge, (_, keys) in EDGES.items()}
    lanes = {edge: order(rows["placement"]) for edge, rows in off.items()}
    shown = only(table, table["seeds"] > 0)
    low, high = (floats(shown, "low").min(), floats(shown, "high").max()) if len(shown) else (1.0, 10.0)
    reserve(axes, low, high, **{edge: len(names) for edge, names in lanes.items()})
    for edge, rows in off.items():
        if lanes[edge]:
            band(axes, len(lanes[edge]), edge == "top", EDGES[edge][0] if named else "")
        for index, name in enumerate(lanes[edge]):
            here = numbers(only(rows, (rows["placement"] == name) & (rows["model.depth"] == depth)), "block")
            line = mark(axes, here, index, len(lanes[edge]), edge == "top", looks[name].colour)
            line.set_gid(f"{edge} {name}")


def _lines(axes: Axes, part: pd.DataFrame, looks: dict[str, Style]) -> None:
    """A line of means and a band of ranges for each placement; a point whose neighbours are missing gets its marker."""
    for index, (name, look) in enumerate(looks.items()):
        rows = only(part, part["placement"] == name)
        blocks, known = floats(rows, "block"), np.concatenate([[False], floats(rows, "seeds") > 0, [False]])
        alone = np.flatnonzero(known[1:-1] & ~known[:-2] & ~known[2:])
        every = max(1, len(rows) // 12)
        axes.plot(
            blocks,
            floats(rows, "mean"),
            color=look.colour,
            linestyle=look.dash,
            marker=look.marker,
            markersize=3,
            markevery=sorted({*range(index % every, len(rows), every), *map(int, alone)}),
            gid=f"mean {name}",
        )
        if floats(rows, "seeds").max(initial=0) > 1:
            low, high = floats(rows, "low"), floats(rows, "high")
            axes.fill_between(blocks, low, high, color=look.colour, alpha=0.18, linewidth=0)


def _cells(rows: pd.DataFrame, runs: pd.DataFrame, names: list[str], blocks: range, steps: list[int]) -> pd.DataFrame:
    """Every placement, block and step over seeds, also those without rows, and which `gap` of `GAPS` a cell has."""
    cells = pd.MultiIndex.from_product([names, blocks, steps], names=["placement", "block", "step"])
    table = over_seeds(rows, ["placement", "block", "step"]).set_index(["placement", "block", "step"])
    table = table.reindex(cells).reset_index()
    table = table.assign(**{key: column(table, key).fillna(0).astype(int) for key in ("seeds", *BAD)})
    expected = {name: len(only(runs, runs["placement"] == name)) for name in names}
    lacking = np.repeat([*expected.values()], len(blocks) * len(steps)) - floats(table, "seeds").astype(int)
    gap = np.select([table["seeds"] == 0, lacking > 0], list(GAPS), "")
    return table.assign(lacking=lacking, gap=gap)


def _map(axes: Axes, part: pd.DataFrame, steps: list[int], colours: LogNorm) -> QuadMesh:
    """Cells of one placement over a hatched ground, which shows where there is none."""
    shape = (-1, len(steps))
    blocks, means = floats(part, "block").reshape(shape)[:, 0], floats(part, "mean").reshape(shape)
    axes.patch.set(**NONE)
    edges = np.arange(len(steps) + 1) - 0.5, np.append(blocks, blocks[-1] + 1) - 0.5
    mesh = axes.pcolormesh(*edges, np.ma.masked_invalid(means), norm=colours, rasterized=True)
    for place, some in enumerate((part["gap"] == "some").to_numpy(bool).reshape(shape).T):
        turns = np.flatnonzero(np.diff(np.concatenate([[False], some, [False]]).astype(int)))
        for start, stop in turns.reshape(-1, 2):
            axes.add_patch(Rectangle((place - 0.5, float(blocks[start]) - 0.5), 1, int(stop - start), **SOME))
    labels = dict(enumerate(spaced(axes, range(len(steps)), steps)))
    axes.set_xticks([place for place, label in labels.items() if label], [label for label in labels.values() if label])
    axes.set_yticks(_ticks(int(blocks[0]), int(blocks[-1])))
    return mesh


def _gaps(table: pd.DataFrame, gap: str, words: str) -> str:
    """A sentence that counts the cells with one kind of gap, for each placement that has any."""
    found = []
    for name in order(only(table, table["gap"] == gap)["placement"]):
        cells = column(only(table, table["placement"] == name), "gap")
        found.append(f"{display_name(name)} {(cells == gap).sum()} of {len(cells)} cells")
    return f"{words}: {'; '.join(found)}."


def _silent(part: pd.DataFrame, expected: pd.DataFrame) -> str:
    """The expected placements of which this part of a table has nothing to show."""
    return ", ".join(map(display_name, order(set(expected["placement"]) - set(only(part, part["seeds"] > 0)["placement"]))))


def _ticks(first: int, last: int) -> list[float]:
    """Some whole numbers from `first` to `last`."""
    return [t for t in MaxNLocator(integer=True, nbins=6).tick_values(first, last) if first <= t <= last]


def _blocks(first: int) -> str:
    """The label of an axis of blocks that begins at `first`."""
    return "block" if first else "block (0 = embedding)"


def _depth(depth: int) -> str:
    return f"{depth} block{'s' * (depth > 1)}"
