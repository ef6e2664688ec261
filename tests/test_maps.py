"""Rate against warm-up: what the cells say, where the boundary runs, and that nothing failed unseen."""

from itertools import product

import numpy as np
import pandas as pd
import pytest
from figure_tables import UNIGRAM, a_run, words
from matplotlib.patches import Rectangle

from normflax.figures.maps import loss_against_warmup, warmup_maps

RATES, WARMUPS = (1e-3, 3e-3, 1e-2), (0, 30, 100)


def runs_of(losses=lambda placement, rate, warmup, seed: 2.3, placements=("post", "pre"), seeds=(0, 1)) -> pd.DataFrame:
    rows = []
    for placement, rate, warmup, seed in product(placements, RATES, WARMUPS, seeds):
        loss = losses(placement, rate, warmup, seed)
        if loss is not None:
            verdict = "OK" if loss < 3 else "STUCK"
            rows.append(a_run(placement, 6, seed, loss, verdict, **{"optim.rate": rate, "schedule.warmup_steps": warmup}))
    return pd.DataFrame(rows)


def as_expected(placement, rate, warmup, seed):
    """Post-LN fails at 1e-2 without a long warm-up, and one seed of it in the middle."""
    if placement == "post" and rate == 1e-2 and warmup < 100:
        return UNIGRAM + 0.01
    if (placement, rate, warmup, seed) == ("post", 3e-3, 0, 1):
        return UNIGRAM + 0.01
    return 2.3 + 0.1 * (rate == 1e-3)


def cells_of(axes):
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


def boundary(axes):
    return {tuple(map(tuple, line.get_xydata())) for line in axes.get_lines() if line.get_gid() == "boundary"}


def test_a_map_shows_every_cell_its_loss_and_its_failures():
    plot = warmup_maps(runs_of(as_expected))
    post, pre = plot.axes[:2]
    assert (post.get_title(), pre.get_title()) == ("Post-LN", "Pre-LN")
    assert len(cells_of(post)) == len(cells_of(pre)) == 9
    hatched = {patch.get_xy() for patch in cells_of(post) if patch.get_hatch()}
    assert hatched == {(1.5, -0.5), (1.5, 0.5), (0.5, -0.5)} and not any(patch.get_hatch() for patch in cells_of(pre))
    said = words(plot)
    assert said.count(f"{UNIGRAM:.2f}\n2/2 failed") == 2 and f"{(2.3 + UNIGRAM) / 2:.2f}\n1/2 failed" in said
    assert said.count("2.40") == 6 and "held-out loss above the lowest (nats per token)" in said


def test_the_boundary_runs_between_what_trains_and_what_does_not():
    plot = warmup_maps(runs_of(as_expected))
    # Failing: (rate 1e-2, none), (1e-2, 30) and (3e-3, none); x is the rate, y the warm-up.
    expected = {((1.5, 0.5), (1.5, 1.5)), ((1.5, 1.5), (2.5, 1.5)), ((0.5, -0.5), (0.5, 0.5)), ((0.5, 0.5), (1.5, 0.5))}
    assert boundary(plot.axes[0]) == expected and not boundary(plot.axes[1])


def test_colours_mean_the_same_in_every_panel():
    plot = warmup_maps(runs_of(as_expected))
    post, pre = ({patch.get_xy(): patch.get_facecolor() for patch in cells_of(axes)} for axes in plot.axes[:2])
    assert post[(-0.5, -0.5)] == pre[(-0.5, -0.5)] != pre[(0.5, -0.5)]


def test_a_cell_without_a_run_is_empty():
    plot = warmup_maps(runs_of(lambda placement, rate, warmup, seed: None if (rate, warmup) == (1e-2, 30) else 2.3))
    assert len(cells_of(plot.axes[0])) == 8 and not boundary(plot.axes[0])


def test_where_everything_fails_nothing_has_a_colour():
    plot = warmup_maps(runs_of(lambda *_: UNIGRAM + 0.01, placements=("post",)))
    assert all(patch.get_hatch() for patch in cells_of(plot.axes[0])) and "Post-LN 18 of 18 (18 STUCK)" in plot.caption


def test_captions_name_the_settings_and_count_the_failures():
    plot = warmup_maps(runs_of(as_expected))
    assert "Post-LN 5 of 18 (5 STUCK)" in plot.caption and "Pre-LN 0 of 18" in plot.caption
    assert "rate 0.001 or 0.003 or 0.01" in plot.caption and "beta2 0.98" in plot.caption
    assert len(plot.data) == 18 and {"excess", "failed", "trains"} <= set(plot.data)


def test_curves_draw_every_run_and_its_failure():
    plot = loss_against_warmup(runs_of(as_expected))
    assert [axes.get_title() for axes in plot.axes] == [f"peak rate {rate:g}" for rate in RATES]
    last = plot.axes[2]
    markers = {
        gid: [line.get_xydata()[0] for line in last.get_lines() if line.get_gid() == gid] for gid in ("failed post", "trained post")
    }
    assert len(markers["failed post"]) == 4 and len(markers["trained post"]) == 2
    np.testing.assert_allclose([y for _, y in markers["failed post"]], UNIGRAM)
    (mean,) = (line for line in last.get_lines() if line.get_gid() == "mean post")
    np.testing.assert_allclose(mean.get_ydata(), [UNIGRAM, UNIGRAM, 2.3])
    assert len(plot.data) == 36


def test_a_run_that_left_no_loss_is_named():
    runs = runs_of(as_expected)
    runs.loc[0, ["verdict", "loss_final", "loss_effective"]] = ["NONFINITE", np.nan, UNIGRAM]
    for draw in (warmup_maps, loss_against_warmup):
        plot = draw(runs)
        assert f"No finite data: {runs['run'][0]}." in plot.caption and "1 NONFINITE" in plot.caption


def test_no_runs_are_an_error():
    with pytest.raises(ValueError, match="no runs to draw"):
        warmup_maps(pd.DataFrame(columns=runs_of().columns))
