"""How much a placement needs its warm-up: from a grid of rates and warm-up lengths to a few numbers.

Fixed are the number of steps, the order of the data and the schedule after the warm-up. With l(η, w) the mean over seeds of the
held-out loss, capped at the unigram level u (nats per token), at peak rate η after w updates of warm-up (w = 1 is none), and
l_best the lowest l of any placement:

    WB(η)   = l(η, 1) - min_w l(η, w)          what a warm-up wins at this rate: the headline
    WS(η)   = mean_w l(η, w) - min_w l(η, w)   counts also what a longer warm-up costs
    w_c(η)  = the shortest w within 0.02·(u - l_best) of the best at this rate
    η_max(w) = the largest rate at which a run trains after w
    JS      = mean_{η,w} l - min_{η,w} l

WB and WS of a placement are means over E, the rates one below to two above its own best one, and over every rate of the grid; as a
share of u - l_best they compare across tasks. Where no warm-up trains at a rate there is nothing to win: WB and WS are not known
there, and a placement with such a rate in E fails. It is never ranked beside one that trains, since a placement that is dead at
every warm-up would look least sensitive of all. The names and definitions are ours; the nearest precedents are Wortsman et al.
2023 (arXiv:2309.14322, figure 5) and Kalra and Barkeshli 2024 (arXiv:2406.09405).
"""

import math

import numpy as np
import pandas as pd

from normflax.analysis.intervals import share
from normflax.records.stability import FAILED

NEAR = 0.02
"""How close to the best a warm-up must come to be long enough, as a share of u - l_best."""

CELL = ["placement", "rate", "warmup"]


def cells(runs: pd.DataFrame) -> pd.DataFrame:
    """One row for each placement, rate and warm-up of a `runs` table of one depth.

    Columns: placement, rate, warmup (1 for none), loss (mean of min(held-out loss, u)), low and high (of the seeds), seeds, failed
    (how many diverged or are stuck), failed_low and failed_high (95 % Wilson interval of their share), trains (fewer than half
    failed).
    A run without a verdict is left out. Raises ValueError for runs of several depths.
    """
    judged = runs[runs["verdict"].notna()]
    if judged["model.depth"].nunique() > 1:
        raise ValueError(f"runs of {sorted(set(judged['model.depth']))} blocks are no one grid: select one depth")
    table = pd.DataFrame(
        {
            "placement": judged["placement"],
            "rate": judged["optim.rate"].astype(float),
            "warmup": judged["schedule.warmup_steps"].astype(int).clip(lower=1),
            "loss": judged[["loss_effective", "level_unigram"]].min(axis=1),
            "bad": judged["verdict"].isin([str(verdict) for verdict in FAILED]),
        }
    )
    rows = []
    for key, part in table.groupby(CELL):
        known = share(part["bad"].to_numpy())
        rows.append(
            dict(zip(CELL, key, strict=True))
            | {"loss": part["loss"].mean(), "low": part["loss"].min(), "high": part["loss"].max(), "seeds": len(part)}
            | {"failed": int(part["bad"].sum()), "failed_low": known.low, "failed_high": known.high, "trains": known.value < 0.5}
        )
    columns = [*CELL, "loss", "low", "high", "seeds", "failed", "failed_low", "failed_high", "trains"]
    return pd.DataFrame(rows, columns=columns)


def level(runs: pd.DataFrame) -> float:
    """u, the unigram level of the runs' held-out text."""
    return float(runs["level_unigram"].mean())


def by_rate(cells: pd.DataFrame, unigram: float) -> pd.DataFrame:
    """One row for each placement and rate: best (min_w l), WB, WS, w_c, and `trains` (at some warm-up).

    WB, WS and w_c are NaN where no warm-up trains, and WB also where the run without one is missing.
    """
    near = NEAR * (unigram - cells["loss"].min())
    rows = []
    for (placement, rate), part in cells.groupby(["placement", "rate"]):
        loss, best = part.set_index("warmup")["loss"].sort_index(), part["loss"].min()
        alive = bool(part["trains"].any())
        rows.append(
            {
                "placement": placement,
                "rate": rate,
                "best": best,
                "WB": loss.get(1, math.nan) - best if alive else math.nan,
                "WS": loss.mean() - best if alive else math.nan,
                "w_c": float(loss.index[loss <= best + near][0]) if alive else math.nan,
                "trains": alive,
            }
        )
    return pd.DataFrame(rows)


