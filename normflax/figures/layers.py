"""What a probe measured inside the stack: against block at one step, and as maps of block x step."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from normflax.figures.captions import caption_settings, count_failures, no_finite_data
from normflax.figures.edges import band, cross, reserve
from normflax.figures.rows import BAD, of_states, off_scale, over_seeds, select, without_data
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

NONE = {"facecolor": "0.88", "edgecolor": "0.6", "hatch": "//////"}
SOME = {"facecolor": "none", "edgecolor": "white", "hatch": "\\\\\\\\", "linewidth": 0}
"""Cells of a map without a value, and cells that lack that of some seed."""


def by_block(layers: pd.DataFrame, runs: pd.DataFrame, field: str, step: int) -> Plot:
    """One field at one step against block: a panel per depth, a line per placement, log y.

    A line is the geometric mean over seeds and its band their range, both over finite positive values; the others are
    marked at the edges and counted in the caption. The result carries its `data` and `caption`.
    Raises ValueError for a field or a step without rows, for runs of one depth that differ in more than placement and seed,
    and for a field with several rows a block (select a branch or a site first: `layers[layers["site"] == "down"]`).
    """
    rows = select(layers, runs, field)
    if step not in set(rows["step"]):
        raise ValueError(f"step {step} of '{field}' was not logged: the steps are {_numbers(rows['step'])}")
    rows = rows[rows["step"] == step]
    table = over_seeds(rows, ["placement", "model.depth", "block"])
    first = int(not of_states(field))
    looks, depths = styles(runs["placement"]), sorted(set(runs["model.depth"]))
    with context():
        plot, panels = grid(len(depths), heights=(2.8, 2.3, 2.1))
        for index, (axes, depth) in enumerate(zip(panels, depths, strict=True)):
            part = table[table["model.depth"] == depth]
            _bands(axes, table, looks, depth, last_in_row(index, len(depths)))
            _lines(axes, part, looks)
            axes.set_xlim(first - 0.04 * depth, depth + 0.04 * depth)
            ticks = MaxNLocator(integer=True, nbins=6).tick_values(first, depth)
            axes.set_xticks(ticks[(ticks >= first) & (ticks <= depth)])
            there = order(runs["placement"][runs["model.depth"] == depth])
            empty = [name for name in there if not part["seeds"][part["placement"] == name].any()]
            title(axes, _named(f"{depth} block{'s' * (depth > 1)}", empty), len(depths))
            axes.set_xlabel(_block(field))
        plot.supylabel(LABELS.get(field, field))
        marks = [Line2D([], [], color="0.3", marker="x", linestyle="none", label="off the scale")]
        legend(plot, looks, marks if table[list(BAD)].any(axis=None) else [])
    plot.data = table
    plot.caption = _caption(
        f"{_capital(LABELS.get(field, field))} against block at step {step} (after {step} updates), a panel per depth.",
        "A line is the geometric mean over seeds, its band their range, over the finite positive values;"
        " an x in a grey band marks a block with a value that is not.",
        off_scale(table),
        count_failures(runs),
        no_finite_data(without_data(rows, runs)),
        caption_settings(runs),
    )
    return plot


def heat_maps(layers: pd.DataFrame, runs: pd.DataFrame, field: str, depth: int) -> Plot:
    """One field over blocks and steps at one depth: a map per placement, all on one log colour scale.

    A cell is the geometric mean over the seeds with a finite positive value; a cell with none is grey and hatched, one
    that lacks some is hatched in white. Columns are the logged steps in order, evenly spaced, labelled with the step.
    The result carries its `data` and `caption`. Raises ValueError as `by_block`, and for a depth without runs.
    """
    if depth not in set(runs["model.depth"]):
        raise ValueError(f"no run has {depth} blocks: the depths are {_numbers(runs['model.depth'])}")
    runs = runs[runs["model.depth"] == depth]
    rows = select(layers, runs, field)
    names, steps, blocks = order(runs["placement"]), sorted(set(rows["step"])), range(not of_states(field), depth + 1)
    cells = pd.MultiIndex.from_product([names, blocks, steps], names=["placement", "block", "step"])
    table = over_seeds(rows, list(cells.names)).set_index(list(cells.names)).reindex(cells).reset_index()
    table[["seeds", *BAD]] = table[["seeds", *BAD]].fillna(0).astype(int)
    table["missing"] = table["placement"].map(runs["placement"].value_counts()) - table["seeds"]
    shown = table["mean"].dropna()
    low, high = (shown.min(), shown.max()) if len(shown) else (1.0, 10.0)
    colours = LogNorm(low, high) if low < high else LogNorm(low / 2, low * 2)
    with context():
        plot, panels = grid(len(names), heights=(2.8, 2.2, 2.0))
        meshes = []
        for axes, name in zip(panels, names, strict=True):
            part = table[table["placement"] == name]
            meshes.append(_map(axes, part, steps, colours))
            title(axes, _named(display_name(name), [] if part["seeds"].any() else [name]), len(names))
            axes.set_xlabel("step (not to scale)")
        plot.supylabel(_block(field))
        grounds = (
            Patch(**NONE, label="no finite data"),
            Patch(**SOME | {"facecolor": "0.5"}, label="some seeds without"),
        )
        legend(plot, {}, [ground for ground, cells in zip(grounds, _gaps(table), strict=True) if cells.any()])
        plot.colorbar(meshes[0], ax=panels, label=LABELS.get(field, field), aspect=30)
    plot.data = table
    plot.caption = _caption(
        f"{_capital(LABELS.get(field, field))} by block and step at {depth} blocks, a map per placement.",
        "A cell is the geometric mean over seeds; columns are the logged steps in order, not to scale.",
        _count_gaps(table),
        off_scale(table),
        count_failures(runs),
        no_finite_data(without_data(rows, runs)),
        caption_settings(runs),
    )
    return plot


def _bands(axes: Axes, table: pd.DataFrame, looks: dict[str, Style], depth: int, named: bool) -> None:
    """The log scale of the whole table, and at its edges the blocks of one depth whose values it can't show."""
    axes.set_yscale("log")
    off = {edge: table[table[list(columns)].any(axis=1)] for edge, (_, columns) in EDGES.items()}
    lanes = {edge: order(rows["placement"]) for edge, rows in off.items()}
    shown = table[table["seeds"] > 0]
    low, high = (shown["low"].min(), shown["high"].max()) if len(shown) else (1.0, 10.0)
    reserve(axes, low, high, **{edge: len(names) for edge, names in lanes.items()})
    for edge, rows in off.items():
        if lanes[edge]:
            band(axes, len(lanes[edge]), edge == "top", EDGES[edge][0] if named else "")
        for lane, name in enumerate(lanes[edge]):
            blocks = rows["block"][(rows["placement"] == name) & (rows["model.depth"] == depth)]
            cross(axes, blocks, lane, edge == "top", looks[name].colour).set_gid(f"{edge} {name}")


