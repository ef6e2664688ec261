"""Figures: what is drawn is what the table holds, what failed is on the page and counted, and no display is needed."""

import json
import os
import subprocess
import sys
from itertools import product

import matplotlib
import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from figure_tables import FOUR, UNIGRAM, a_run, found, layers_of, runs_of, words

from normflax.figures.captions import caption_settings, count_failures
from normflax.figures.depth import loss_against_depth
from normflax.figures.export import save
from normflax.figures.layers import by_block, heat_maps
from normflax.figures.style import Plot, context, depth_colours, display_name, styles

# ── style ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_placement_looks_the_same_everywhere():
    fixed = {
        "post": ("#D55E00", "dashed", "s"),
        "pre": ("#0072B2", "solid", "o"),
        "sandwich": ("#009E73", "dashdot", "^"),
        "deepnorm": ("#CC79A7", "dotted", "D"),
    }
    assert styles(FOUR) == fixed
    assert list(styles(["mine", "deepnorm", "pre", "also"])) == ["pre", "deepnorm", "also", "mine"]
    assert {name: styles([name, "mine"])[name] for name in FOUR} == fixed
    assert [display_name(name) for name in (*FOUR, "mine")] == ["Post-LN", "Pre-LN", "Sandwich-LN", "DeepNorm", "mine"]
    plot = loss_against_depth(runs_of())
    for name, look in fixed.items():
        (line,) = [line for line in plot.axes[0].get_lines() if line.get_gid() == f"mean {name}"]
        assert line.get_color() == look[0]


def test_many_series_are_told_apart():
    names = ["post", "pre", *(f"own{i}" for i in range(12))]
    looks = styles(names)
    assert len(set(looks.values())) == 14 and looks == styles(reversed(names))
    plot = loss_against_depth(runs_of(names, depths=(6,), seeds=(0,)))
    (legend,) = plot.legends
    assert len({text.get_text() for text in legend.get_texts()}) == 14
    assert len(set(styles(f"own{i}" for i in range(210)).values())) == 210
    with pytest.raises(ValueError, match="211 series are too many"):
        styles(f"own{i}" for i in range(211))


def test_deep_is_dark():
    light = [sum(matplotlib.colors.to_rgb(colour)) for colour in depth_colours([24, 2, 6]).values()]
    assert list(depth_colours([24, 2, 6])) == [2, 6, 24] and light == sorted(light, reverse=True)


def test_the_users_own_settings_change_nothing():
    with matplotlib.rc_context({"font.size": 30, "text.usetex": True, "svg.fonttype": "path", "axes.grid": True}):
        with context():
            assert not matplotlib.rcParams["axes.grid"]  # not in the style file: a default of matplotlib
            assert matplotlib.rcParams["font.size"] == 8 and not matplotlib.rcParams["text.usetex"]
            assert (matplotlib.rcParams["pdf.fonttype"], matplotlib.rcParams["svg.fonttype"]) == (42, "none")
        assert matplotlib.rcParams["font.size"] == 30


# ── loss against depth ──────────────────────────────────────────────────────────────────────────────────────────────


def test_every_run_is_drawn_and_the_lines_are_means():
    runs = runs_of()
    (axes,) = loss_against_depth(runs).axes
    np.testing.assert_allclose(found(axes, "mean pre"), [[6, 2.36], [16, 2.36]])
    np.testing.assert_allclose(found(axes, "mean post"), [[6, 2.61], [16, (3.13 + 3.14 + UNIGRAM) / 3]])
    np.testing.assert_allclose(found(axes, "stuck post")[:, 1], [3.13, 3.14, 3.15])  # where they are, not capped
    points = np.concatenate([found(axes, f"{drawn} {name}") for drawn in ("trained", "stuck") for name in FOUR])
    assert sorted(points[:, 1]) == sorted(runs["loss_final"])
    near = np.array([6, 16])[np.abs(np.log(points[:, :1] / [6, 16])).argmin(axis=1)]
    assert np.all(np.abs(points[:, 0] / near - 1) < 0.1)
    assert axes.get_xlabel() == "depth (blocks)" and "loss (nats per token)" in axes.get_ylabel()
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["6", "16"]


