"""The ledger: every claim with what was measured and the verdict, as Markdown."""

import pandas as pd

from normflax.analysis.claims import NOT_TESTED


def markdown(claims: pd.DataFrame, head: str) -> str:
    """Judged claims (`analysis.claims.judge`) as a page; what failed says what was found about it."""
    counts = claims["verdict"].value_counts()
    lines = [
        f"# {head}",
        "",
        "A criterion is written before the run and does not move to fit. The interval is that of `normflax/analysis/intervals.py`.",
        "",
        f"{', '.join(f'{n} {verdict}' for verdict, n in counts.items())}.",
        "",
        "| claim | statistic | criterion | measured | seeds | verdict | source |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in claims.to_dict("records"):
        cells = (
            f"`{row['id']}` {row['claim']}",
            row["statistic"],
            row["criterion"],
            interval(row),
            str(row["seeds"]) if row["seeds"] else "",
            row["verdict"],
            row["source"],
        )
        lines.append(f"| {' | '.join(' '.join(str(cell).split()).replace('|', chr(92) + '|') for cell in cells)} |")
    notes = [f"- `{row['id']}`: {row['remark']}" for row in claims.to_dict("records") if row["remark"]]
    return "\n".join([*lines, *(["", "Remarks:", "", *notes] if notes else []), ""])


def interval(row: dict) -> str:
    """`0.62 (0.55 to 0.69)`: the value and its interval; nothing where nothing was measured."""
    if row["verdict"] == NOT_TESTED:
        return ""
    known = f" ({row['low']:.3g} to {row['high']:.3g})" if row["low"] == row["low"] else ""
    return f"{row['value']:.3g}{known}"
