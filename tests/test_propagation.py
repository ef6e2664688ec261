"""What is measured of models at initialisation: arms, laws over blocks and depths, and each statistic where its value is known."""

import numpy as np
import pandas as pd
import pytest
from initial_tables import field, ladder, models, scale, table

from experiments import signal
from normflax.analysis import initial
from normflax.analysis.claims import NOT_TESTED, judge
from normflax.analysis.propagation import arm, by_depth, by_seed, first_fitted, last_block, log_slope, rows, totals

# ── Arms and rows ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_arm_is_the_plain_one_but_for_what_is_named():
    odd = [{"model.mask": "bidirectional"}, {"coef.qk_gain": 0.0}, {"data.name": "stdlib"}, {"train.steps": 4}, {"state": "failed"}]
    runs = models({}, *odd, {"model.depth": 6}, {"model.init": "lecun"}, {"model.ffn_ratio": 1.0})
    assert list(arm(runs).index) == [0, 6]
    assert list(arm(runs, model__mask="bidirectional").index) == [1]
    assert list(arm(runs, coef__qk_gain=0).index) == [2]  # and None, the plain value, is an empty cell
    assert list(arm(runs, model__depth=(6, 14)).index) == [6]
    assert list(arm(runs, train__steps=4).index) == [4] and arm(runs, model__depth=7).empty


def test_an_arm_has_the_commonest_width_unless_one_is_given():
    runs = models({}, {"model.depth": 4}, {"model.width": 128}, {"model.width": 128, "model.init": "lecun"}, {"model.width": 32})
    assert list(arm(runs).index) == [0, 1]
    assert list(arm(runs, model__width=128).index) == [2] and list(arm(runs, model__width=(32, 128)).index) == [2, 4]
    assert list(arm(runs, model__init="lecun").index) == [3]  # commonest within the arm


def test_states_are_read_at_the_ends_of_blocks():
    runs = ladder(("pre",), (2,))
    found = rows(field(runs, "second_moment", lambda at, seed: 10 * at + seed), runs, "second_moment")
    assert found["block"].tolist() == [0, 1, 2, 0, 1, 2] and found["seed"].tolist() == [0, 0, 0, 1, 1, 1]
    assert found["value"].tolist() == [0, 10, 20, 1, 11, 21]
    blocks, values = by_seed(found, "pre")
    assert blocks.tolist() == [0, 1, 2] and values.tolist() == [[0, 10, 20], [1, 11, 21]]
    assert by_seed(found, "post")[1].size == 0


def test_rows_are_of_one_field_one_site_and_these_runs():
    runs = ladder(("pre", "post"), (2, 3))
    layers = table(
        *(field(runs, "grad_matrix", lambda at, seed, by=by: by * at, site=site) for by, site in ((1, "up"), (10, "down"))),
        field(runs, "grad_block", lambda at, seed: 0.5),
    )
    found = rows(layers, runs[runs["placement"] == "pre"], "grad_matrix", site="down")
    assert set(found["placement"]) == {"pre"} and found["value"].tolist() == [10, 20, 10, 20, 10, 20, 30, 10, 20, 30]
    depths, last = by_depth(last_block(found), "pre")
    assert depths.tolist() == [2, 3] and last.tolist() == [[20, 30], [20, 30]]
    assert by_seed(found, "pre", depth=3)[0].tolist() == [1, 2, 3]


def test_a_model_that_is_there_twice_is_refused():
    """Its seeds would count twice, and every interval would be too narrow; or another setting would be averaged in."""
    runs = models({"model.depth": 2}, {"model.depth": 2, "norm.kind": "rms"})
    with pytest.raises(ValueError, match=r"pre-2-\d+ and pre-2-\d+ would count as one model"):
        rows(field(runs, "grad_block", lambda at, seed: 1.0), runs, "grad_block")