def test_stuck_is_hollow():
    (axes,) = loss_against_depth(runs_of()).axes
    faces = {line.get_gid(): line.get_markerfacecolor() for line in axes.get_lines()}
    assert faces["stuck post"] == "white" and faces["trained post"] == "#D55E00"


def test_what_diverged_is_at_the_top_edge_and_counted():
    lost = [
        a_run("deepnorm", 16, 3, np.nan, "NONFINITE"),
        a_run("pre", 6, 3, 9.0, "ABOVE_INIT"),  # finite, and far off the scale
        a_run("pre", 16, 3, 2.9, "UNRECOVERED_SPIKE"),
        a_run("sandwich", 16, 3, np.nan, None, loss_effective=np.nan),  # killed: no verdict yet
    ]
    plot = loss_against_depth(pd.concat([runs_of(), pd.DataFrame(lost)], ignore_index=True))
    (axes,) = plot.axes
    marks = {name: found(axes, name) for name in ("diverged deepnorm", "diverged pre", "no result sandwich")}
    assert [len(points) for points in marks.values()] == [1, 2, 1]
    top = axes.transAxes.inverted().transform(axes.transData.transform((1, 3.15)))[1]
    assert all(np.all((points[:, 1] > top) & (points[:, 1] < 1)) for points in marks.values())
    assert axes.get_ylim()[1] < 5
    np.testing.assert_allclose(found(axes, "mean deepnorm")[1], [16, (2.30 + 2.31 + 2.32 + UNIGRAM) / 4])
    np.testing.assert_allclose(found(axes, "mean sandwich")[1], [16, 2.39])
    assert "No finite data: deepnorm-16-3, sandwich-16-3." in plot.caption
    assert (
        "Failed runs: Post-LN 3 of 6 (3 STUCK); Pre-LN 2 of 8 (1 ABOVE_INIT, 1 UNRECOVERED_SPIKE); "
        "Sandwich-LN 0 of 7; DeepNorm 1 of 7 (1 NONFINITE). "
        "Not counted as failed: Sandwich-LN 1 without a verdict."
    ) in plot.caption
    assert {"stuck", "diverged", "no result"} <= set(words(plot))


def test_slow_is_reported_but_did_not_fail():
    runs = pd.DataFrame([a_run(verdict="SLOW"), a_run(seed=1)])
    assert count_failures(runs) == "Failed runs: Pre-LN 0 of 2. Not counted as failed: Pre-LN 1 SLOW."


def test_a_run_with_only_nan_is_drawn():
    plot = loss_against_depth(pd.DataFrame([a_run("post", 6, 0, np.nan, "NONFINITE", level_bigram=np.nan)]))
    assert len(found(plot.axes[0], "diverged post")) == 1 and "No finite data: post-6-0." in plot.caption
    assert "unigram 3.147" in words(plot) and not any("bigram" in word for word in words(plot))


def test_levels_are_labelled():
    plot = loss_against_depth(runs_of())
    assert {"unigram 3.147", "bigram 2.512"} <= set(words(plot))
    assert "unigram 3.147 and bigram 2.512" in plot.caption


