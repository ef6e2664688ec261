"""Placements side by side."""

import pandas as pd

from normflax.records.stability import FAILED


def by_placement(runs: pd.DataFrame) -> pd.DataFrame:
    """One row for every placement, depth, rate and warm-up, best first within a depth.

    Columns: placement, depth, rate, warmup, loss (mean effective held-out loss over the runs, nats per token), low and high (their
    range), runs, failed (diverged or stuck), verdicts (how many of each).
    """
    keys = {
        "placement": "placement",
        "model.depth": "depth",
        "optim.rate": "rate",
        "schedule.warmup_steps": "warmup",
    }
    judged = runs[runs["verdict"].notna()]
    rows = []
    for values, part in judged.groupby(list(keys), sort=False):
        counts = part["verdict"].value_counts()
        rows.append(
            dict(zip(keys.values(), values, strict=True))
            | {
                "loss": part["loss_effective"].mean(),
                "low": part["loss_effective"].min(),
                "high": part["loss_effective"].max(),
                "runs": len(part),
                "failed": int(part["verdict"].isin([str(v) for v in FAILED]).sum()),
                "verdicts": ", ".join(f"{n} {verdict}" for verdict, n in counts.items()),
            }
        )
    columns = [*keys.values(), "loss", "low", "high", "runs", "failed", "verdicts"]
    return pd.DataFrame(rows, columns=columns).sort_values(["depth", "loss"], ignore_index=True)
