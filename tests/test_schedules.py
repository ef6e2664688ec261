"""Learning rates: exact numbers, the two ends of the warm-up, and what happens past the total."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normflax.checks import CHOICES
from normflax.train.schedules import SHAPES, rate


def curve(name: str, updates, peak=1e-3, warmup=100, total=1000, final=0.0) -> np.ndarray:
    """The rates of these updates, from one program whose numbers are all traced."""

    @jax.jit
    def rates(t, peak, warmup, total, final):
        return jax.vmap(lambda t: rate(name, t, peak=peak, warmup=warmup, total=total, final=final))(t)

    f, i = jnp.float32, jnp.int32
    return np.asarray(rates(jnp.asarray(updates, i), f(peak), i(warmup), i(total), f(final)))


def expected(name: str, t: int, peak: float, warmup: int, total: int, final: float) -> float:
    """The rate of update t, written from the design's rule in float64 and with branches."""
    if warmup == 1:
        warmup = 0
    if t + 1 < warmup:
        return peak * (t + 1) / warmup
    if name == "constant":
        return peak
    if t < warmup:
        return peak
    share = min(1.0, (t - warmup) / (total - warmup))
    return peak * (final + (1 - final) * (1 + np.cos(np.pi * share)) / 2)


def test_the_worked_numbers_of_a_cosine_after_a_warm_up():
    """A-16: the decay's length does not include the warm-up twice (that gives 4.02e-4 at update 550)."""
    updates = [0, 49, 99, 100, 550, 999, 1000, 1200]
    rates = curve("cosine", updates)
    np.testing.assert_allclose(rates[:5], [1e-5, 5e-4, 1e-3, 1e-3, 5e-4], rtol=1e-6)
    np.testing.assert_allclose(rates[5], 3.05e-9, rtol=0.05)  # float32 cancels in 1 + cos
    assert rates[6] == 0 and rates[7] == 0


def test_the_first_update_of_a_warm_up_is_no_update_of_nothing():
    """A-15: (t + 1)/W, so update 0 uses 1e-5 and not 0, and update W - 1 is the first at the peak."""
    rates = curve("constant", [0, 1, 98, 99, 100, 5000])
    np.testing.assert_allclose(rates, [1e-5, 2e-5, 9.9e-4, 1e-3, 1e-3, 1e-3], rtol=1e-6)


@pytest.mark.parametrize("name", sorted(SHAPES))
@pytest.mark.parametrize(("warmup", "total", "final"), [(0, 40, 0.0), (1, 40, 0.1), (7, 40, 0.1), (39, 40, 1.0)])
def test_every_rate_is_the_rule_written_with_branches(name, warmup, total, final):
    updates = range(total + 10)
    rates = curve(name, updates, peak=0.3, warmup=warmup, total=total, final=final)
    rule = [expected(name, t, 0.3, warmup, total, final) for t in updates]
    np.testing.assert_allclose(rates, rule, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_no_warm_up_is_a_warm_up_of_one_update(name):
    """W = 0 means none and equals W = 1 at every update; a cosine then falls from the first update on."""
    none, one = (curve(name, range(30), warmup=w, total=20) for w in (0, 1))
    assert (none == one).all() and none[0] == np.float32(1e-3)
    if name == "cosine":
        assert none[1] < none[0]


def test_past_the_total_the_rate_stays_at_its_end():
    rates = curve("cosine", [1000, 1001, 100_000], final=0.1)
    np.testing.assert_allclose(rates, 1e-4, rtol=1e-6)
    assert (curve("constant", [1000, 100_000]) == np.float32(1e-3)).all()


def test_the_final_share_is_of_the_peak():
    for peak in (1e-4, 3.0):
        np.testing.assert_allclose(curve("cosine", [1000], peak=peak, final=0.25), peak / 4, rtol=1e-6)


def test_the_names_of_the_config_are_those_of_the_table():
    assert set(CHOICES["schedule.name"]) == set(SHAPES)
