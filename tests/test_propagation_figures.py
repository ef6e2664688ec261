"""Figures of models at initialisation: panels, lines and intervals are those of the table, and a part of the sweep is drawn too."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
from figure_tables import words
from initial_tables import field, ladder, models, scale, table
from scipy import stats

from experiments import signal
from normflax.analysis.initial import total
from normflax.analysis.propagation import rows
from normflax.figures.coordinates import coordinates
from normflax.figures.propagation import THEORY, over_blocks, over_depth, over_seeds
from normflax.figures.style import PLACEMENTS

FOUR = ("post", "pre", "sandwich", "deepnorm")


def series(axes, placement):
    """The points of the line and of the crosses of one placement, and of the theory line that follows them: [x, y] each."""
    lines = axes.get_lines()
    first = next(i for i, line in enumerate(lines) if line.get_color() == PLACEMENTS[placement].colour)
    mine = [lines[first], *([lines[first + 1]] if lines[first + 1].get_marker() == "x" else [])]
    theory = lines[first + len(mine)]
    assert theory.get_color() == THEORY["color"]
    return [line.get_xydata() for line in (*mine, theory)]


def band(axes, index):
    """The lower and the upper end of a band at every x."""
    points = axes.collections[index].get_paths()[0].vertices
    return {x: (ys.min(), ys.max()) for x in np.unique(points[:, 0]) if len(ys := points[points[:, 0] == x, 1])}


# ── Over seeds ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_row_is_a_mean_of_logs_its_interval_and_the_root_mean_square():
    values = np.array([1.0, 2.0, 4.0, 32.0])
    runs = ladder(("pre",), (1,))
    layers = field(runs, "grad_block", lambda at, seed: values[seed], theory=lambda at, seed: 7.0, seeds=range(4))
    (row,) = over_seeds(rows(layers, runs, "grad_block"), ["placement", "block"]).to_dict("records")
    low, high = stats.t.interval(0.95, 3, loc=np.log(values).mean(), scale=stats.sem(np.log(values)))
    assert row["mean"] == pytest.approx(4.0) and row["rms"] == pytest.approx(np.sqrt((values**2).mean()))
    assert (row["low"], row["high"]) == pytest.approx((np.exp(low), np.exp(high)))
    assert (row["theory"], row["seeds"]) == (7, 4)


def test_one_seed_has_no_interval_and_no_theory_is_nan():
    runs = ladder(("pre",), (1,))
    (row,) = over_seeds(field(runs, "grad_block", lambda at, seed: 3.0, seeds=(0,)), ["block"]).to_dict("records")
    assert (row["mean"], row["rms"], row["seeds"]) == pytest.approx((3.0, 3.0, 1))
    assert np.isnan([row["low"], row["high"], row["theory"]]).all()


@pytest.mark.parametrize("odd", [0.0, -1.0, np.nan, np.inf])
def test_a_seed_without_a_logarithm_is_left_out_and_not_counted(odd):
    runs = ladder(("pre",), (2,))
    layers = field(runs, "grad_block", lambda at, seed: odd if at == 2 and seed < 2 else 5.0, seeds=(0, 1, 2))
    found = over_seeds(layers, ["block"])
    assert found["seeds"].tolist() == [3, 1] and found["mean"].tolist() == pytest.approx([5, 5])
    panels = {"one": rows(layers, runs, "grad_block")}
    assert "Left out: 2 values that are no positive numbers." in over_blocks(panels, runs, "size", log_x=True, rms=False).caption
    nothing = over_seeds(layers[(layers["block"] == 2) & (layers["seed"] < 2)], ["block"])
    assert nothing["seeds"].tolist() == [0] and nothing["mean"].isna().all()


def test_two_runs_are_no_seeds_of_one_model():
    runs = ladder(("pre",), (1, 2))
    with pytest.raises(ValueError, match="would count as one model"):
        over_seeds(field(runs, "grad_block", lambda at, seed: 1.0), ["block"])


# ── Over blocks and over depth ──────────────────────────────────────────────────────────────────────────────────────


def gradient(runs, seeds=(0, 1), theory=lambda at, seed: 2 * at**-0.5):
    return field(runs, "grad_block", lambda at, seed: scale(seed) * at**-0.5, theory, seeds)


def test_over_blocks_draws_the_table_and_theory():
    runs = ladder(("pre", "post"), (16,))
    layers = gradient(runs)
    found = rows(layers, runs, "grad_block")
    plot = over_blocks({"both": found, "Pre-LN": found[found["placement"] == "pre"]}, runs, "gradient", log_x=True, rms=True)
    assert [axes.get_title() for axes in plot.axes] == ["both", "Pre-LN"] and plot.get_supylabel() == "gradient"
    assert [len(axes.get_lines()) for axes in plot.axes] == [6, 3] and [len(axes.collections) for axes in plot.axes] == [2, 1]
    x = np.arange(1, 17)
    mean, cross, theory = series(plot.axes[0], "pre")
    np.testing.assert_allclose(mean, np.stack([x, x**-0.5], 1), rtol=1e-6)
    np.testing.assert_allclose(theory, np.stack([x, 2 * x**-0.5], 1), rtol=1e-6)
    np.testing.assert_allclose(cross[:, 1], np.sqrt(np.cosh(2)) * cross[:, 0] ** -0.5, rtol=1e-6)
    half = np.exp(stats.t.ppf(0.975, 1))  # the logs are -1 and 1: their standard error is 1
    assert band(plot.axes[0], 0)[4] == pytest.approx((0.5 / half, 0.5 * half), rel=1e-5)
    assert {(a.get_xscale(), a.get_yscale(), a.get_xlabel()) for a in plot.axes} == {("log", "log", "block")}
    assert {"theory", "rms over seeds", "Pre-LN", "Post-LN"} <= set(words(plot))
    assert plot.data.columns.tolist() == ["placement", "block", "mean", "low", "high", "rms", "theory", "seeds", "panel"]
    assert len(plot.data) == 48 and set(plot.data["seeds"]) == {2}


def test_the_embedding_is_block_0_and_has_no_place_on_a_log_axis():
    runs = ladder(("pre",), (2,))
    panels = {"one": rows(field(runs, "second_moment", lambda at, seed: 1 + at), runs, "second_moment")}
    linear, log = (over_blocks(panels, runs, "size", log_x=log_x, rms=False) for log_x in (False, True))
    np.testing.assert_allclose(series(linear.axes[0], "pre")[0], [[0, 1], [1, 2], [2, 3]])
    assert linear.axes[0].get_xlabel() == "block (0 = embedding)" and linear.axes[0].get_xscale() == "linear"
    np.testing.assert_allclose(series(log.axes[0], "pre")[0], [[1, 2], [2, 3]])


def test_over_depth_draws_the_table_theory_and_the_slopes():
    runs = ladder(("pre", "post"), (8, 32))
    found = total(runs, gradient(runs, theory=lambda at, seed: 1.0))
    slopes = {"a": {"pre": (0.125, 0.034), "post": (-0.5, float("nan"))}}
    plot = over_depth({"a": found}, runs, "gradient", slopes, rms=True)
    mean, cross, theory = series(plot.axes[0], "post")
    harmonic = [np.sqrt((1 / np.arange(1, depth + 1)).sum()) for depth in (8, 32)]
    np.testing.assert_allclose(mean, np.stack([[8, 32], harmonic], 1), rtol=1e-6)
    np.testing.assert_allclose(cross, np.stack([[8, 32], np.sqrt(np.cosh(2)) * np.array(harmonic)], 1), rtol=1e-6)
    np.testing.assert_allclose(theory, [[8, np.sqrt(8)], [32, np.sqrt(32)]], rtol=1e-6)
    assert [label.get_text() for label in plot.axes[0].get_xticklabels()] == ["8", "32"]
    assert "slope\nPost-LN: -0.50\nPre-LN: +0.12 ± 0.03" in words(plot)
    assert "Slopes are of the mean log" in plot.caption and len(plot.data) == 4


def test_a_caption_names_what_is_shown_and_every_setting():
    other = {"placement": "post", "model.depth": 6, "probe.seeds": 3, "data.name": "stdlib"}
    runs = models({"model.depth": 4, "model.mask": "bidirectional"}, other)
    found = rows(gradient(runs, theory=None), runs, "grad_block")
    plot = over_blocks({"one": found}, runs, "gradient", log_x=True, rms=False, note="Read at dawn.")
    assert plot.caption == (
        "Gradient against block, before any update. Lines: geometric mean over seeds, with the 95 % interval of that mean."
        " Read at dawn. Settings: 4 and 6 blocks, base init xavier_normal, width 64, 4 heads, relu FFN, 4 times as wide,"
        " layer norm, norm eps 1e-08, embedding std 1, position std 0.02, bidirectional and causal mask, 4 sequences, of 32 tokens,"
        " data copy and stdlib, 3 and 8 seeds."
    )
    assert "theory" not in words(plot)  # none of these models has one
    both = over_blocks({"one": rows(gradient(runs), runs, "grad_block")}, runs, "gradient", log_x=True, rms=True)
    assert "Dashed: theory" in both.caption and "Crosses: root mean square" in both.caption


# ── The coordinate check ────────────────────────────────────────────────────────────────────────────────────────────


def trained(placements=("pre", "post"), depths=(4, 16), seeds=(0, 1)):
    """Runs of two updates whose last block's output is depth·(1 + step), and its change step/depth."""
    one = {"train.steps": 2, "probe.seeds": 1}
    runs = models(*({"placement": p, "model.depth": d, "seed": s} | one for p in placements for d in depths for s in seeds))
    parts = []
    for _, run in runs.groupby("run"):
        (depth,), (seed,) = run["model.depth"], run["seed"]
        for step in (0, 1, 2):
            laws = {"mean_abs": partial(last_output, depth, step), "mean_abs_change": partial(last_change, depth, step)}
            parts += [field(run, name, law, None, (seed,), step=step) for name, law in laws.items()]
    return runs, table(*parts)


