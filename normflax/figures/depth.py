"""Held-out loss against depth: every run on the page, those that failed too."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from normflax.figures.captions import about, differing, listing, placed, say
from normflax.figures.edges import band, mark, note, reserve
from normflax.figures.frames import column, floats, numbers, only
from normflax.figures.style import (
    Plot,
    Style,
    context,
    first_in_row,
    grid,
    last_in_row,
    legend,
    order,
    spaced,
    styles,
    title,
)
from normflax.records.stability import DIVERGED, Verdict

LEVELS = ("unigram", "bigram")
LOST = ("diverged", "no result")
COLUMNS = ("run", "placement", "model.depth", "seed", "verdict", "loss_final", "loss_effective")
TITLE = ("optim.rate", "schedule.warmup_steps", "train.steps")


def loss_against_depth(runs: pd.DataFrame) -> Plot:
    """Held-out loss at the end of training (nats per token) against depth (blocks), for a `runs` table.

    A marker is a run, hollow where it is stuck; in the band at the top, an x is a run that diverged and a plus one that
    left no loss. A line joins the means over seeds of `loss_effective` at each depth. Runs that differ in more than
    placement, depth and seed (in the rate, say, or the warm-up) get a panel per setting. The result carries its `data`
    and `caption`. Raises ValueError for a table without runs.
    """
    drawn, split = placed(runs), differing(runs)
    settings = [part for _, part in drawn.groupby(split, dropna=False)] if split else [drawn]
    shown = [*COLUMNS, *(f"level_{level}" for level in LEVELS), *split]
    table = pd.DataFrame(drawn[shown]).assign(drawn=_drawn(drawn))
    looks = styles(table["placement"])
    lost = order(only(table, table["drawn"].isin(LOST))["placement"])
    with context():
        plot, panels = grid(len(settings), heights=(3.0, 2.3, 2.1))
        for index, (axes, part) in enumerate(zip(panels, settings, strict=True)):
            rows, last = pd.DataFrame(table.loc[part.index]), last_in_row(index, len(panels))
            _scale(axes, table, len(lost))
            _levels(axes, rows, named=last or any(key.startswith("data.") for key in split))
            _runs(axes, rows, looks, lost)
            if lost:
                kinds = [kind for kind in LOST if kind in set(table["drawn"])]
                band(axes, len(lost), True, (kinds[0] if len(kinds) == 1 else "lost") if last else "")
            title(axes, ", ".join(say(part, key) for key in (split or TITLE)), len(panels))
            axes.set_xlabel("depth (blocks)")
            if first_in_row(index, len(panels)):
                axes.set_ylabel("held-out loss (nats per token)")
        legend(plot, looks, _marks(set(table["drawn"])))
    plot.data = table
    silent = only(table, ~np.isfinite(floats(table, "loss_final")))
    plot.caption = " ".join([*_caption(table, split), *about(drawn, runs, silent["run"])])
    return plot


def _drawn(runs: pd.DataFrame) -> np.ndarray:
    """How each run is shown: trained, stuck, diverged or no result."""
    verdict, lost = column(runs, "verdict"), ~np.isfinite(floats(runs, "loss_final"))
    diverged, stuck = verdict.isin([str(v) for v in DIVERGED]).to_numpy(bool), verdict.isin([str(Verdict.STUCK)])
    return np.select([diverged, lost, stuck.to_numpy(bool)], ["diverged", "no result", "stuck"], "trained")


def _level(table: pd.DataFrame) -> dict[str, float]:
    """The levels that are known, as means over runs: a run's own seed draws its held-out windows."""
    means = {level: float(column(table, f"level_{level}").astype(float).mean()) for level in LEVELS}
    return {level: mean for level, mean in means.items() if np.isfinite(mean)}


def _room(depths: list[int], share: float) -> dict[int, float]:
    """Octaves on either side of each depth for its runs: `share` of the axis, or less where the next depth is near."""
    octaves = np.log2(depths)
    gaps = np.concatenate([[np.inf], np.diff(octaves), [np.inf]]) / 2.5
    most = share * max(float(np.ptp(octaves)), 1.0)
    return {depth: min(most, *gaps[i : i + 2]) for i, depth in enumerate(depths)}