def test_a_setting_has_a_panel_of_its_own():
    parts = [
        runs_of(seeds=(0, 1), **{"optim.rate": rate, "schedule.warmup_steps": warmup})
        for rate, warmup in product((1e-3, 3e-3), (0, 75))
    ]
    parts[3]["loss_final"] += 0.1
    parts[3]["loss_effective"] += 0.1
    plot = loss_against_depth(pd.concat(parts, ignore_index=True))
    titles = [axes.get_title() for axes in plot.axes]
    assert titles == [f"rate {rate}, warm-up {w} steps" for rate, w in product((0.001, 0.003), (0, 75))]
    means = [found(axes, "mean pre")[0, 1] for axes in plot.axes]
    np.testing.assert_allclose(means, [2.355, 2.355, 2.355, 2.455])
    assert "A panel for each optim.rate and schedule.warmup_steps." in plot.caption
    other = loss_against_depth(pd.concat([runs_of(), runs_of(**{"coef.alpha": 2.0})], ignore_index=True))
    assert [axes.get_title() for axes in other.axes] == ["coef.alpha 2", "coef.alpha off"]
    texts = [runs_of(**{"data.sha256": sha256}) for sha256 in ("0123456789", "fedcba9876")]
    plot = loss_against_depth(pd.concat(texts, ignore_index=True))
    assert [axes.get_title() for axes in plot.axes] == ["data.sha256 01234567", "data.sha256 fedcba98"]
    killed = pd.concat([texts[0], pd.DataFrame([a_run(seed=3, **{"data.sha256": None})])], ignore_index=True)
    assert len(loss_against_depth(killed).axes) == 1


def test_an_empty_table_is_an_error():
    with pytest.raises(ValueError, match="no runs to draw"):
        loss_against_depth(runs_of().iloc[:0])


def test_a_run_without_a_readable_config_is_named():
    runs = pd.concat([runs_of(depths=(6,)), pd.DataFrame([{"run": "torn", "loss_final": 2.0}])], ignore_index=True)
    plot = loss_against_depth(runs)
    assert len(plot.axes) == 1 and "Not drawn, without a readable config: torn." in plot.caption
    assert "torn." in by_block(layers_of(runs_of(depths=(6,))), runs, "grad_block", 0).caption


# ── captions and files ──────────────────────────────────────────────────────────────────────────────────────────────


def test_the_caption_names_every_setting():
    assert caption_settings(runs_of()) == (
        "Settings: base init xavier_normal, rate 0.001, warm-up 30 steps, constant schedule, 300 steps, 16 windows "
        "a batch, 64 tokens a window, embedding std 1, position std 0.02, width 48, 4 heads, layer norm, "
        "norm eps 1e-06, adam, beta2 0.98, eps 1e-08, weight decay 0, clip off, seeds 0, 1, 2, "
        "data stdlib (sha256 1a2b3c4d)."
    )
    mixed = pd.DataFrame([a_run(), a_run("deepnorm", **{"model.init": "normal", "optim.clip": 1.0, "optim.rate": 3e-3})])
    said = caption_settings(mixed.drop(columns="norm.eps"))
    assert "base init normal(0.02) (DeepNorm) and xavier_normal (Pre-LN), rate 0.001 or 0.003," in said
    assert "clip 1 or off," in said and "norm.eps not recorded," in said and "seed 0," in said
    assert "beta2" not in caption_settings(runs_of(**{"optim.name": "sgd"}))
    assert "8 seeds from 5 to 12," in caption_settings(runs_of(seeds=range(5, 13)))


def every_figure():
    runs = runs_of(("post", "pre"), depths=(16,), seeds=(0, 1))
    layers = layers_of(runs, lambda run, step, block: block / (1 + step), steps=(0, 1, 8))
    return {
        "loss": loss_against_depth(runs),
        "gradient": by_block(layers, runs, "grad_block", 8),
        "maps": heat_maps(layers, runs, "grad_block", 16),
    }


def test_files_hold_the_picture_its_rows_and_the_command(tmp_path):
    command = "python -m experiments.train experiment=depth_stability"
    for name, plot in every_figure().items():
        paths = save(plot, plot.data, tmp_path / "first", name, plot.caption, command)
        assert sorted(paths) == ["csv", "md", "pdf", "png", "svg"]
        assert matplotlib.image.imread(paths["png"]).shape[1] == 2025  # 6.75 in at 300 dpi
        assert command.encode() in paths["png"].read_bytes() and command in paths["svg"].read_text(encoding="utf-8")
        assert command in paths["md"].read_text() and plot.caption in paths["md"].read_text()
        assert "<text" in paths["svg"].read_text(encoding="utf-8") and paths["pdf"].read_bytes().startswith(b"%PDF")
        read = pd.read_csv(paths["csv"])
        assert len(read) == len(plot.data)
        numbers = plot.data.select_dtypes("number").columns
        np.testing.assert_array_equal(read[numbers].to_numpy(float), plot.data[numbers].to_numpy(float))
    again = every_figure()["maps"]
    for path in save(again, again.data, tmp_path / "again", "maps", again.caption, command).values():
        assert path.read_bytes() == (tmp_path / "first" / path.name).read_bytes()


