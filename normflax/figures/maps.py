"""Rate against warm-up: where each placement trains, and how well."""

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from normflax.analysis.sensitivity import cells
from normflax.figures.captions import about, placed
from normflax.figures.frames import column, floats, only
from normflax.figures.style import (
    PAGE,
    Plot,
    Style,
    columns,
    context,
    display_name,
    first_in_row,
    grid,
    legend,
    order,
    styles,
    title,
)
from normflax.records.stability import FAILED

MAP = "viridis_r"


def warmup_maps(runs: pd.DataFrame) -> Plot:
    """Held-out loss over peak rate (x) and warm-up (y), a panel for each placement, for a `runs` table of one depth.

    A cell's colour is its mean loss over seeds less the lowest of the figure (nats per token), its number the mean loss, and below
    it how many of its runs failed. A cell in which at least half of them failed is hatched and has no colour; one without a run is
    empty. A thick line is the failure boundary. The result carries its `data` and `caption`.
    """
    drawn = placed(runs)
    table = cells(drawn)
    names, rates, warmups = order(table["placement"]), sorted(set(table["rate"])), sorted(set(table["warmup"]))
    excess = floats(table, "loss") - table["loss"].min()
    table = table.assign(excess=excess)
    alive = floats(only(table, table["trains"]), "excess")
    scale = Normalize(0.0, max(float(alive.max()) if len(alive) else 0.0, 1e-3))
    with context():
        plot, panels = grid(len(names), heights=(3.0, 2.4, 2.2))
        for index, (axes, name) in enumerate(zip(panels, names, strict=True)):
            _map(axes, only(table, table["placement"] == name), rates, warmups, scale, wide=PAGE / columns(len(names)) / len(rates))
            title(axes, display_name(name), len(panels))
            axes.set_xlabel("peak learning rate")
            if first_in_row(index, len(panels)):
                axes.set_ylabel("warm-up (updates)")
        shades = ScalarMappable(scale, MAP)
        bar = plot.colorbar(shades, ax=panels, shrink=0.8, pad=0.02)
        bar.set_label("held-out loss above the lowest (nats per token)")
        marks = [
            Patch(facecolor="0.93", edgecolor="0.6", hatch="////", label="half or more of the runs failed"),
            Line2D([], [], color="black", linewidth=2, label="failure boundary"),
        ]
        legend(plot, {}, marks)
    plot.data = table
    plot.caption = " ".join(
        [
            "Held-out loss at the end of training by peak learning rate and length of the linear warm-up (1: none).",
            "Numbers are means over seeds, capped at the unigram level; colours show how far they lie above the lowest,"
            f" {table['loss'].min():.3f}.",
            "Hatched: at least half of the cell's runs failed; the line is the boundary of those that trained.",
            *about(drawn, runs, _silent(drawn)),
        ]
    )
    return plot


def _map(axes: Axes, part: pd.DataFrame, rates: list[float], warmups: list[int], scale: Normalize, wide: float) -> None:
    """One placement's cells, `wide` inches each."""
    trains = np.full((len(warmups), len(rates)), np.nan)
    for cell in part.to_dict("records"):
        x, y = rates.index(cell["rate"]), warmups.index(cell["warmup"])
        trains[y, x] = cell["trains"]
        _cell(axes, x, y, cell, matplotlib.colormaps[MAP](float(scale(cell["excess"]))), 7.0 if wide > 0.6 else 5.5)
    for (y, x), here in np.ndenumerate(trains):
        right, above = ((x + 0.5, x + 0.5), (y - 0.5, y + 0.5)), ((x - 0.5, x + 0.5), (y + 0.5, y + 0.5))
        for (beside_y, beside_x), corners in (((y, x + 1), right), ((y + 1, x), above)):
            inside = beside_y < len(warmups) and beside_x < len(rates)
            if inside and here + trains[beside_y, beside_x] == 1:
                axes.plot(*corners, color="black", linewidth=2, solid_capstyle="round", gid="boundary", zorder=3)
    axes.set_xlim(-0.5, len(rates) - 0.5)
    axes.set_ylim(-0.5, len(warmups) - 0.5)
    axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    axes.set_yticks(range(len(warmups)), [str(warmup) for warmup in warmups])
    axes.tick_params(length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def _cell(axes: Axes, x: int, y: int, cell: dict, shade: tuple, size: float) -> None:
    """One cell: its colour, or hatching where half or more of its runs failed, its mean loss and its failures."""
    face, hatch = (shade, None) if cell["trains"] else ((0.93, 0.93, 0.93, 1.0), "////")
    axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=face, hatch=hatch, edgecolor="0.6", linewidth=0.4))
    dark = np.dot(face[:3], (0.299, 0.587, 0.114)) < 0.5
    failed = f"\n{cell['failed']}/{cell['seeds']} failed" if cell["failed"] else ""
    box = None if cell["trains"] else {"facecolor": "0.93", "edgecolor": "none", "pad": 1}
    words = f"{cell['loss']:.2f}{failed}"
    axes.text(x, y, words, ha="center", va="center", fontsize=size, color="white" if dark else "black", bbox=box)