def largest_rates(cells: pd.DataFrame) -> pd.DataFrame:
    """One row for each placement and warm-up: eta_max, the largest rate that trains (NaN where none does), and `open` where that
    is the largest of the grid, so that the true one may be larger."""
    rows = []
    for (placement, warmup), part in cells.groupby(["placement", "warmup"]):
        alive = part.loc[part["trains"], "rate"]
        most = float(alive.max()) if len(alive) else math.nan
        rows.append({"placement": placement, "warmup": warmup, "eta_max": most, "open": most == part["rate"].max()})
    return pd.DataFrame(rows)


def boundary_slope(largest: pd.DataFrame) -> float:
    """d ln η_max / d ln w of one placement, by least squares over the warm-ups whose η_max is known and inside the grid; NaN for
    fewer than two."""
    known = largest[largest["eta_max"].notna() & ~largest["open"]]
    if len(known) < 2:
        return math.nan
    return float(np.polyfit(np.log(known["warmup"]), np.log(known["eta_max"]), 1)[0])


def scalars(cells: pd.DataFrame, unigram: float) -> pd.DataFrame:
    """One row for each placement, those that train first and the least warm-up benefit first among them.

    Columns: placement, best_rate, best (its lowest loss), WB and WS over E, WB_share and WS_share (of u - l_best), WB_grid and
    WS_grid (over every rate, NaN where one is), JS, slope (of the failure boundary), status: `ok`; `fails at RATE` for a rate of E
    at which no warm-up trains; `grid ends` where E runs off the grid, so that there is no number.
    """
    grid, rates = by_rate(cells, unigram), sorted(set(cells["rate"]))
    gap, largest, rows = unigram - cells["loss"].min(), largest_rates(cells), []
    for placement, part in grid.groupby("placement"):
        own, losses = part.set_index("rate"), cells.loc[cells["placement"] == placement, "loss"]
        best_rate = float(part["rate"].to_numpy()[part["best"].to_numpy().argmin()])
        at = rates.index(best_rate)
        e = rates[max(at - 1, 0) : at + 3]
        dead = [rate for rate in e if not own["trains"].get(rate, False)]
        status = f"fails at {dead[0]:g}" if dead else "ok" if at > 0 and len(e) == 4 else "grid ends"
        wb, ws = (float(own[key].loc[e].mean(skipna=False)) if status == "ok" else math.nan for key in ("WB", "WS"))
        rows.append(
            {
                "placement": placement,
                "best_rate": best_rate,
                "best": own["best"].min(),
                **{"WB": wb, "WS": ws, "WB_share": wb / gap, "WS_share": ws / gap},
                **{f"{key}_grid": float(own[key].reindex(rates).mean(skipna=False)) for key in ("WB", "WS")},
                "JS": losses.mean() - losses.min(),
                "slope": boundary_slope(largest[largest["placement"] == placement]),
                "status": status,
            }
        )
    table = pd.DataFrame(rows)
    ranked = table.assign(fails=table["status"].str.startswith("fails")).sort_values(["fails", "WB", "WB_grid"], na_position="last")
    return ranked.drop(columns="fails").reset_index(drop=True)


def benefit_by_seed(runs: pd.DataFrame, placement: str, rate: float) -> pd.Series:
    """WB of every seed at one rate: its loss without a warm-up less that at the warm-up which is best in the mean over seeds.

    (The best of each seed's own would be larger than nothing by chance alone.) Empty where no warm-up trains.
    """
    part = runs[(runs["placement"] == placement) & np.isclose(runs["optim.rate"].astype(float), rate) & runs["verdict"].notna()]
    grid = cells(part)
    if grid.empty or not grid["trains"].any() or 1 not in set(grid["warmup"]):
        return pd.Series(dtype=float)
    best = int(grid["warmup"].to_numpy()[grid["loss"].to_numpy().argmin()])
    lengths = part["schedule.warmup_steps"].astype(int).clip(lower=1)
    losses = part[["loss_effective", "level_unigram"]].min(axis=1)
    found = dict(zip(zip(part["seed"], lengths, strict=True), losses, strict=True))
    won = {seed: loss - found[seed, best] for (seed, warmup), loss in found.items() if warmup == 1 and (seed, best) in found}
    return pd.Series(won, dtype=float)