def _lines(axes: Axes, part: pd.DataFrame, looks: dict[str, Style]) -> None:
    """A line of means and a band of ranges for each placement; a point whose neighbours are missing gets its marker."""
    for index, (name, look) in enumerate(looks.items()):
        rows = part[part["placement"] == name].sort_values("block")
        known = np.concatenate([[False], rows["seeds"] > 0, [False]])
        alone = np.flatnonzero(known[1:-1] & ~known[:-2] & ~known[2:])
        every = max(1, len(rows) // 12)
        axes.plot(
            rows["block"],
            rows["mean"],
            color=look.colour,
            linestyle=look.dash,
            marker=look.marker,
            markersize=3,
            markevery=sorted({*range(index % every, len(rows), every), *alone}),
            gid=f"mean {name}",
        )
        if (rows["seeds"] > 1).any():
            axes.fill_between(rows["block"], rows["low"], rows["high"], color=look.colour, alpha=0.18, linewidth=0)


def _map(axes: Axes, part: pd.DataFrame, steps: Sequence[int], colours: LogNorm) -> QuadMesh:
    """Cells of one placement over a hatched ground, which shows where there is none."""
    cells = part.pivot(index="block", columns="step", values="mean")
    blocks, places = cells.index.to_numpy(), np.arange(len(steps))
    edges = np.append(places, len(steps)) - 0.5, np.append(blocks, blocks[-1] + 1) - 0.5
    axes.patch.set(**NONE)
    mesh = axes.pcolormesh(*edges, np.ma.masked_invalid(cells), norm=colours, rasterized=True)
    some = part.assign(some=_gaps(part)[1]).pivot(index="block", columns="step", values="some")
    for place, column in enumerate(some.to_numpy().T):
        turns = np.flatnonzero(np.diff(np.concatenate([[False], column, [False]]).astype(int)))
        for start, stop in turns.reshape(-1, 2):
            corner = place - 0.5, blocks[start] - 0.5
            axes.add_patch(Rectangle(corner, 1, stop - start, **SOME))
    labels = spaced(axes, list(places), steps)
    axes.set_xticks([place for place, label in zip(places, labels, strict=True) if label], filter(None, labels))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    return mesh


def _gaps(table: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Which cells have no value, and which lack that of some seed."""
    return table["seeds"] == 0, (table["seeds"] > 0) & (table["missing"] > 0)


def _count_gaps(table: pd.DataFrame) -> str:
    """A sentence for each kind of gap that occurs, with the cells of each placement counted."""
    sentences, kinds = [], ("Grey, hatched: no finite positive value", "Hatched in white: some seeds have none")
    for words, cells in zip(kinds, _gaps(table), strict=True):
        each = [(display_name(name), cells[table["placement"] == name]) for name in order(table["placement"][cells])]
        if each:
            sentences.append(f"{words} ({'; '.join(f'{name} {at.sum()} of {len(at)} cells' for name, at in each)}).")
    return " ".join(sentences)


def _named(text: str, empty: list[str]) -> str:
    """A panel's title, with the placements named of which it has nothing to show."""
    return f"{text}\nno finite data: {', '.join(map(display_name, empty))}" if empty else text


def _block(field: str) -> str:
    """The label of an axis of blocks."""
    return "block (0 = embedding)" if of_states(field) else "block"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _caption(*sentences: str) -> str:
    return " ".join(filter(None, sentences))


def _numbers(column: pd.Series) -> str:
    return ", ".join(str(number) for number in sorted(set(column)))
