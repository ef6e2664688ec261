"""Where what has no place on an axis is drawn: bands at the top and bottom edge of a panel, labelled at the right.

A band has a lane for each series that needs one, counted from the edge. It has no scale: the axis ends where it begins.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle


def lane(lanes: int) -> float:
    """Height of one of `lanes` lanes as a fraction of the panel: a mark and a little air, less where there are many."""
    return min(0.055, 0.4 / max(lanes, 1))


def reserve(axes: Axes, low: float, high: float, top: int = 0, bottom: int = 0) -> None:
    """Set the y limits so that `low`..`high` keeps clear of `top` lanes at the upper edge and `bottom` at the lower.

    Works in linear and log.
    """
    scale = axes.yaxis.get_transform()
    low, high = scale.transform(np.array([low, high], float))
    span = (high - low) or abs(high) or 1.0
    low, high = low - 0.06 * span, high + 0.06 * span
    above, below = top * lane(top), bottom * lane(bottom)
    whole = (high - low) / (1 - above - below)
    low, high, *limits = scale.inverted().transform([low, high, low - whole * below, high + whole * above])
    axes.set_ylim(*limits)
    axes.spines["left"].set_bounds(low, high)
    for minor in (False, True):
        axes.set_yticks([tick for tick in axes.get_yticks(minor=minor) if low <= tick <= high], minor=minor)


def band(axes: Axes, lanes: int, top: bool, text: str) -> None:
    """Shade `lanes` lanes at the top or the bottom edge, with `text` at their right."""
    height = lanes * lane(lanes)
    corner = (0, 1 - height if top else 0)
    axes.add_patch(Rectangle(corner, 1, height, transform=axes.transAxes, facecolor="0.92", edgecolor="none", zorder=0))
    note(axes, text, corner[1] + height / 2, axes.transAxes)


def mark(axes: Axes, x: Iterable, index: int, lanes: int, top: bool, colour: str, marker: str = "x") -> Line2D:
    """Mark each x in lane `index` of a band of `lanes`."""
    x, y = list(x), (index + 0.5) * lane(lanes)
    (line,) = axes.plot(
        x,
        [1 - y if top else y] * len(x),
        color=colour,
        marker=marker,
        linestyle="none",
        transform=axes.get_xaxis_transform(),
        zorder=4,
    )
    return line


def note(axes: Axes, text: str, y: Any, transform: Any, where: str = "center") -> None:
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