def test_no_display_is_needed_whatever_the_backend(tmp_path):
    runs = runs_of(depths=(6,), seeds=(0,))
    runs.to_pickle(tmp_path / "runs.pkl")
    code = f"""
import json, sys
import normflax.figures
early = [name for name in ("matplotlib", "pandas", "jax") if name in sys.modules]
import pandas as pd
from normflax.figures import depth, export
plot = depth.loss_against_depth(pd.read_pickle("{tmp_path}/runs.pkl"))
export.save(plot, plot.data, "{tmp_path}/there", "loss", plot.caption, "command")
late = [name for name in ("matplotlib.pyplot", "tkinter", "jax", "flax") if name in sys.modules]
print(json.dumps([early, late]))
"""
    hidden = {key: value for key, value in os.environ.items() if key not in ("DISPLAY", "WAYLAND_DISPLAY")}
    env = hidden | {"MPLBACKEND": "TkAgg", "PYTHONHASHSEED": "7"}
    out = subprocess.run([sys.executable, "-W", "error", "-c", code], env=env, capture_output=True, text=True, check=True)
    assert json.loads(out.stdout) == [[], []]
    plot = loss_against_depth(runs)
    for path in save(plot, plot.data, tmp_path / "here", "loss", plot.caption, "command").values():
        assert path.read_bytes() and path.read_bytes() == (tmp_path / "there" / path.name).read_bytes()


def test_thirty_figures_leave_none_open():
    import matplotlib.pyplot as plt

    runs = runs_of(depths=(6,), seeds=(0,))
    assert all(isinstance(loss_against_depth(runs), Plot) for _ in range(30)) and plt.get_fignums() == []


def drawn(plot):
    """Every text of a figure but the labels of ticks that lie outside their axis."""
    texts = {text for text in plot.findobj(matplotlib.text.Text) if text.get_text() and text.get_visible()}
    for axis in (axis for axes in plot.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        texts -= {label for tick in ticks if not low <= tick.get_loc() <= high for label in (tick.label1, tick.label2)}
    return texts


@pytest.mark.parametrize("figure", ["loss", "by_block", "maps"])
def test_no_label_is_clipped_or_covered(figure):
    depths = (2, 4, 6, 8, 12, 16, 24, 96, 100, 1000)
    if figure == "loss":
        lost = [a_run(name, 24, 5, np.nan, "NONFINITE", **{"optim.rate": 3e-3}) for name in FOUR]
        rates = [runs_of(depths=depths, **{"optim.rate": rate}) for rate in (3e-4, 1e-3, 3e-3)]
        plot = loss_against_depth(pd.concat([*rates, pd.DataFrame(lost)], ignore_index=True))
    else:
        runs = runs_of(depths=(6, 16, 24), seeds=(0,))
        steps = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, *range(6, 300, 6), 300)
        values = layers_of(runs, lambda run, *_: 1.0 if run["placement"] == "pre" else np.nan, steps=sorted(set(steps)))
        plot = by_block(values, runs, "grad_block", 0) if figure == "by_block" else heat_maps(values, runs, "grad_block", 24)
    plot.draw_without_rendering()
    boxes = [text.get_window_extent() for text in drawn(plot)]
    boxes = [box for box in boxes if box.width > 1]
    page = plot.bbox
    assert all(box.x0 > page.x0 - 1 and box.x1 < page.x1 + 1 and box.y0 > -1 and box.y1 < page.y1 + 1 for box in boxes)
    pairs = [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.shrunk(0.9, 0.8).overlaps(b.shrunk(0.9, 0.8))]
    assert not pairs
