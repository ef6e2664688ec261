"""Figures of what a probe measured: values off the log scale are marked and counted, and seeds are averaged in logs."""

import re

import numpy as np
import pandas as pd
import pytest
from figure_tables import found, layers_of, runs_of, words

from normflax.figures.layers import by_block, heat_maps

# ── fields by block ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_line_is_the_geometric_mean_over_seeds():
    runs = runs_of(("pre", "post"), depths=(2, 6))
    value = {0: 1.0, 1: 10.0, 2: 100.0}
    layers = layers_of(runs, lambda run, step, block: value[run["seed"]] * block * (1 + step))
    plot = by_block(layers, runs, "grad_block", step=1)
    assert [axes.get_title() for axes in plot.axes] == ["2 blocks, step 1", "6 blocks, step 1"]
    np.testing.assert_allclose(found(plot.axes[1], "mean pre"), [[b, 20 * b] for b in range(1, 7)], rtol=1e-6)
    (band, _) = plot.axes[1].collections
    assert band.get_datalim(plot.axes[1].transData).extents == pytest.approx([1, 2, 6, 1200])
    assert plot.axes[0].get_yscale() == "log" and plot.axes[0].get_xlabel() == "block"
    assert plot.get_supylabel() == "gradient norm of the block's matrices"
    part = plot.data[(plot.data["placement"] == "pre") & (plot.data["model.depth"] == 6)]
    np.testing.assert_allclose(part[["mean", "low", "high"]].iloc[2], [60, 6, 600], rtol=1e-6)


def test_states_are_read_at_the_ends_of_blocks():
    runs = runs_of(("pre",), depths=(3,), seeds=(0,))
    states = pd.concat([layers_of(runs, field="variance", steps=(0,)).iloc[:1]] * 7, ignore_index=True)
    states = states.assign(sublayer=range(7), block=[0, 1, 1, 2, 2, 3, 3], value=[1.0, 2, 4, 8, 16, 32, 64])
    plot = by_block(states, runs, "variance", step=0)
    np.testing.assert_allclose(found(plot.axes[0], "mean pre"), [[0, 1], [1, 4], [2, 16], [3, 64]])
    assert plot.axes[0].get_xlabel() == "block (0 = embedding)" and plot.get_supylabel() == "residual variance"


def test_values_off_the_log_scale_are_marked_and_counted():
    runs = runs_of(("post", "pre"), depths=(6,), seeds=(0, 1))
    odd = {("post", 0, 1): 0.0, ("post", 1, 1): 0.0, ("post", 0, 2): -1.0, ("pre", 0, 3): np.nan, ("pre", 1, 4): np.inf}
    layers = layers_of(runs, lambda run, _, block: odd.get((run["placement"], run["seed"], block), 5.0))
    plot = by_block(layers, runs, "grad_block", step=0)
    (axes,) = plot.axes
    above, below = found(axes, "top pre"), found(axes, "bottom post")
    assert list(above[:, 0]) == [3, 4] and list(below[:, 0]) == [1, 2]
    assert above[0, 1] > 0.9 and below[0, 1] < 0.1 and {"NaN, inf", "≤ 0"} <= set(words(plot))
    assert "Values off the log scale: Post-LN 2 zero, 1 negative; Pre-LN 1 NaN, 1 infinite." in plot.caption
    post = found(axes, "mean post")
    assert np.isnan(post[0, 1]) and post[1, 1] == pytest.approx(5)  # both seeds zero; one seed negative


def test_a_placement_without_finite_data_is_named():
    runs = runs_of(("post", "pre"), depths=(6,), seeds=(0,))
    layers = layers_of(runs, lambda run, *_: np.nan if run["placement"] == "post" else 1.0)
    plot = by_block(layers, runs, "grad_block", step=0)
    assert plot.axes[0].get_title() == "6 blocks, step 0\nno finite data: Post-LN" and len(found(plot.axes[0], "top post")) == 6
    assert "No finite data: post-6-0." in plot.caption
    silent = by_block(layers.assign(value=np.float32(np.nan)), runs, "grad_block", step=0)
    assert "no finite data: Post-LN, Pre-LN" in silent.axes[0].get_title()
    ended = layers[(layers["run"] != "post-6-0") | (layers["step"] < 300)]  # a run that ended before step 300
    assert "No finite data: post-6-0." in by_block(ended, runs, "grad_block", step=300).caption