def test_totals_are_root_sums_of_squares():
    runs = ladder(("pre",), (2, 3))
    layers = field(runs, "grad_block", lambda at, seed: (seed + 1) * (3.0, 4.0, 12.0)[int(at) - 1], theory=lambda at, seed: 2.0)
    found = totals(rows(layers, runs, "grad_block"))
    assert by_depth(found, "pre")[1].tolist() == [[5, 13], [10, 26]]
    assert by_depth(found, "pre", "theory")[1] == pytest.approx(np.array([[np.sqrt(8), np.sqrt(12)]] * 2))


def test_a_total_of_which_a_block_is_unknown_is_unknown():
    runs = ladder(("pre",), (2,))
    layers = field(runs, "grad_block", lambda at, seed: 1.0 if at + seed < 3 else np.nan)
    found = totals(rows(layers, runs, "grad_block"))
    assert found["value"].tolist() == pytest.approx([np.sqrt(2), np.nan], nan_ok=True) and found["theory"].isna().all()


@pytest.mark.parametrize("power", [-0.5, 1.0, 0.0])
def test_the_slope_of_a_power_law_is_its_power(power):
    x = np.arange(1, 65)
    values = np.stack([scale(seed) * x.astype(float) ** power for seed in range(3)])
    assert log_slope(x, values) == pytest.approx(power, abs=1e-12)
    bent = np.where((x < 8) | (x > 32), 1e3, values)
    assert log_slope(x, bent, least=8, most=32) == pytest.approx(power, abs=1e-12)


def test_a_slope_is_fitted_to_the_mean_of_the_logs():
    x = np.array([1, 2, 4])
    assert log_slope(x, np.array([[1.0, 2, 4], [1.0, 8, 64]])) == pytest.approx(2)  # the mean of 1 and 3


def test_a_fit_over_blocks_starts_where_the_bottom_has_settled():
    assert [first_fitted(depth) for depth in (16, 64, 256)] == [4, 4, 16]


# ── Statistics ──────────────────────────────────────────────────────────────────────────────────────────────────────

LECUN = {"model.init": "lecun"}
BOTH_WAYS = {"model.mask": "bidirectional"}
WIDE = {"model.width": 128}


def deep(placement, law, name="second_moment", theory=None, depth=64, site=None, **settings):
    runs = ladder((placement,), (depth,), **settings)
    return runs, field(runs, name, law, theory, site=site)


def over_depth(placement, law, name, depths=(4, 8, 16, 32), site=None, **settings):
    """A rung each, on which every block has the value of the depth."""
    runs = ladder((placement,), depths, **settings)
    return runs, table(
        *(field(runs[runs["model.depth"] == d], name, lambda at, seed, d=d: law(d, seed), site=site) for d in depths)
    )


def joined(*parts):
    return pd.concat([runs for runs, _ in parts], ignore_index=True), table(*(layers for _, layers in parts))


