"""Verdicts on hand-made curves: every status, every threshold from both sides."""

import math
from typing import Any

import numpy as np
import pytest

from normflax.records.stability import (
    DIVERGED,
    FAILED,
    Verdict,
    effective_loss,
    first_nonfinite,
    run_verdict,
    running_median,
    slow,
    spikes,
    stuck,
    sweep_verdict,
    unrecovered_spike,
    window,
)

L0, U, BIGRAM = 5.6, 3.1, 2.4


def judge(losses: np.ndarray, **given: Any) -> Verdict:
    """The run's own verdict, on text of these levels; the held-out loss is the last training losses' unless given."""
    defaults = {"l0": L0, "l0_se": 0.01, "heldout": float(np.median(losses[-20:])), "unigram": U, "bigram": BIGRAM}
    return run_verdict(losses, np.ones(len(losses)), **(defaults | given))


def healthy(T: int, seed: int = 0, noise: float = 0.08, end: float = 2.2) -> np.ndarray:
    """From l0 down to `end` with the time constant T / 8, plus noise."""
    t = np.arange(T)
    return end + (L0 - end) * np.exp(-8 * t / T) + noise * np.random.default_rng(seed).standard_normal(T)


# ── the pieces ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("T", "W"), [(1, 20), (1000, 20), (1001, 21), (2000, 40), (2001, 41)])
def test_window(T: int, W: int):
    assert window(T) == W


@pytest.mark.parametrize("width", [1, 4, 5, 100])
def test_running_median_is_that_of_the_last_losses(width: int):
    x = np.random.default_rng(0).integers(0, 6, 60).astype(float)  # with ties
    want = [np.median(x[max(0, t + 1 - width) : t + 1]) for t in range(len(x))]
    np.testing.assert_array_equal(running_median(x, width), want)


@pytest.mark.parametrize(("T", "W"), [(400, 50), (3000, 300), (12000, 1000)])
def test_spikes_begin_three_losses_of_seven_deviations_over_the_steps_before_them(T: int, W: int):
    """Against the definition, step by step."""
    a, b, c = T // 4, T // 2, 3 * T // 4
    x = healthy(T, noise=0.05)
    x[a : a + 2] += 1.0  # two are not three
    x[b : b + 3] += 1.0
    x[c:] += np.linspace(0, 9, T - c)
    want = []
    for t in range(W, T - 2):
        before = x[t - W : t]
        if (x[t : t + 3] >= before.mean() + 7 * max(before.std(), 0.005)).all():
            want.append(t)
    assert spikes(x).tolist() == want
    assert b in want and not {a - 1, a, a + 1} & set(want)


def test_spikes_of_a_quiet_curve_rise_seven_times_the_least_deviation():
    x = np.zeros(100)
    x[70:73] = 0.0351
    assert spikes(x).tolist() == [70]
    x[70:73] = 0.0349
    assert spikes(x).tolist() == []


def test_a_spike_of_any_size_leaves_later_ones_visible():
    x = healthy(1000, noise=0.01)
    x[300:303] = 1e30
    x[600:603] += 1.0
    assert {300, 600} <= set(spikes(x).tolist())


@pytest.mark.parametrize(("T", "W"), [(60, 50), (500, 50), (600, 60), (3000, 300), (10000, 1000), (20000, 1000)])
def test_the_first_spike_there_can_be_follows_a_full_window(T: int, W: int):
    for t, want in ((W, [W]), (W - 1, [])):
        x = np.zeros(T)
        x[t : t + 3] = 1.0
        assert spikes(x).tolist() == want


@pytest.mark.parametrize("T", [1, 5, 52])
def test_a_short_run_has_no_spike(T: int):
    assert len(spikes(np.arange(T, dtype=float))) == 0
    assert not unrecovered_spike(np.arange(T, dtype=float), L0)


# ── the verdicts ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("T", [60, 300, 600, 2000])
def test_noisy_healthy_curves_are_ok(T: int):
    for seed in range(50):
        for noise in (0.0, 0.02, 0.15):
            assert judge(healthy(T, seed, noise)) == Verdict.OK


