"""Numbers over seeds, and claims judged by them."""

import numpy as np
import pandas as pd
import pytest

from experiments import depth_stability
from normflax.analysis.claims import NOT_REPRODUCED, NOT_TESTED, REPRODUCED, Claim, judge
from normflax.analysis.compare import by_placement
from normflax.analysis.intervals import Measured, geometric, share

EMPTY = pd.DataFrame()
ONE = pd.DataFrame({"placement": ["pre"]})


@pytest.mark.parametrize(
    ("flags", "value", "low", "high"),
    [
        # Wilson's interval by hand: 0 of 3 has the upper end z²/(n + z²) = 3.8415/6.8415.
        ([False] * 3, 0.0, 0.0, 0.56150),
        ([True] * 3, 1.0, 0.43850, 1.0),
        ([True, False], 0.5, 0.09453, 0.90547),
    ],
)
def test_share_has_wilsons_interval(flags, value, low, high):
    measured = share(np.array(flags))
    assert (measured.value, measured.seeds) == (value, len(flags))
    assert measured.low == pytest.approx(low, abs=1e-5)
    assert measured.high == pytest.approx(high, abs=1e-5)


def test_geometric_mean_is_of_logs():
    measured = geometric(np.array([1.0, 100.0]))
    assert measured.value == pytest.approx(10.0)
    assert (measured.low, measured.high, measured.seeds) == (1.0, 100.0, 2)


@pytest.mark.parametrize(
    ("bounds", "value", "verdict"),
    [
        ({"at_least": 1.0}, 1.0, REPRODUCED),
        ({"at_least": 1.0}, 0.99, NOT_REPRODUCED),
        ({"at_most": 0.0}, 0.0, REPRODUCED),
        ({"at_least": 0.85, "at_most": 1.1}, 1.2, NOT_REPRODUCED),
        ({"at_least": 0.85, "at_most": 1.1}, float("nan"), NOT_REPRODUCED),
    ],
)
def test_a_claim_is_judged_by_its_interval(bounds, value, verdict):
    claim = Claim("id", "", "", "", lambda runs, layers: Measured(value, value, value, 1), **bounds)
    assert judge([claim], ONE, EMPTY).loc[0, "verdict"] == verdict
    assert judge([claim], EMPTY, EMPTY).loc[0, "verdict"] == NOT_TESTED


def test_a_claim_without_inputs_is_not_tested():
    claim = Claim("id", "", "", "", lambda runs, layers: None, at_most=0.0)
    row = judge([claim], ONE, EMPTY).loc[0]
    assert (row["verdict"], row["seeds"], row["criterion"]) == (NOT_TESTED, 0, "≤ 0")


def runs(rates=(1e-3,), stuck=("post",), depths=(2, 16)):
    """A sweep in which the named placements are stuck at the greatest depth."""
    rows = [
        {
            "run": f"{placement}-{depth}-{rate}-{seed}",
            "placement": placement,
            "model.depth": depth,
            "optim.rate": rate,
            "schedule.warmup_steps": 0,
            "seed": seed,
            "verdict": "STUCK" if placement in stuck and depth == max(depths) else "OK",
            "loss_effective": 3.1 if placement in stuck and depth == max(depths) else 2.3 + rate,
        }
        for placement in ("post", "pre", "sandwich", "deepnorm")
        for depth in depths
        for rate in rates
        for seed in (0, 1, 2)
    ]
    return pd.DataFrame(rows)


def layers(table, last=1.0, post=0.01, end=33.0):
    """Layer rows of every run at steps 0 and 48: gradients of the first and last block, the stream's ends."""
    rows = []
    for run in table.itertuples():
        depth = run[table.columns.get_loc("model.depth") + 1]
        scale = post if run.placement == "post" else 1.0
        for step in (0, 48):
            rows += [(run.run, step, 1, None, "grad_block", scale), (run.run, step, depth, None, "grad_block", scale * last)]
            rows += [(run.run, step, 0, 0, "second_moment", 1.0), (run.run, step, depth, 2 * depth, "second_moment", end)]
    return pd.DataFrame(rows, columns=["run", "step", "block", "sublayer", "field", "value"])


def verdicts(table, seen):
    return judge(depth_stability.CLAIMS, table, seen).set_index("id")


def test_depth_stability_as_published():
    table = runs(rates=(3e-4, 1e-3, 3e-3))
    judged = verdicts(table, layers(table))
    assert set(judged["verdict"]) == {REPRODUCED}
    assert judged.loc["sandwich_growth", "value"] == pytest.approx(1.0)  # 33 / (1 + 32)
    assert judged.loc["post_gradient_collapse", "value"] == pytest.approx(0.01)
    assert judged.loc["post_deep_fails", "seeds"] == 9
    assert judged.loc["post_deep_fails_at_every_rate", "seeds"] == 3


def test_one_rate_does_not_test_every_rate():
    table = runs()
    judged = verdicts(table, layers(table))
    assert judged.loc["post_deep_fails", "verdict"] == REPRODUCED
    assert judged.loc["post_deep_fails_at_every_rate", "verdict"] == NOT_TESTED


def test_a_broken_post_ln_and_a_failing_pre_ln_show():
    table = runs(stuck=("post", "pre"))
    table.loc[(table["placement"] == "post") & (table["model.depth"] == 2), "verdict"] = "NONFINITE"
    judged = verdicts(table, layers(table, last=1.3, post=0.5))
    for claim in ("post_shallow_trains", "others_deep_train", "deepnorm_level", "post_gradient_collapse"):
        assert judged.loc[claim, "verdict"] == NOT_REPRODUCED
    assert judged.loc["others_deep_train", "value"] == pytest.approx(1 / 3)


def test_others_are_judged_at_their_best_rate():
    table = runs(rates=(1e-3, 1e-1))
    worse = (table["placement"] == "pre") & (table["optim.rate"] == 1e-1) & (table["model.depth"] == 16)
    table.loc[worse, ["verdict", "loss_effective"]] = ["NONFINITE", 3.15]
    assert verdicts(table, layers(table)).loc["others_deep_train", "verdict"] == REPRODUCED


def test_without_depth_nothing_is_claimed():
    table = runs()[lambda t: t["placement"] == "pre"]
    judged = verdicts(table, layers(table))
    assert set(judged["verdict"]) == {NOT_TESTED}


def test_comparison_ranks_within_a_depth_and_counts_failures():
    rows = by_placement(runs())
    deep = rows[rows["depth"] == 16]
    assert deep["placement"].iloc[-1] == "post"
    assert deep["failed"].tolist() == [0, 0, 0, 3]
    assert deep["verdicts"].iloc[-1] == "3 STUCK"
    assert deep["loss"].iloc[-1] == pytest.approx(3.1)
    assert rows["runs"].sum() == 24
