"""Spikes by hand."""

import numpy as np
import pytest

from normflax.records.spikes import memory, of_run, score, spiked


def calm(steps: int, level: float = 2.0, sd: float = 0.1) -> np.ndarray:
    """Values that are `sd` above and below a level in turn: mean `level`, standard deviation `sd`."""
    return level + sd * np.where(np.arange(steps) % 2, 1.0, -1.0)


def test_the_memory_is_a_tenth_of_the_run_within_bounds():
    assert [memory(steps) for steps in (10, 500, 800, 10_000, 10**6)] == [50, 50, 80, 1000, 1000]


def test_seven_standard_deviations_make_a_spike_and_a_little_less_none():
    values = calm(200)
    values[100] = 2.0 + 7.001 * 0.1
    assert np.flatnonzero(spiked(values)).tolist() == [100]
    values[100] = 2.0 + 6.999 * 0.1
    assert not spiked(values).any()


def test_the_first_steps_are_held_against_nothing():
    values = calm(200)
    values[49] = 9.0
    assert not spiked(values)[:50].any()
    values = calm(200)
    values[50] = 9.0
    assert spiked(values)[50]
    assert not spiked(calm(50)).any() and score(spiked(calm(50))) is None


def test_only_the_values_before_a_step_count():
    """A jump that stays is a spike while the window remembers the old level, and raises its own deviation."""
    values = np.concatenate([calm(100), calm(100, 4.0)])
    assert spiked(values)[100] and not spiked(values)[103:].any()


def test_what_hardly_moves_makes_no_spikes_of_nothing():
    flat = np.full(200, 3.0)
    flat[100] = 3.02
    assert spiked(flat)[100] and not spiked(flat, floor=0.005).any() and not spiked(flat, share=0.01).any()
    flat[100] = 3.0 + 7 * 0.03
    assert spiked(flat, share=0.0099)[100] and not spiked(flat, share=0.0101).any()


def test_what_is_not_finite_is_never_calm():
    values = calm(100)
    values[-1] = np.nan
    assert np.flatnonzero(spiked(values)).tolist() == [99]
    values[-1] = np.inf
    assert spiked(values)[99] and not spiked(-calm(100)).any()


def test_the_score_is_a_share_of_the_steps_that_could_be_one():
    values = calm(150)
    values[[60, 120]] = 5.0
    found = of_run(values, calm(150))
    assert found["loss"] == {"score": pytest.approx(0.02), "steps": [60, 120]}
    assert found["grad_norm"] == {"score": 0.0, "steps": []}