def last_output(depth, step, at, seed):
    return scale(seed) * depth * (1 + step) if at == depth else 1e3


def last_change(depth, step, at, seed):
    return step / depth


def test_coordinates_are_the_last_blocks_after_every_step():
    runs, layers = trained()
    plot = coordinates(layers, runs)
    assert [axes.get_title() for axes in plot.axes] == ["Post-LN", "Pre-LN"]
    for axes in plot.axes:
        drawn = {
            (line.get_linestyle(), *map(float, np.round(line.get_ydata(), 5))) for line in axes.get_lines() if len(line.get_xdata())
        }
        assert drawn == {("-", 4, 16), ("-", 8, 32), ("-", 12, 48), ("--", 0.25, 0.0625), ("--", 0.5, 0.125)}  # no change at step 0
    assert (
        "Geometric mean over 2 seeds" in plot.caption and "adam at rate 0.001" in plot.caption and "4 and 16 blocks" in plot.caption
    )
    assert "1 seeds" not in plot.caption and {"after 0 updates", "after 2 updates"} <= set(words(plot))
    cell = plot.data[(plot.data["placement"] == "pre") & (plot.data["field"] == "mean_abs") & (plot.data["step"] == 1)]
    assert cell["mean"].tolist() == pytest.approx([8, 32]) and set(cell["seeds"]) == {2}


