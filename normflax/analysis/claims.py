"""Published claims as numbers with a criterion, judged by what was measured.

A criterion is written before the run and does not move to fit. A claim is judged only where its inputs exist: a run that never
trained has no learning rate, and then the answer is "not tested here".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd

from normflax.analysis.intervals import Measured

REPRODUCED, NOT_REPRODUCED, NOT_TESTED = "reproduced", "not reproduced", "not tested here"

Measure = Callable[[pd.DataFrame, pd.DataFrame], Measured | None]
"""From the runs and the layers of an experiment to a number, or None where its inputs do not exist."""


@dataclass(frozen=True)
class Claim:
    """One sentence of a source, the statistic that stands for it and the interval it must lie in.

    `remark` says what was found about a claim that failed, or what a reader must know of its statistic.
    """

    id: str
    source: str
    sentence: str
    statistic: str
    measure: Measure
    at_least: float | None = None
    at_most: float | None = None
    remark: str = ""

    @property
    def criterion(self) -> str:
        """The interval, as one writes it."""
        if self.at_least is not None and self.at_most is not None:
            return f"{self.at_least:g} to {self.at_most:g}"
        return f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}"

    def verdict(self, measured: Measured | None) -> str:
        """Whether the measured value lies in the criterion's interval."""
        if measured is None:
            return NOT_TESTED
        low = self.at_least is None or measured.value >= self.at_least
        high = self.at_most is None or measured.value <= self.at_most
        return REPRODUCED if low and high else NOT_REPRODUCED


def judge(claims: Sequence[Claim], runs: pd.DataFrame, layers: pd.DataFrame) -> pd.DataFrame:
    """One row a claim: id, claim, statistic, criterion, value, low, high, seeds, verdict, source, remark.

    Without a run whose settings can be read nothing is tested.
    """
    rows = []
    for claim in claims:
        measured = claim.measure(runs, layers) if "placement" in runs and len(runs) else None
        known = measured or Measured(float("nan"), float("nan"), float("nan"), 0)
        rows.append(
            {
                "id": claim.id,
                "claim": claim.sentence,
                "statistic": claim.statistic,
                "criterion": claim.criterion,
                "value": known.value,
                "low": known.low,
                "high": known.high,
                "seeds": known.seeds,
                "verdict": claim.verdict(measured),
                "source": claim.source,
                "remark": claim.remark,
            }
        )
    return pd.DataFrame(rows)
