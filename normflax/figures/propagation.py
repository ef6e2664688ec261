"""Models at initialisation against theory: over the blocks of a stack, and over depth."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from scipy import stats

from normflax.analysis.propagation import once
from normflax.figures.captions import base_init, listing, text, values
from normflax.figures.frames import floats, numbers, only
from normflax.figures.style import Plot, Style, context, display_name, grid, legend, order, styles, title

THEORY: dict[str, Any] = {"color": "black", "linewidth": 0.9, "linestyle": (0, (4, 1.5)), "zorder": 5}
"""How every theory curve is drawn."""

NAMED = {
    "model.width": "width {}",
    "model.heads": "{} heads",
    "model.ffn": "{} FFN",
    "model.ffn_ratio": "{} times as wide",
    "norm.kind": "{} norm",
    "norm.eps": "norm eps {}",
    "model.embed_std": "embedding std {}",
    "model.position_std": "position std {}",
    "model.mask": "{} mask",
    "train.batch": "{} sequences",
    "train.tokens": "of {} tokens",
    "data.name": "data {}",
    "probe.seeds": "{} seeds",
}
"""What a caption says of models at initialisation, and how."""


def over_seeds(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """One row for each combination of `keys`: the geometric `mean`, `low` and `high` of its 95 % interval (Student's t of the
    logs), the root mean square `rms`, what `theory` expects of that, and the number of `seeds`.

    Values that have no logarithm are left out. Raises ValueError where a seed is there twice.
    """
    once(rows, [*keys, "seed"])
    value = np.where(drawable(rows), floats(rows, "value"), np.nan)
    found = rows[[*keys, "theory"]].assign(log=np.log(value), square=value**2)
    table = found.groupby(keys, as_index=False).agg(
        log=("log", "mean"), sd=("log", "std"), seeds=("log", "count"), rms=("square", "mean"), theory=("theory", "first")
    )
    n = np.maximum(floats(table, "seeds"), 1)
    half = stats.t.ppf(0.975, np.maximum(n - 1, 1)) * floats(table, "sd") / np.sqrt(n)
    table = table.assign(
        mean=np.exp(table["log"]), low=np.exp(table["log"] - half), high=np.exp(table["log"] + half), rms=np.sqrt(table["rms"])
    )
    return table[[*keys, "mean", "low", "high", "rms", "theory", "seeds"]]


def drawable(rows: pd.DataFrame) -> np.ndarray:
    """Which values a log axis has a place for: the finite ones above zero."""
    value = floats(rows, "value")
    return np.isfinite(value) & (value > 0)


def over_blocks(
    panels: Mapping[str, pd.DataFrame], runs: pd.DataFrame, label: str, *, log_x: bool, rms: bool, note: str = ""
) -> Plot:
    """A field against block: a panel each, a line per placement with its interval over seeds, theory dashed; log y.

    With `log_x` the blocks from 1 on are shown. With `rms` the root mean square over seeds, which theory expects, is a
    cross beside the line. The result carries its `data` and `caption`.
    """
    tables = {name: over_seeds(rows, ["placement", "block"]).assign(panel=name) for name, rows in panels.items()}
    looks = styles(pd.concat(tables.values())["placement"])
    with context():
        plot, axes = grid(len(tables), heights=(3.0, 2.5, 2.2))
        for panel, (name, table) in zip(axes, tables.items(), strict=True):
            table = only(table, table["block"] >= int(log_x))
            for index, placement in enumerate(order(table["placement"])):
                part = only(table, table["placement"] == placement)
                every = _marked(floats(part, "block"), log_x, index)
                _series(panel, floats(part, "block"), part, looks[placement], every, rms)
            panel.set_yscale("log")
            if log_x:
                panel.set_xscale("log")
            title(panel, name, len(tables))
            panel.set_xlabel("block (0 = embedding)" if table["block"].min() == 0 else "block")
        plot.supylabel(label)
        legend(plot, looks, _marks(pd.concat(tables.values()), rms))
    plot.data = pd.concat(tables.values(), ignore_index=True)
    head = f"{label[0].upper()}{label[1:]} against block, before any update."
    plot.caption = _caption(head, plot.data, runs, rms, f"{note} {_left_out(panels)}".strip())
    return plot


def over_depth(
    panels: Mapping[str, pd.DataFrame],
    runs: pd.DataFrame,
    label: str,
    slopes: Mapping[str, Mapping[str, tuple[float, float]]],
    *,
    rms: bool,
    note: str = "",
    x: str = "depth (blocks)",
) -> Plot:
    """A number of every model against `model.depth`, log-log: a panel each, a line per placement, theory dashed.

    `slopes` holds by panel and placement the slope of the fit and its standard error, which are printed in the panel.
    """
    tables = {name: over_seeds(rows, ["placement", "model.depth"]).assign(panel=name) for name, rows in panels.items()}
    looks = styles(pd.concat(tables.values())["placement"])
    with context():
        plot, axes = grid(len(tables), heights=(3.2, 2.9, 2.5))
        for panel, (name, table) in zip(axes, tables.items(), strict=True):
            for placement in order(table["placement"]):
                part = only(table, table["placement"] == placement)
                _series(panel, floats(part, "model.depth"), part, looks[placement], None, rms)
            panel.set(xscale="log", yscale="log", xlabel=x)
            depths = numbers(table, "model.depth")
            panel.set_xticks(depths, [str(depth) for depth in depths], minor=False)
            panel.set_xticks([], minor=True)
            title(panel, name, len(tables))
            found = slopes.get(name, {})
            lines = [f"{display_name(p)}: {fitted(*found[p], digits=2)}" for p in order(found)]
            panel.text(
                1.02,
                0.02,
                "\n".join(["slope"] * bool(lines) + lines),
                transform=panel.transAxes,
                fontsize=7,
                va="bottom",
                ha="left",
            )
        plot.supylabel(label)
        legend(plot, looks, _marks(pd.concat(tables.values()), rms))
    plot.data = pd.concat(tables.values(), ignore_index=True)
    said = "Slopes are of the mean log in ln depth, with the standard error over seeds." if slopes else ""
    head = f"{label[0].upper()}{label[1:]} against depth, before any update."
    plot.caption = _caption(head, plot.data, runs, rms, f"{said} {note} {_left_out(panels)}".strip())
    return plot


def fitted(slope: float, error: float, digits: int = 3) -> str:
    """`+0.50 ± 0.02`; of one seed, whose error is NaN, the slope alone."""
    return f"{slope:+.{digits}f}" + ("" if np.isnan(error) else f" ± {error:.{digits}f}")


def _series(axes: Axes, x: np.ndarray, part: pd.DataFrame, look: Style, every: Any, rms: bool) -> None:
    """One placement: measured, its interval, and theory."""
    axes.plot(x, floats(part, "mean"), color=look.colour, linestyle=look.dash, marker=look.marker, markersize=3, markevery=every)
    axes.fill_between(x, floats(part, "low"), floats(part, "high"), color=look.colour, alpha=0.2, linewidth=0)
    if rms:
        shown = slice(None) if every is None else every
        axes.plot(x[shown], floats(part, "rms")[shown], color=look.colour, marker="x", markersize=4, linestyle="none")
    axes.plot(x, floats(part, "theory"), **THEORY)


def _marked(x: np.ndarray, log_x: bool, shift: int) -> list[int]:
    """Which points get a marker: about ten, evenly over the axis, not the same for two placements."""
    if not log_x:
        step = max(1, len(x) // 10)
        return list(range(shift % step, len(x), step))
    targets = np.geomspace(max(x.min(), 1), x.max(), 10) * 1.05**shift
    return sorted({int(np.abs(x - target).argmin()) for target in targets})


def _marks(table: pd.DataFrame, rms: bool) -> list[Line2D]:
    marks = [Line2D([], [], label="theory", **THEORY)] * bool(table["theory"].notna().any())
    return marks + [Line2D([], [], color="0.3", marker="x", linestyle="none", label="rms over seeds")] * rms


def _left_out(panels: Mapping[str, pd.DataFrame]) -> str:
    lost = sum(int((~drawable(rows)).sum()) for rows in panels.values())
    return f"Left out: {lost} values that are no positive numbers." if lost else ""


def _caption(head: str, table: pd.DataFrame, runs: pd.DataFrame, rms: bool, note: str) -> str:
    sentences = [
        head,
        "Lines: geometric mean over seeds, with the 95 % interval of that mean.",
        "Dashed: theory, for uniform attention and infinite width." if table["theory"].notna().any() else "",
        "Crosses: root mean square over seeds, which is what theory expects." if rms else "",
        note,
        settings(runs),
    ]
    return " ".join(filter(None, sentences))


def settings(runs: pd.DataFrame) -> str:
    """One sentence with every setting of these models; one with several values names them all."""
    said = []
    for key, how in NAMED.items():
        if key == "probe.seeds" and not (runs["train.steps"] == 0).any():  # a run that is trained has one
            continue
        said.append(how.format(listing(map(text, values(runs[key])))))
    depths = values(runs["model.depth"])
    return f"Settings: {listing(map(str, depths))} blocks, {base_init(runs)}, {', '.join(said)}."