def test_coordinates_that_nobody_recorded_are_a_sentence():
    runs, layers = trained(("pre",), (4,))
    with pytest.raises(ValueError, match="no run recorded mean_abs"):
        coordinates(layers.iloc[:0], runs)


# ── The experiment signal ───────────────────────────────────────────────────────────────────────────────────────────


def plain(placements=FOUR, seeds=(0, 1)):
    """The ladder of the sweep, small."""
    runs = ladder(placements, (8, 16, 32, signal.DEPTH))

    def grow(at, seed):
        return scale(seed) * (1 + at)

    down = field(runs, "grad_matrix", grow, grow, seeds, site="down")
    return runs, table(
        gradient(runs, seeds), down, field(runs, "grad_rms", grow, grow, seeds), field(runs, "amplification", grow, None, seeds)
    )


ARMS = {"gradient_by_block", "activation_gradient"}
LADDER = {"last_ffn_gradient", "total_gradient", "amplification", "amplification_by_block"}


@pytest.mark.parametrize("seeds", [(0, 1), (0,)])
def test_signal_draws_what_there_is(seeds):
    runs, layers = plain(("pre", "lns"), seeds)
    drawn = signal.figures(runs, layers)
    assert set(drawn) == ARMS | LADDER
    assert drawn["gradient_by_block"].axes[0].get_title() == "causal, softmax"
    assert len(drawn["amplification_by_block"].data) == 2 * signal.DEPTH and "64 blocks" in drawn["amplification_by_block"].caption
    assert (
        "8, 16, 32 and 64 blocks" in drawn["total_gradient"].caption and "Fit: 8 to 128 blocks" in drawn["total_gradient"].caption
    )
    cells = signal.tables(runs, layers)["slopes_over_depth"].set_index("placement")
    assert cells.index.tolist() == ["lns", "pre"]
    slope = np.polyfit(np.log([8, 16, 32, 64]), np.log([9, 17, 33, 65]), 1)[0]
    assert cells.loc["pre", "gradient of the last W_2"] == f"{slope:+.3f}" + " ± 0.000" * (len(seeds) > 1)


