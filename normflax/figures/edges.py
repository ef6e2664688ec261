"""Where what has no place on an axis is drawn: bands at the top and bottom edge of a panel, labelled at the right."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

ROW = 0.055
"""Height of a band's row as a fraction of the panel: a mark and a little air."""


def reserve(axes: Axes, low: float, high: float, top: int = 0, bottom: int = 0) -> None:
    """Set the y limits so that `low`..`high` keeps clear of `top` rows at the upper edge and `bottom` at the lower.

    The axis ends where the bands begin: they have no scale. Works in linear and log.
    """
    scale = axes.yaxis.get_transform()
    low, high = scale.transform(np.array([low, high], float))
    span = (high - low) or abs(high) or 1.0
    low, high = low - 0.06 * span, high + 0.06 * span
    unit = (high - low) / (1 - ROW * (top + bottom))
    edges = np.array([low, high, low - unit * ROW * bottom, high + unit * ROW * top])
    low, high, *limits = scale.inverted().transform(edges)
    axes.set_ylim(*limits)
    axes.spines["left"].set_bounds(low, high)
    for minor in (False, True):
        axes.set_yticks([tick for tick in axes.get_yticks(minor=minor) if low <= tick <= high], minor=minor)


def band(axes: Axes, rows: int, top: bool, text: str) -> None:
    """Shade `rows` rows at the top or the bottom edge, with `text` at their right."""
    start = 1 - ROW * rows if top else 0.0
    axes.add_patch(
        Rectangle((0, start), 1, ROW * rows, transform=axes.transAxes, facecolor="0.92", edgecolor="none", zorder=0)
    )
    note(axes, text, start + ROW * rows / 2, axes.transAxes)


def cross(axes: Axes, x: Sequence[float], row: int, top: bool, colour: str, marker: str = "x") -> Line2D:
    """Mark each x in row `row` of a band, counted from the panel's edge."""
    y = ROW * (row + 0.5)
    (line,) = axes.plot(
        x,
        np.full(len(x), 1 - y if top else y),
        color=colour,
        marker=marker,
        linestyle="none",
        markersize=4,
        transform=axes.get_xaxis_transform(),
        zorder=4,
    )
    return line


def note(axes: Axes, text: str, y: float, transform, where: str = "center") -> None:
    """A label right of the panel at height `y`, where it can't cover data."""
    axes.annotate(
        text,
        (1.0, y),
        xycoords=transform,
        xytext=(3, 0),
        textcoords="offset points",
        va=where,
        ha="left",
        fontsize=7,
        color="0.3",
        annotation_clip=False,
    )