@pytest.mark.parametrize("T", [300, 600, 2000])
@pytest.mark.parametrize("noise", [0.0, 0.08])
def test_a_permanent_jump_is_an_unrecovered_spike(T: int, noise: float):
    x = healthy(T, noise=noise)
    x[T // 2 :] += 2.0
    assert judge(x, heldout=2.3) == Verdict.UNRECOVERED_SPIKE


@pytest.mark.parametrize(
    ("left", "verdict"), [(3, Verdict.OK_SPIKED), (10, Verdict.UNRECOVERED_SPIKE), (19, Verdict.UNRECOVERED_SPIKE)]
)
def test_a_jump_near_the_end_is_judged_by_the_steps_that_follow(left: int, verdict: Verdict):
    """Of three losses that end the run nobody knows whether they would have come back: they are a spike, and no divergence."""
    x = healthy(300)
    x[-left:] += 2.0
    assert judge(x, heldout=2.3) == verdict


def test_a_spike_that_comes_back_just_before_the_end_is_ok_spiked():
    x = healthy(300)
    x[290:295] += 2.0
    assert judge(x, heldout=2.3) == Verdict.OK_SPIKED


@pytest.mark.parametrize(("height", "length"), [(2.0, 3), (2.0, 15), (40.0, 10)])
def test_a_spike_that_comes_back_is_ok_spiked(height: float, length: int):
    x = healthy(600)
    x[300 : 300 + length] += height
    assert judge(x) == Verdict.OK_SPIKED


@pytest.mark.parametrize(("back", "verdict"), [(0.04, Verdict.OK_SPIKED), (0.06, Verdict.UNRECOVERED_SPIKE)])
def test_recovered_means_within_a_twentieth_of_the_fall_before_the_spike(back: float, verdict: Verdict):
    x = np.full(400, 2.6)
    x[:20] = L0
    x[200:210] += 2.0
    x[210:] = 2.6 + back * (L0 - 2.6)
    assert judge(x) == verdict


def test_nonfinite_wins_over_everything_and_names_its_first_step():
    ones = np.ones(300)
    for bad in (math.nan, math.inf, -math.inf):
        x, g = healthy(300), ones.copy()
        x[120:] = bad
        g[130:] = bad
        assert judge(x, heldout=2.2) == Verdict.NONFINITE
        assert run_verdict(healthy(300), g, l0=L0, l0_se=0.0, heldout=2.2, unigram=U) == Verdict.NONFINITE
        assert first_nonfinite(x, ones) == 120
        assert first_nonfinite(x, g) == 120
        assert first_nonfinite(healthy(300), g) == 130
        assert judge(healthy(300), heldout=bad) == Verdict.NONFINITE
        assert judge(healthy(300), l0=bad, heldout=2.2) == Verdict.NONFINITE
    assert first_nonfinite(healthy(300), ones) is None
    assert judge(healthy(300), parameters_finite=False) == Verdict.NONFINITE
    assert judge(np.append(healthy(300)[:40], math.nan), heldout=None) == Verdict.NONFINITE  # ended at t_div


def test_a_slow_rise_above_init_is_above_init_and_so_is_a_noisy_end():
    assert judge(np.linspace(L0, 1.05 * L0, 500)) == Verdict.ABOVE_INIT
    assert judge(np.concatenate([healthy(300), np.linspace(2.2, 8.0, 300)])) == Verdict.ABOVE_INIT
    assert judge(np.linspace(L0, 1.01 * L0, 500)) == Verdict.STUCK


def test_one_bad_last_step_is_not_above_init():
    x = healthy(300)
    x[-1] = 9.0
    assert judge(x) == Verdict.OK


@pytest.mark.parametrize(("se", "margin"), [(0.0, 0.08), (1 / 64, 0.08), (1 / 16, 0.1875)])
def test_above_init_by_two_per_cent_or_three_standard_errors(se: float, margin: float):
    edge = 4.0 + margin
    for end, verdict in ((edge, Verdict.STUCK), (math.nextafter(edge, 9), Verdict.ABOVE_INIT)):
        assert judge(np.full(100, end), l0=4.0, l0_se=se) == verdict


def test_a_curve_that_stays_at_the_unigram_level_is_stuck():
    x = U - 0.03 + (L0 - U) * np.exp(-np.arange(300) / 10)
    assert judge(x, heldout=U - 0.03) == Verdict.STUCK
    assert judge(x, heldout=U - 0.03, bigram=None, floor=2.0) == Verdict.STUCK
    assert judge(x, heldout=U - 0.08) == Verdict.OK  # 0.07 is a tenth of the way to the bigram level
    assert judge(x, heldout=U - 0.08, floor=2.0) == Verdict.STUCK  # the floor, when known, comes before the bigram level
    assert judge(x, heldout=U - 0.03, bigram=U - 0.1) == Verdict.OK  # nothing to learn
    assert judge(x, heldout=U - 0.03, bigram=None) == Verdict.OK  # nothing known
    assert judge(x, heldout=None) == Verdict.OK
    assert judge(x, unigram=None) == Verdict.OK


def test_stuck_and_slow_at_their_thresholds():
    assert not stuck(3.75, 4.0, 1.5) and stuck(math.nextafter(3.75, 9), 4.0, 1.5)
    assert not slow(2.125, 4.0, 1.5) and slow(math.nextafter(2.125, 9), 4.0, 1.5)
    assert not stuck(9.0, 4.0, 4.0 - 0.1) and stuck(9.0, 4.0, math.nextafter(4.0 - 0.1, 0))
    assert not slow(9.0, 4.0, 4.0) and slow(9.0, 4.0, 3.99)
    for unknown in ((math.nan, 4.0, 1.5), (3.9, math.nan, 1.5), (3.9, 4.0, math.nan)):
        assert not stuck(*unknown) and not slow(*unknown)


def test_five_steps_are_judged_too():
    assert judge(np.array([5.6, 5.0, 4.0, 3.0, 2.5]), heldout=2.4) == Verdict.OK
    assert judge(np.array([5.6, 5.5, 5.5, 5.4, 5.3]), heldout=5.3) == Verdict.STUCK
    assert judge(np.array([5.6, 9.0, 9.0, 9.0, 9.0]), heldout=9.0) == Verdict.ABOVE_INIT
    assert judge(np.array([5.6, math.nan]), heldout=None) == Verdict.NONFINITE
    with pytest.raises(ValueError, match="0 steps"):
        run_verdict(np.empty(0), np.empty(0), l0=L0, l0_se=0.0, heldout=None, unigram=U)


def test_losses_of_float32_are_judged_as_they_are():
    x = healthy(600).astype(np.float32)
    x[300:] += 2.0
    assert judge(x, heldout=2.3) == Verdict.UNRECOVERED_SPIKE


# ── beside the other runs ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_sweep_adds_stuck_and_slow_and_keeps_what_diverged():
    def sweep(run: Verdict, heldout: float, l_ref: float = 1.5) -> Verdict:
        return sweep_verdict(run, heldout=heldout, unigram=4.0, l_ref=l_ref)

    assert sweep(Verdict.OK, 1.6) == Verdict.OK
    assert sweep(Verdict.OK_SPIKED, 1.6) == Verdict.OK_SPIKED
    assert sweep(Verdict.OK, 2.5) == Verdict.SLOW
    assert sweep(Verdict.OK_SPIKED, 2.5) == Verdict.SLOW
    assert sweep(Verdict.OK, 3.9) == Verdict.STUCK
    assert sweep(Verdict.STUCK, 3.9) == Verdict.STUCK
    assert sweep(Verdict.STUCK, 3.7) == Verdict.SLOW
    assert sweep(Verdict.STUCK, 1.6) == Verdict.OK
    for run in DIVERGED:
        assert sweep(run, 1.6) == run
    assert sweep(Verdict.OK, 2.5, math.nan) == Verdict.OK
    assert sweep(Verdict.STUCK, 3.9, math.nan) == Verdict.STUCK


def test_no_run_alone_is_slow():
    assert judge(healthy(300, end=2.9), heldout=2.9) == Verdict.OK
    assert sweep_verdict(Verdict.OK, heldout=2.9, unigram=U, l_ref=2.2) == Verdict.SLOW


def test_diverged_and_failed():
    assert {str(verdict) for verdict in DIVERGED} == {"NONFINITE", "ABOVE_INIT", "UNRECOVERED_SPIKE"}
    assert set(FAILED - DIVERGED) == {"STUCK"}
    assert all(verdict.meaning and str(verdict) == verdict.name for verdict in Verdict)


def test_effective_loss_stops_at_the_unigram_level():
    nan = math.nan
    assert effective_loss(Verdict.OK, heldout=2.5, unigram=3.0, l0=5.0) == 2.5
    assert effective_loss(Verdict.ABOVE_INIT, heldout=7.0, unigram=3.0, l0=5.0) == 3.0
    assert effective_loss(Verdict.NONFINITE, heldout=2.0, unigram=3.0, l0=5.0) == 3.0
    assert effective_loss(Verdict.NONFINITE, heldout=nan, unigram=3.0, l0=5.0) == 3.0
    assert effective_loss(Verdict.ABOVE_INIT, heldout=7.0, unigram=nan, l0=5.0) == 5.0
    assert effective_loss(Verdict.OK, heldout=4.0, unigram=nan, l0=5.0) == 4.0
    assert math.isnan(effective_loss(Verdict.OK, heldout=nan, unigram=3.0, l0=5.0))
