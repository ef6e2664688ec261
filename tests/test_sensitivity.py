"""What a placement needs its warm-up for: tables worked by hand."""

import math

import numpy as np
import pandas as pd
import pytest

from normflax.analysis.sensitivity import (
    benefit_by_seed,
    boundary_slope,
    by_rate,
    cells,
    largest_rates,
    level,
    scalars,
)

U = 3.0
RATES = (1e-3, 3e-3, 1e-2, 3e-2)


def run(placement: str, rate: float, warmup: int, loss: float, seed: int = 0, **more) -> dict:
    failed = not loss < U - 0.1
    return {
        "placement": placement,
        "optim.rate": rate,
        "schedule.warmup_steps": warmup,
        "seed": seed,
        "model.depth": 6,
        "verdict": "STUCK" if failed else "OK",
        "loss_effective": loss,
        "level_unigram": U,
    } | more


def grid(losses: dict[str, dict[float, tuple[float, float, float]]], seeds: int = 1) -> pd.DataFrame:
    """Runs at warm-ups none, 30 and 100, from the losses of each placement and rate."""
    return pd.DataFrame(
        [
            run(placement, rate, warmup, loss, seed)
            for placement, rows in losses.items()
            for rate, row in rows.items()
            for warmup, loss in zip((0, 30, 100), row, strict=True)
            for seed in range(seeds)
        ]
    )


POST = {1e-3: (2.4, 2.42, 2.45), 3e-3: (2.6, 2.4, 2.3), 1e-2: (3.0, 2.9, 2.5), 3e-2: (3.0, 3.0, 3.0)}
PRE = {1e-3: (2.3, 2.32, 2.36), 3e-3: (2.2, 2.21, 2.24), 1e-2: (2.25, 2.2, 2.22), 3e-2: (2.5, 2.4, 2.3)}
BOTH = grid({"post": POST, "pre": PRE})


def test_one_rate_at_a_time_by_hand():
    """u = 3, the best loss of all 2.2: near is 0.016."""
    found = by_rate(cells(BOTH), U).set_index(["placement", "rate"])
    assert found.loc[("post", 1e-3), "WB"] == 0 and found.loc[("post", 1e-3), "w_c"] == 1
    assert found.loc[("post", 3e-3), "WB"] == pytest.approx(0.3) and found.loc[("post", 3e-3), "w_c"] == 100
    assert found.loc[("post", 1e-2), "WB"] == pytest.approx(0.5)
    assert found.loc[("post", 1e-2), "WS"] == pytest.approx(2.8 - 2.5)
    assert not found.loc[("post", 3e-2), "trains"] and np.isnan(found.loc[("post", 3e-2), ["WB", "WS", "w_c"]].astype(float)).all()
    assert found.loc[("pre", 3e-3), "w_c"] == 1 and found.loc[("pre", 1e-2), "w_c"] == 30
    assert found.loc[("pre", 1e-2), "WB"] == pytest.approx(0.05) and found.loc[("pre", 3e-2), "WB"] == pytest.approx(0.2)


def test_no_warm_up_and_a_warm_up_of_one_are_one_length():
    runs = pd.DataFrame([run("pre", 1e-3, 0, 2.0), run("pre", 1e-3, 1, 2.2, seed=1)])
    found = cells(runs)
    assert len(found) == 1 and found["warmup"][0] == 1 and found["seeds"][0] == 2 and found["loss"][0] == pytest.approx(2.1)


def test_scalars_are_means_over_the_rates_around_a_placements_own_best():
    """Pre-LN is best at 3e-3 (and first at 1e-2's 2.2 only by order), so E is the whole grid; Post-LN's E holds a dead rate."""
    found = scalars(cells(BOTH), U).set_index("placement")
    assert list(found.index) == ["pre", "post"]  # who fails comes last, however little it would seem to win
    assert found.loc["pre", "best_rate"] == 3e-3 and found.loc["pre", "status"] == "ok"
    assert found.loc["pre", "WB"] == pytest.approx((0 + 0 + 0.05 + 0.2) / 4)
    assert found.loc["pre", "WB_share"] == pytest.approx(0.0625 / 0.8)
    ws = [np.mean(row) - min(row) for row in PRE.values()]
    assert found.loc["pre", "WS"] == found.loc["pre", "WS_grid"] == pytest.approx(np.mean(ws))
    every = [x for row in PRE.values() for x in row]
    assert found.loc["pre", "JS"] == pytest.approx(np.mean(every) - 2.2)
    assert found.loc["post", "status"] == "fails at 0.03" and math.isnan(found.loc["post", "WB"])
    assert math.isnan(found.loc["post", "WB_grid"])


def test_a_dead_placement_is_not_the_least_sensitive():
    """Stuck everywhere it has WS 0, and comes behind one that needs its warm-up."""
    dead = grid({"post": dict.fromkeys(RATES, (3.0, 3.0, 3.0)), "pre": PRE})
    found = scalars(cells(dead), U)
    assert list(found["placement"]) == ["pre", "post"] and found["status"][1].startswith("fails at")
    assert math.isnan(found["WB"][1]) and math.isnan(found["WS"][1])