def test_signal_shows_every_arm_in_a_panel_of_its_own():
    runs, layers = plain(("pre",))
    others = models(*({"model.depth": signal.DEPTH} | one for one in ({"model.mask": "bidirectional"}, {"data.name": "stdlib"})))
    grown = models(*({"model.depth": d, "model.width": w, "model.init": "lecun"} for d, w in ((16, 64), (8, 32), (24, 64))))
    cosine = field(grown.iloc[2:], "token_cosine", lambda at, s: 0.25, lambda at, s: 0.5)
    layers = table(layers, gradient(others), field(grown.iloc[:2], "second_moment", lambda at, s: 1 + at), cosine)
    drawn = signal.figures(pd.concat([runs, others, grown], ignore_index=True), layers)
    assert set(drawn) == ARMS | LADDER | {"growth", "tokens_apart"}
    titles = {name: [axes.get_title() for axes in plot.axes] for name, plot in drawn.items()}
    assert titles["gradient_by_block"] == ["causal, softmax", "bidirectional, softmax", "causal, real text"]
    assert titles["activation_gradient"] == ["causal, softmax"]  # the others recorded none
    assert "stdlib" in drawn["gradient_by_block"].caption and "stdlib" not in drawn["activation_gradient"].caption
    assert titles["growth"] == ["8 blocks of width 32", "16 blocks of width 64"] and titles["tokens_apart"] == ["causal"]
    assert "8 and 16 blocks" in drawn["growth"].caption and "width 32 and 64" in drawn["growth"].caption
    mean, theory = series(drawn["tokens_apart"].axes[0], "pre")
    assert set(mean[:, 1]) == {0.75} and set(theory[:, 1]) == {0.5} and mean[:, 0].tolist() == list(range(25))


def test_a_ladder_of_two_rungs_is_not_drawn():
    runs, layers = plain(("pre", "post"))
    runs = runs[(runs["placement"] == "pre") | (runs["model.depth"] < 32)]
    drawn = signal.figures(runs, layers)
    assert set(drawn["total_gradient"].data["placement"]) == {"pre"}
    assert set(signal.tables(runs, layers)["slopes_over_depth"]["placement"]) == {"pre"}


def test_signal_draws_the_coordinate_check_where_it_was_recorded():
    runs, layers = trained(("pre",))
    assert set(signal.figures(runs, layers)) == {"coordinate_check"}
    assert signal.tables(runs, layers)["slopes_over_depth"].empty
    others, seen = plain(("pre",))
    both = pd.concat([runs, others], ignore_index=True)
    assert "coordinate_check" not in signal.figures(both, seen) and "coordinate_check" in signal.figures(both, table(layers, seen))


def test_a_sweep_of_nothing_that_is_shown_is_a_sentence():
    runs = models({"model.depth": 3})
    with pytest.raises(ValueError, match="none of these runs is at initialisation in a setting that the figures show"):
        signal.figures(runs, gradient(runs))


def test_signal_shows_the_expected_gradient_beside_that_of_one_batch():
    runs = models({"model.depth": 6}, {"model.depth": 6, "placement": "post"})
    one, mean = (field(runs, name, lambda at, s, v=v: v, site="down") for name, v in (("grad_matrix", 2.0), ("grad_expected", 0.5)))
    plot = signal.figures(runs, table(one, mean))["expected_gradient"]
    assert [axes.get_title() for axes in plot.axes] == ["one batch, 6 blocks", "mean over 32 batches, 6 blocks"]
    assert plot.data.groupby("panel")["mean"].first().to_dict() == pytest.approx(
        {"one batch, 6 blocks": 2.0, "mean over 32 batches, 6 blocks": 0.5}
    )
    assert "expected_gradient" not in signal.figures(*plain(("pre",)))