def test_what_cannot_be_drawn_is_said_in_a_sentence():
    runs = runs_of(("pre",), depths=(2,))
    layers = layers_of(runs)
    with pytest.raises(ValueError, match=re.escape("step 7 of 'grad_block' was not logged: the steps are 0, 1, 300")):
        by_block(layers, runs, "grad_block", step=7)
    with pytest.raises(ValueError, match="did you mean 'grad_block'"):
        by_block(layers, runs, "grad_blok", step=0)
    with pytest.raises(ValueError, match="no probe was recorded"):
        by_block(layers.iloc[:0], runs, "grad_block", step=0)
    with pytest.raises(ValueError, match="no run has 4 blocks: the depths are 2"):
        heat_maps(layers, runs, "grad_block", depth=4)
    roles = pd.concat([layers.assign(site=site, field="grad_matrix") for site in ("q", "down")])
    with pytest.raises(ValueError, match="several rows a block: select one of site down, q"):
        by_block(roles, runs, "grad_matrix", step=0)
    down = by_block(roles[roles["site"] == "down"], runs, "grad_matrix", step=0)
    assert down.get_supylabel() == "gradient norm of the matrix (down)"
    with pytest.raises(ValueError, match="the runs table holds pre-2-0, pre-2-1, pre-2-2 more than once"):
        by_block(layers, pd.concat([runs, runs]), "grad_block", step=0)
    rates = pd.concat([runs, runs_of(("pre",), depths=(2,), **{"optim.rate": 3e-3})], ignore_index=True)
    with pytest.raises(ValueError, match=re.escape("runs of 2 blocks differ in rate 0.001 or 0.003: select one")):
        by_block(layers_of(rates), rates, "grad_block", step=0)


# ── heat maps ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_map_holds_the_table_on_one_scale():
    runs = runs_of(("post", "pre"), depths=(2, 3), seeds=(0, 1))
    layers = layers_of(runs, lambda run, step, block: {0: 1, 1: 4}[run["seed"]] * block * (step + 1.0), steps=(0, 2, 9))
    plot = heat_maps(layers, runs, "grad_block", depth=3)
    post, pre, bar = plot.axes
    expected = 2 * np.outer([1, 2, 3], [1, 3, 10])
    for axes in (post, pre):
        (mesh,) = axes.collections
        np.testing.assert_allclose(np.asarray(mesh.get_array()).reshape(3, 3), expected, rtol=1e-6)
        assert mesh.norm.vmin == pytest.approx(2) and mesh.norm.vmax == pytest.approx(60)
    assert [axes.get_title() for axes in (post, pre)] == ["Post-LN, 3 blocks", "Pre-LN, 3 blocks"]
    assert list(post.get_xticks()) == [0, 1, 2] and [t.get_text() for t in post.get_xticklabels()] == ["0", "2", "9"]
    assert bar.get_ylabel() == "gradient norm of the block's matrices" and not plot.legends


def test_gaps_in_a_map_are_hatched_and_counted():
    runs = runs_of(("post", "pre"), depths=(3,), seeds=(0, 1))
    layers = layers_of(runs, lambda run, *_: 1.0 + run["seed"])
    post = layers["run"].str.startswith("post")
    layers = layers[~(post & (layers["step"] == 300))]  # both seeds ended before step 300
    layers.loc[(layers["run"] == "pre-3-1") & (layers["step"] == 1) & (layers["block"] > 1), "value"] = np.inf
    plot = heat_maps(layers, runs, "grad_block", depth=3)
    cells = np.ma.getmaskarray(plot.axes[0].collections[0].get_array()).reshape(3, 3)
    np.testing.assert_array_equal(cells, [[False, False, True]] * 3)
    assert plot.axes[0].patch.get_hatch()
    (patch,) = plot.axes[1].patches
    assert patch.get_bbox().bounds == (0.5, 1.5, 1, 2) and patch.get_hatch()
    assert np.asarray(plot.axes[1].collections[0].get_array()).reshape(3, 3)[1, 1] == 1.0  # the seed that is left
    assert "no finite positive value: Post-LN 3 of 9 cells." in plot.caption
    assert "some seeds have none: Pre-LN 2 of 9 cells. Values off the log scale: Pre-LN 2 infinite." in plot.caption
    assert {"no finite data", "some seeds without"} <= set(words(plot))


def test_a_map_of_nothing_is_drawn():
    runs = runs_of(("post", "pre"), depths=(3,), seeds=(0,))
    plot = heat_maps(layers_of(runs, lambda run, *_: np.nan if run["placement"] == "post" else 1.0), runs, "grad_block", 3)
    assert [axes.get_title() for axes in plot.axes[:2]] == ["Post-LN, 3 blocks: no finite data", "Pre-LN, 3 blocks"]
    assert "No finite data: post-3-0." in plot.caption
    assert len(heat_maps(layers_of(runs, lambda *_: np.nan), runs, "grad_block", 3).axes) == 2  # and no colour bar