LAST = {"name": "grad_matrix", "site": "down"}
KNOWN = {
    "theory is right": (
        initial.pre_theory_error,
        deep("pre", lambda at, s: (1 + at) * scale(s), theory=lambda at, s: 1 + at, **LECUN),
        0,
    ),
    "theory is off by e at one block": (
        initial.pre_theory_error,
        deep("pre", lambda at, s: np.exp(-(at == 7)), theory=lambda at, s: 1, **LECUN),
        1,
    ),
    "q = l": (initial.pre_slope, deep("pre", lambda at, s: at * scale(s) if at >= 8 else 5.0, **LECUN), 1),
    "two sublayers a block": (initial.sandwich_end, deep("sandwich", lambda at, s: 3 + 2 * at, **LECUN), 1),
    "half of that": (initial.sandwich_end, deep("sandwich", lambda at, s: (2 + at) * scale(s), **LECUN), 66 / 130),
    "tokens of length alpha": (
        initial.deepnorm_input,
        deep("deepnorm", lambda at, s: 128**0.25 if at > 0.5 else 9.0, "norm_input", site="post", **LECUN),
        0,
    ),
    "a tenth too long at one norm": (
        initial.deepnorm_input,
        deep("deepnorm", lambda at, s: 128**0.25 * (1.1 if at == 40.5 else 1), "norm_input", site="post", **LECUN),
        0.21,
    ),
    "one over the root": (
        initial.layer_slope("pre", "causal"),
        deep("pre", lambda at, s: scale(s) * at**-0.5 if at >= 4 else 9.0, "grad_block"),
        -0.5,
    ),
    "of the other mask": (
        initial.layer_slope("pre", "bidirectional"),
        joined(deep("pre", lambda at, s: at**-0.5, "grad_block"), deep("pre", lambda at, s: at**-0.25, "grad_block", **BOTH_WAYS)),
        -0.25,
    ),
    "first to last": (initial.deepnorm_ends, deep("deepnorm", lambda at, s: scale(s) * (2 + at), "grad_block"), 66 / 3),
    "1/√T of its top": (
        initial.post_floor,
        deep(
            "post", lambda at, s: scale(s) * (4.0 if at == 16 else 1 + (at != 3)), "grad_frobenius", depth=16, **BOTH_WAYS, **WIDE
        ),
        np.sqrt(32) / 4,
    ),
    "the lower of both masks": (
        initial.post_level,
        joined(
            deep("post", lambda at, s: 1 + (at == 32), "grad_block", depth=32, **WIDE),
            deep("post", lambda at, s: scale(s) * (1 + 3 * (at == 9)), "grad_block", depth=32, **BOTH_WAYS, **WIDE),
        ),
        1 / 4,
    ),
    "last matrix over depth": (
        initial.depth_slope(initial.last_ffn, "pre", 32),
        over_depth("pre", lambda d, s: scale(s) * d**-0.5 if d >= 8 else 9.0, **LAST),
        -0.5,
    ),
    "of the last block only": (
        initial.depth_slope(initial.last_ffn, "pre", 32),
        (lambda runs: (runs, field(runs, "grad_matrix", lambda at, s: at, site="down")))(ladder(("pre",), (8, 16, 32))),
        1,
    ),
    "up to a depth": (
        initial.depth_slope(initial.amplified, "post", 32),
        over_depth("post", lambda d, s: d if d <= 32 else 1e-3, "amplification", (8, 16, 32, 64)),
        1,
    ),
    "of the whole gradient": (
        initial.depth_slope(initial.total, "pre", 32),
        over_depth("pre", lambda d, s: scale(s), "grad_block"),
        0.5,
    ),
    "14 blocks over 6": (
        initial.square_ratio,
        over_depth("pre", lambda d, s: scale(s) / d, depths=(6, 14), **{"model.ffn_ratio": 1.0}, **LAST),
        6 / 14,
    ),
    "Post-LN over Pre-LN": (
        initial.post_over_pre,
        joined(*(deep(p, lambda at, s, k=k: k * scale(s) * at, "amplification", depth=100) for p, k in (("post", 7), ("pre", 2)))),
        3.5,
    ),
    "cosine at the top": (
        initial.cosine_end("pre"),
        deep("pre", lambda at, s: at / 48 + s / 10, "token_cosine", depth=24, **LECUN),
        0.55,
    ),
    "halved": (
        initial.post_rate,
        deep("post", lambda at, s: 1 - scale(s) * 0.5 ** (at - 2), "token_cosine", depth=24, **LECUN, **BOTH_WAYS),
        0.5,
    ),
    "halved but at one block": (
        initial.post_rate,
        deep("post", lambda at, s: 1 - 0.5 ** (at - (at > 11)), "token_cosine", depth=24, **LECUN, **BOTH_WAYS),
        1,
    ),
}


@pytest.mark.parametrize("case", KNOWN)
def test_a_statistic_where_its_value_is_known(case):
    measure, (runs, layers), expected = KNOWN[case]
    measured = measure(runs, layers)
    assert measured.value == pytest.approx(expected, abs=2e-3 if "halved" in case else 1e-5)
    assert measured.seeds == 2


