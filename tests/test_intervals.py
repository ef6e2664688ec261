"""Intervals over seeds by leaving one out."""

import numpy as np
import pytest
from scipy import stats

from normflax.analysis.intervals import jackknife


def test_the_jackknife_of_a_mean_is_students_interval():
    values = np.array([1.0, 2.0, 4.0, 8.0])
    found = jackknife(values, lambda v: v.mean())
    expected = stats.t.interval(0.95, 3, loc=values.mean(), scale=stats.sem(values))
    assert (found.value, found.seeds) == (3.75, 4)
    assert (found.low, found.high) == pytest.approx(expected, rel=1e-12)


def test_the_jackknife_of_a_ratio_leaves_out_seeds_by_row():
    values = np.array([[1.0, 2.0], [2.0, 2.0], [6.0, 2.0]])
    found = jackknife(values, lambda v: v[:, 0].sum() / v[:, 1].sum())
    without = np.array([2.0, 1.75, 0.75])  # (2+6)/4, (1+6)/4, (1+2)/4
    half = stats.t.ppf(0.975, 2) * np.sqrt(2 / 3 * ((without - 1.5) ** 2).sum())
    assert found.value == 1.5
    assert (found.low, found.high) == pytest.approx((1.5 - half, 1.5 + half))


def test_one_seed_has_no_interval():
    found = jackknife(np.array([3.0]), lambda v: v.mean())
    assert (found.value, found.seeds) == (3.0, 1) and np.isnan(found.low) and np.isnan(found.high)