def _scale(axes: Axes, table: pd.DataFrame, lanes: int) -> None:
    """The same axes in every panel: octaves of depth with the depths as ticks, losses below a band of `lanes` rows."""
    depths = numbers(table, "model.depth")
    axes.set_xscale("log", base=2)
    margin = max(0.06 * float(np.ptp(np.log2(depths))), 0.3)
    axes.set_xlim(depths[0] / 2**margin, depths[-1] * 2**margin)
    axes.set_xticks(depths, spaced(axes, depths, depths))
    axes.minorticks_off()
    finals = floats(only(table, ~table["drawn"].isin(LOST)), "loss_final")
    levels = [floats(table, f"level_{level}") for level in LEVELS]
    losses = np.concatenate([finals, floats(table, "loss_effective"), *levels])
    losses = losses[np.isfinite(losses)]
    reserve(axes, *((losses.min(), losses.max()) if losses.size else (0.0, 1.0)), top=lanes)


def _levels(axes: Axes, rows: pd.DataFrame, named: bool) -> None:
    """A horizontal line at each known level, its name and value at the right of the panel."""
    known = _level(rows)
    low, high = axes.get_ylim()
    close = len(known) > 1 and np.ptp(list(known.values())) < 0.06 * (high - low)
    for level, value in known.items():
        axes.axhline(value, color="0.45", linewidth=0.7, linestyle=(0, (6, 3)), zorder=1)
        if named:
            where = "center" if not close else "bottom" if value == max(known.values()) else "top"
            note(axes, f"{level} {value:.3f}", value, axes.get_yaxis_transform(), where)


def _runs(axes: Axes, rows: pd.DataFrame, looks: dict[str, Style], lost: list[str]) -> None:
    """A line through the means of each placement, a marker for each run, a mark in the band for one without a loss."""
    depths = numbers(rows, "model.depth")
    room, room_above = _room(depths, 0.025), _room(depths, 0.06)
    shift = dict(zip(looks, np.linspace(-1, 1, len(looks)) if len(looks) > 1 else [0.0], strict=True))
    for name, look in looks.items():
        part = only(rows, rows["placement"] == name)
        at = {depth: only(part, part["model.depth"] == depth) for depth in numbers(part, "model.depth")}
        means = [column(some, "loss_effective").astype(float).mean() for some in at.values()]
        axes.plot([*at], means, color=look.colour, linestyle=look.dash, zorder=2, gid=f"mean {name}")
        for drawn, face, edge in (("trained", look.colour, "white"), ("stuck", "white", look.colour)):
            some = only(part, part["drawn"] == drawn)
            axes.plot(
                [depth * 2 ** (room[depth] * shift[name]) for depth in some["model.depth"]],
                floats(some, "loss_final"),
                color=look.colour,
                marker=look.marker,
                markerfacecolor=face,
                markeredgecolor=edge,
                markeredgewidth=0.4 if drawn == "trained" else 0.8,
                linestyle="none",
                zorder=3,
                gid=f"{drawn} {name}",
            )
        for depth, some in at.items():
            gone = [drawn for drawn in some["drawn"] if drawn in LOST]
            apart = np.linspace(-1, 1, len(gone) + 2)[1:-1]  # seeds side by side, or they would cover each other
            for aside, drawn in zip(apart, gone, strict=True):
                x, shape = depth * 2 ** (room_above[depth] * aside), "x" if drawn == "diverged" else "+"
                mark(axes, [x], lost.index(name), len(lost), True, look.colour, shape).set_gid(f"{drawn} {name}")


def _marks(drawn: set[str]) -> list[Line2D]:
    """Legend entries for the ways to fail that occur in the figure."""
    shapes = {"stuck": ("s", "white"), "diverged": ("x", "0.3"), "no result": ("+", "0.3")}
    return [
        Line2D([], [], color="0.3", marker=marker, markerfacecolor=face, linestyle="none", label=kind)
        for kind, (marker, face) in shapes.items()
        if kind in drawn
    ]


def _caption(table: pd.DataFrame, split: list[str]) -> list[str]:
    """Sentences that say what is drawn."""
    known = [f"{level} {value:.3f}" for level, value in _level(table).items()]
    return [
        "Held-out loss at the end of training against depth in blocks.",
        "A marker is a run, moved sideways a little by placement; a line joins the means over seeds of the effective"
        " loss: the final loss capped at the unigram level (at the initial loss where there is none), which stands for"
        " a run that is not finite.",
        "Hollow: stuck. In the band at the top: x diverged, + no result.",
        *([f"Levels of the held-out text: {listing(known)} (means over runs)."] if known else []),
        *([f"A panel for each {listing(split)}."] if split else []),
    ]