def test_rates_that_run_off_the_grid_give_no_number():
    """Best at the smallest rate, or the second largest: E would reach beyond the grid."""
    low = grid({"pre": {1e-3: (2.0, 2.0, 2.0), 3e-3: (2.1, 2.1, 2.1), 1e-2: (2.2, 2.2, 2.2)}})
    found = scalars(cells(low), U)
    assert found["status"][0] == "grid ends" and math.isnan(found["WB"][0]) and found["WB_grid"][0] == 0
    short = grid({"pre": {1e-3: (2.1, 2.1, 2.1), 3e-3: (2.0, 2.0, 2.0), 1e-2: (2.2, 2.2, 2.2)}})
    assert scalars(cells(short), U)["status"][0] == "grid ends"


def test_losses_are_capped_at_the_unigram_level_and_failures_are_counted():
    """One of two seeds fails: the cell is a mean with u, half failed, and does not count as trained."""
    runs = pd.DataFrame(
        [run("post", 1e-3, 0, 5.0, 0, verdict="NONFINITE", loss_effective=3.0), run("post", 1e-3, 0, 2.4, 1)]
        + [run("post", 1e-3, 9, loss, seed) for seed, loss in enumerate((2.3, 2.5, 3.4))]
    )
    found = cells(runs).set_index("warmup")
    assert found.loc[1, "loss"] == pytest.approx(2.7) and found.loc[1, "failed"] == 1 and not found.loc[1, "trains"]
    assert found.loc[9, "loss"] == pytest.approx((2.3 + 2.5 + 3.0) / 3) and found.loc[9, "trains"]
    assert 0 < found.loc[9, "failed_low"] < 1 / 3 < found.loc[9, "failed_high"] < 1
    assert level(runs) == U


def test_a_missing_run_without_warm_up_leaves_no_benefit():
    found = by_rate(cells(pd.DataFrame([run("pre", 1e-3, 30, 2.0), run("pre", 1e-3, 100, 2.1)])), U)
    assert math.isnan(found["WB"][0]) and found["WS"][0] == pytest.approx(0.05)


def test_a_run_without_a_verdict_is_left_out():
    runs = pd.DataFrame([run("pre", 1e-3, 0, 2.0), run("pre", 1e-3, 0, 9.0, 1, verdict=None)])
    assert cells(runs)["seeds"][0] == 1


def test_several_depths_are_no_one_grid():
    with pytest.raises(ValueError, match="6, 12"):
        cells(pd.DataFrame([run("pre", 1e-3, 0, 2.0), run("pre", 1e-3, 0, 2.0, **{"model.depth": 12})]))


def test_the_failure_boundary_rises_with_the_warm_up():
    """η_max 1e-3 after 1, 1e-2 after 100 updates: slope 1/2; at the edge of the grid it is open and does not count."""
    losses = {1e-3: (2.4, 2.4, 2.4), 1e-2: (3.0, 3.0, 2.4), 1e-1: (3.0, 3.0, 3.0)}
    found = largest_rates(cells(grid({"post": losses})))
    assert found["eta_max"].tolist() == [1e-3, 1e-3, 1e-2] and not found["open"].any()
    assert boundary_slope(found[found["warmup"] != 30]) == pytest.approx(0.5)
    open_ended = largest_rates(cells(grid({"pre": PRE})))
    assert open_ended["open"].all() and math.isnan(boundary_slope(open_ended))
    dead = largest_rates(cells(grid({"post": {1e-3: (3.0, 3.0, 3.0)}})))
    assert dead["eta_max"].isna().all() and math.isnan(boundary_slope(dead))


def test_the_benefit_of_a_seed_is_at_the_warm_up_that_is_best_for_all():
    """Seed 0 gains 0.4 and seed 1 gains 0.2 at w = 100, though seed 1 alone would have gained 0.3 at w = 30."""
    rows = [(0, 0, 2.8), (0, 30, 2.7), (0, 100, 2.4), (1, 0, 2.6), (1, 30, 2.3), (1, 100, 2.4)]
    runs = pd.DataFrame([run("post", 1e-2, warmup, loss, seed) for seed, warmup, loss in rows])
    assert benefit_by_seed(runs, "post", 1e-2).tolist() == pytest.approx([0.4, 0.2])
    assert benefit_by_seed(runs, "pre", 1e-2).empty
    assert benefit_by_seed(grid({"post": POST}), "post", 3e-2).empty


def test_the_calibration_of_six_blocks():
    """Post-LN's losses at 300 steps: its benefit is nothing, nothing, a tenth and 0.63 of a nat, and 1e-2 trains at a third."""
    losses = {3e-4: (2.638, 2.696, 2.756), 1e-3: (2.392, 2.419, 2.447), 3e-3: (2.446, 2.368, 2.346), 1e-2: (3.111, 3.070, 2.483)}
    runs = grid({"post": losses}).assign(level_unigram=3.147)
    runs["verdict"] = np.where(runs["loss_effective"] > 3.06, "STUCK", "OK")
    found = by_rate(cells(runs), 3.147)
    np.testing.assert_allclose(found["WB"], [0, 0, 0.100, 0.628], atol=1e-9)
    assert largest_rates(cells(runs))["eta_max"].tolist() == [3e-3, 3e-3, 1e-2]
