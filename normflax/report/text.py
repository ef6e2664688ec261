"""Tables in the terminal."""

import pandas as pd
from rich.console import Console
from rich.table import Table

from normflax.analysis.compare import by_placement
from normflax.report.ledger import interval

COLOURS = {"reproduced": "green", "not reproduced": "red", "not tested here": "yellow"}


def show_comparison(runs: pd.DataFrame) -> None:
    """Placements by depth, best first, with the range over seeds and what failed."""
    rows = by_placement(runs)
    table = Table(title="held-out loss at the end (nats per token; unigram level where a run did no better)", title_justify="left")
    for name in ("blocks", "placement", "rate", "warm-up", "loss", "range over runs", "failed", "verdicts"):
        table.add_column(name, justify="left" if name in ("placement", "verdicts") else "right", overflow="fold")
    for row in rows.itertuples():
        table.add_row(
            str(row.depth),
            str(row.placement),
            f"{row.rate:g}",
            str(row.warmup),
            f"{row.loss:.3f}",
            f"{row.low:.3f} to {row.high:.3f}",
            f"{row.failed}/{row.runs}",
            str(row.verdicts),
        )
    console().print(table)
    left = int(runs["verdict"].isna().sum())
    if left:
        print(f"{left} runs have no verdict: they failed, were interrupted or still train")


def show_table(title: str, rows: pd.DataFrame) -> None:
    """Any table of numbers, with what is not known as a dash."""
    table = Table(title=title, title_justify="left")
    for name in rows:
        numbers = pd.api.types.is_numeric_dtype(rows[name])
        table.add_column(str(name), justify="right" if numbers else "left", overflow="fold")
    for row in rows.itertuples(index=False):
        table.add_row(*(cell(value) for value in row))
    console().print(table)


def cell(value: object) -> str:
    """A number to four digits, a word as it is, a dash for nothing."""
    if isinstance(value, float):
        return "–" if value != value else "0" if abs(value) < 1e-12 else f"{value:.4g}"
    return str(value)


def show_claims(claims: pd.DataFrame) -> None:
    """Every claim with its measured value and verdict."""
    table = Table(title="claims", title_justify="left")
    for name in ("claim", "statistic", "criterion", "measured", "runs", "verdict"):
        table.add_column(name, justify="right" if name in ("criterion", "measured", "runs") else "left", overflow="fold")
    for row in claims.to_dict("records"):
        verdict = f"[{COLOURS[row['verdict']]}]{row['verdict']}[/]"
        table.add_row(row["claim"], row["statistic"], row["criterion"], interval(row), str(row["seeds"]), verdict)
    console().print(table)


def console() -> Console:
    """As wide as the terminal, and wide enough to read where there is none."""
    probe = Console()
    return probe if probe.is_terminal else Console(width=150)
