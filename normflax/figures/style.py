"""The look of every figure: one style file, and one colour, dash and marker per placement wherever it is drawn."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

import matplotlib
import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from normflax.model.placements import PLACEMENTS as TABLE

COLUMN, PAGE = 3.25, 6.75
"""Widths in inches: of a column of text, of a page of two."""

STYLE_FILE = Path(__file__).with_name("normflax.mplstyle")


class Plot(Figure):
    """A figure that carries the rows it was drawn from and the caption that says what they are.

    It belongs to no window and no global list of figures: it is drawn by Agg, and freed like any other object.
    """

    data: pd.DataFrame
    caption: str


class Style(NamedTuple):
    """How a series is drawn: a matplotlib colour, dash pattern and marker."""

    colour: str
    dash: Any  # its name, or (offset, (on, off, …)) in points
    marker: str


PLACEMENTS = {
    "post": Style("#D55E00", "dashed", "s"),
    "pre": Style("#0072B2", "solid", "o"),
    "sandwich": Style("#009E73", "dashdot", "^"),
    "deepnorm": Style("#CC79A7", "dotted", "D"),
    "lns": Style("#E69F00", (0, (5, 1)), "v"),
    "scaled_init": Style("#56B4E9", (0, (3, 1, 1, 1, 1, 1)), "P"),
}
"""The placements of the table in the order of every legend, in colours of Okabe and Ito, which the colour-blind tell apart too."""

# No colour of the table's, no x (it marks a diverged run). The lengths have no common divisor, so 5·6·7 triples differ.
_COLOURS = ("#000000", "#882255", "#999933", "#332288", "#AA4466")
_DASHES = ((0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (6, 1, 1, 1)), (0, (2, 1)))
_MARKERS = ("v", "P", "<", "p", ">", "h", "*")


def context():
    """Context manager: matplotlib's defaults with the style of normflax over them, whatever the user's own settings."""
    return matplotlib.style.context(["default", STYLE_FILE])


def display_name(name: str) -> str:
    """The name of a placement as papers write it; a name that the table does not know stays as it is."""
    return TABLE[name].label if name in TABLE else name


def order(names: Iterable[str]) -> list[str]:
    """Each name once, in the order of every legend and panel: those of `PLACEMENTS`, then the others by name."""
    names = set(names)
    return [name for name in PLACEMENTS if name in names] + sorted(names - PLACEMENTS.keys())


def styles(names: Iterable[str]) -> dict[str, Style]:
    """A style for each name, no two alike; those of `PLACEMENTS` keep theirs, the others take one each by name order.

    Give it the names of a whole experiment, not of one panel, and a series looks the same in all its figures.
    Raises ValueError for more than 210 names of one's own.
    """
    known = order(names)
    own = [name for name in known if name not in PLACEMENTS]
    limit = len(_COLOURS) * len(_DASHES) * len(_MARKERS)
    if len(own) > limit:
        raise ValueError(f"{len(own)} series are too many to tell apart: at most {limit} have styles of their own")
    drawn = {n: Style(_COLOURS[i % 5], _DASHES[i % 6], _MARKERS[i % 7]) for i, n in enumerate(own)}
    return {name: PLACEMENTS.get(name) or drawn[name] for name in known}


def depth_colours(depths: Iterable[int]) -> dict[int, str]:
    """A colour of viridis for each depth, light for shallow and dark for deep, evenly over the depths given."""
    depths = sorted(set(depths))
    shades = np.linspace(0.9, 0.0, len(depths))  # the last tenth of viridis is too light on white
    viridis = matplotlib.colormaps["viridis"]
    return {depth: to_hex(viridis(shade)) for depth, shade in zip(depths, shades, strict=True)}


def columns(count: int) -> int:
    """Panels in a row of `grid(count)`: at most three, and four are two rows of two."""
    return {1: 1, 2: 2, 4: 2}.get(count, 3)


def grid(count: int, heights: tuple[float, float, float]) -> tuple[Plot, list[Axes]]:
    """A page-wide figure of `count` panels that share y; `heights`: inches of a row of one panel, of two, of three."""
    wide = columns(count)
    rows = -(-count // wide)
    plot = Plot(figsize=(PAGE, rows * heights[wide - 1] + 0.4))
    panels = plot.subplots(rows, wide, sharey=True, squeeze=False).ravel()
    for spare in panels[count:]:
        spare.remove()
    return plot, list(panels[:count])


def first_in_row(index: int, count: int) -> bool:
    """Whether panel `index` of `grid(count)` has nothing to its left."""
    return index % columns(count) == 0


def last_in_row(index: int, count: int) -> bool:
    """Whether panel `index` of `grid(count)` has nothing to its right."""
    return index == count - 1 or first_in_row(index + 1, count)


def legend(plot: Plot, drawn: dict[str, Style], marks: Sequence[Artist] = ()) -> None:
    """One legend above the panels: every series in the fixed order, then `marks` for what failed; none for nothing."""
    lines = [
        Line2D([], [], color=look.colour, linestyle=look.dash, marker=look.marker, label=display_name(name))
        for name, look in drawn.items()
    ]
    handles = [*lines, *marks]
    if not handles:
        return
    inches = [0.52 + 0.06 * len(str(handle.get_label())) for handle in handles]  # of an entry at 8 pt
    in_a_row = len(handles) if sum(inches) <= PAGE else max(1, int(PAGE / max(inches)))
    plot.legend(handles=handles, loc="outside upper center", ncols=in_a_row)


def title(axes: Axes, text: str, count: int) -> None:
    """The title of one panel of `grid(count)`, broken into lines that don't reach its neighbours."""
    width = 108 // columns(count)
    lines = [line for part in text.split("\n") for line in wrap(part, width, break_on_hyphens=False)]
    axes.set_title("\n".join(lines))


def spaced(axes: Axes, ticks: Sequence[int], numbers: Sequence[int]) -> list[str]:
    """Numbers as labels for ticks of the x axis, empty where one would run into the one before it."""
    inches = axes.get_window_extent().width / axes.figure.dpi
    scale = axes.xaxis.get_transform().transform
    left, right = scale(np.array(axes.get_xlim()))
    labels, free = [], -np.inf
    for name, tick in zip(map(str, numbers), scale(np.asarray(ticks, float)), strict=True):
        centre, half = (tick - left) / (right - left) * inches, 0.031 * len(name)  # of a label at 7 pt
        labels.append(name if centre - half > free else "")
        free = centre + half + 0.02 if labels[-1] else free
    return labels
