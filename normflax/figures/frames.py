"""Parts of data frames with a known type, which pandas' own annotations leave open."""

from typing import Any

import numpy as np
import pandas as pd


def column(table: pd.DataFrame, name: str) -> pd.Series:
    """One column."""
    return pd.Series(table[name])


def floats(table: pd.DataFrame, name: str) -> np.ndarray:
    """One column as floats, NaN where it holds nothing."""
    return column(table, name).to_numpy(float, na_value=np.nan)


def numbers(table: pd.DataFrame, name: str) -> list[int]:
    """The different numbers in a column, in order."""
    return sorted({int(number) for number in table[name]})


def only(table: pd.DataFrame, rows: Any) -> pd.DataFrame:
    """The rows for which a mask holds."""
    return pd.DataFrame(table[rows])