def loss_against_warmup(runs: pd.DataFrame) -> Plot:
    """Held-out loss (nats per token) against the warm-up, a panel for each peak rate, every run and a line through the means.

    A hollow marker is a run that failed, drawn at its loss capped at the unigram level, which a dashed line marks. The result
    carries its `data` and `caption`.
    """
    drawn = placed(runs)
    drawn = only(drawn, drawn["verdict"].notna())
    table = cells(drawn)
    rates, warmups, looks = sorted(set(table["rate"])), sorted(set(table["warmup"])), styles(table["placement"])
    with context():
        plot, panels = grid(len(rates), heights=(3.0, 2.3, 2.1))
        for index, (axes, rate) in enumerate(zip(panels, rates, strict=True)):
            _curves(
                axes, only(drawn, np.isclose(floats(drawn, "optim.rate"), rate)), only(table, table["rate"] == rate), warmups, looks
            )
            title(axes, f"peak rate {rate:g}", len(panels))
            axes.set_xlabel("warm-up (updates)")
            if first_in_row(index, len(panels)):
                axes.set_ylabel("held-out loss (nats per token)")
        hollow = Line2D([], [], color="0.3", marker="s", markerfacecolor="white", linestyle="none", label="failed")
        unigram = Line2D([], [], color="0.45", linestyle=(0, (6, 3)), linewidth=0.7, label="unigram level")
        legend(plot, looks, [hollow, unigram])
    plot.data = drawn[
        ["run", "placement", "optim.rate", "schedule.warmup_steps", "seed", "verdict", "loss_final", "loss_effective"]
    ]
    plot.caption = " ".join(
        [
            "Held-out loss at the end of training against the length of the linear warm-up (1: none), capped at the unigram level.",
            "A marker is a run, moved sideways a little by placement, hollow where it failed; a line joins the means over seeds.",
            *about(drawn, runs, _silent(drawn)),
        ]
    )
    return plot


def _curves(axes: Axes, runs: pd.DataFrame, table: pd.DataFrame, warmups: list[int], looks: dict[str, Style]) -> None:
    """One rate: its runs and means, the warm-ups evenly spaced."""
    shifts = np.linspace(-0.12, 0.12, len(looks)) if len(looks) > 1 else [0.0]
    level = column(runs, "level_unigram").astype(float).mean()
    axes.axhline(level, color="0.45", linewidth=0.7, linestyle=(0, (6, 3)), zorder=1)
    for (name, look), shift in zip(looks.items(), shifts, strict=True):
        means = only(table, table["placement"] == name).sort_values("warmup")
        places = [warmups.index(w) + shift for w in means["warmup"]]
        axes.plot(places, means["loss"], color=look.colour, linestyle=look.dash, zorder=2, gid=f"mean {name}")
        part = only(runs, runs["placement"] == name)
        for run in part.to_dict("records"):
            warmup = max(1, int(run["schedule.warmup_steps"]))
            failed = run["verdict"] in FAILED
            axes.plot(
                [warmups.index(warmup) + shift],
                [min(run["loss_effective"], level)],
                color=look.colour,
                marker=look.marker,
                markerfacecolor="white" if failed else look.colour,
                markeredgecolor=look.colour if failed else "white",
                markeredgewidth=0.8 if failed else 0.4,
                linestyle="none",
                zorder=3,
                gid=f"{'failed' if failed else 'trained'} {name}",
            )
    axes.set_xticks(range(len(warmups)), [str(w) for w in warmups])
    axes.set_xlim(-0.4, len(warmups) - 0.6)


def _silent(runs: pd.DataFrame) -> pd.Series:
    """The runs without a finite loss."""
    return column(only(runs, ~np.isfinite(floats(runs, "loss_final"))), "run")