@pytest.mark.parametrize("case", KNOWN)
def test_a_statistic_without_its_inputs_is_none(case):
    """No row of its field; runs of other placements alone; of another arm; that did not finish."""
    measure, (runs, layers), _ = KNOWN[case]
    assert measure(runs, layers.iloc[:0]) is None
    others = ({"placement": "my_" + runs["placement"]}, {"state": "failed"}, {"train.steps": 4}, {"data.name": "stdlib"})
    for other in others:
        assert measure(runs.assign(**other), layers) is None


@pytest.mark.parametrize(("depths", "most"), [((4, 8, 16), 16), ((8, 16, 32), 64), ((12, 16, 32), 32)])
def test_a_ladder_without_its_ends_or_with_two_rungs_has_no_slope(depths, most):
    runs, layers = over_depth("pre", lambda d, s: d, "amplification", depths)
    assert initial.depth_slope(initial.amplified, "pre", most)(runs, layers) is None


def test_a_seed_that_is_missing_somewhere_is_left_out_and_a_nan_is_not():
    runs, layers = over_depth("pre", lambda d, s: scale(s) * d, "amplification", (8, 16, 32))
    last = layers.index[layers["seed"] == layers["seed"].min()][-1]
    whole = initial.depth_slope(initial.amplified, "pre", 32)(runs, layers)
    part = initial.depth_slope(initial.amplified, "pre", 32)(runs, layers.drop(index=last))
    assert part.seeds == whole.seeds - 1 and part.value == pytest.approx(1)
    broken = layers.assign(value=layers["value"].where(layers.index != last))
    assert np.isnan(initial.depth_slope(initial.amplified, "pre", 32)(runs, broken).value)


def test_without_theory_there_is_no_error_of_it():
    assert initial.pre_theory_error(*deep("pre", lambda at, s: 1.0, **LECUN)) is None


def test_post_ln_is_compared_over_the_seeds_of_both():
    _, (runs, layers), _ = KNOWN["Post-LN over Pre-LN"]
    fewer = layers[~(layers["run"].str.startswith("pre") & (layers["seed"] == 1))]
    measured = initial.post_over_pre(runs, fewer)
    assert (measured.value, measured.seeds) == (pytest.approx(3.5), 1)


def test_tokens_that_float32_cannot_tell_apart_do_not_stop_the_rate():
    """1 - ρ is exactly 0 from block 20 on."""

    def law(at, seed):
        return 1 - 0.5**at if at < 20 else 1.0

    assert initial.post_rate(*deep("post", law, "token_cosine", depth=24, **LECUN, **BOTH_WAYS)).value == pytest.approx(
        0.5, abs=2e-3
    )


# ── The claims of signal ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param(pd.DataFrame(), id="nothing"),
        pytest.param(models(), id="no runs"),
        pytest.param(models({"model.depth": 3}), id="another stack"),
        pytest.param(models({"model.depth": 64, "state": "running"}), id="not finished"),
        pytest.param(ladder(("pre", "post"), (8, 16)), id="two depths"),
    ],
)
def test_claims_of_a_sweep_that_lacks_their_inputs_are_not_tested(runs):
    layers = table(
        *(field(runs, name, lambda at, s: 1.0) for name in ("grad_block", "amplification", "second_moment") if len(runs))
    )
    judged = judge(signal.CLAIMS, runs, layers)
    assert set(judged["verdict"]) == {NOT_TESTED} and len(judged) == len(signal.CLAIMS) == judged["id"].nunique()


def test_a_partial_sweep_tests_what_it_can():
    runs, layers = deep("deepnorm", lambda at, s: 1.0, "grad_block")
    judged = judge(signal.CLAIMS, runs, layers).set_index("id")["verdict"]
    assert set(judged[judged != NOT_TESTED].index) == {"signal_deepnorm_blocks", "signal_deepnorm_ends"}


def test_the_sentences_of_the_claims_are_one_line_each():
    assert not [claim.id for claim in signal.CLAIMS if "\n" in claim.statistic or not claim.statistic or not claim.source]
