"""Learning rates: exact numbers, the two ends of the warm-up, and what happens past the total."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny

from normflax.checks import CHOICES, ConfigError
from normflax.config import check
from normflax.train.schedules import SHAPES, rate


@cache
def program(name: str):
    """The rates of some updates, in one program whose numbers are all traced."""
    return jax.jit(lambda t, hyper: jax.vmap(lambda t: rate(name, t, hyper))(t))


def curve(name: str, updates, peak=1e-3, warmup=100, total=1000, final=0.0, decay_share=0.2, start=1e-3) -> np.ndarray:
    hyper = {key: jnp.float32(x) for key, x in {"rate": peak, "final": final, "decay_share": decay_share, "start": start}.items()}
    hyper |= {"warmup": jnp.int32(warmup), "total": jnp.int32(total)}
    return np.asarray(program(name)(jnp.asarray(updates, jnp.int32), hyper))


def expected(name: str, t: int, peak: float, warmup: int, total: int, final: float) -> float:
    """The rate of update t, written from the rules in float64 and with branches; decay share 0.2, start 1e-3."""
    if name in ("ramp", "geometric_ramp"):
        climbed = 1.0 if t >= total - 1 else t / (total - 1)
        share = 1e-3 + 0.999 * climbed if name == "ramp" else 1e-3 ** (1 - climbed)
        return peak * share * (min(1.0, (t + 1) / warmup) if warmup else 1.0)
    if warmup == 1:
        warmup = 0
    if t + 1 < warmup:
        return peak * (t + 1) / warmup * (share_of_wsd(t, total, final) if name == "wsd" else 1.0)
    if name == "constant":
        return peak
    if name == "wsd":
        return peak * share_of_wsd(t, total, final)
    if name == "inverse_sqrt":
        return peak * np.sqrt(max(warmup, 1) / (min(t, total) + 1))
    if t < warmup:
        return peak
    share = min(1.0, (t - warmup) / (total - warmup))
    if name == "linear":
        return peak * (1 + (final - 1) * share)
    return peak * (final + (1 - final) * (1 + np.cos(np.pi * share)) / 2)


def share_of_wsd(t: int, total: int, final: float) -> float:
    """1 up to 80 % of the run, then a line to `final` at its end."""
    begin = 0.8 * total
    return 1.0 if t < begin else 1 + (final - 1) * min(1.0, (t - begin) / (total - begin))


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
@pytest.mark.parametrize(("warmup", "total", "final"), [(0, 40, 0.0), (1, 40, 0.1), (7, 40, 0.1), (31, 40, 1.0)])
def test_every_rate_is_the_rule_written_with_branches(name, warmup, total, final):
    updates = range(total + 10)
    rates = curve(name, updates, peak=0.3, warmup=warmup, total=total, final=final)
    rule = [expected(name, t, 0.3, warmup, total, final) for t in updates]
    np.testing.assert_allclose(rates, rule, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_no_warm_up_is_a_warm_up_of_one_update(name):
    """W = 0 means none and equals W = 1 at every update; a cosine then falls from the first update on."""
    none, one = (curve(name, range(30), warmup=w, total=20) for w in (0, 1))
    assert (none == one).all()
    np.testing.assert_allclose(none[0], 1e-6 if "ramp" in name else 1e-3, rtol=1e-5)
    if name == "cosine":
        assert none[1] < none[0]


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("linear", {0: 0.1, 9: 1.0, 10: 1.0, 55: 0.55, 100: 0.1, 500: 0.1}),
        ("cosine", {0: 0.1, 9: 1.0, 10: 1.0, 55: 0.55, 100: 0.1, 500: 0.1}),
        ("inverse_sqrt", {0: 0.1, 9: 1.0, 39: 0.5, 89: 1 / 3, 100: 0.31466, 500: 0.31466}),
        ("wsd", {0: 0.1, 9: 1.0, 50: 1.0, 80: 1.0, 90: 0.55, 99: 0.145, 100: 0.1, 500: 0.1}),
    ],
)
def test_rates_by_hand(name: str, rates: dict[int, float]):
    """Peak 1, ten updates of warm-up, a hundred in all, final share 0.1, the last fifth to fall in."""
    np.testing.assert_allclose(curve(name, [*rates], 1.0, 10, 100, 0.1), [*rates.values()], rtol=1e-5)


def test_the_share_in_which_wsd_falls_is_of_all_updates():
    """The last half of a hundred, whatever the warm-up; all of them without one."""
    rates = curve("wsd", [10, 50, 75, 99, 100], 1.0, 10, 100, 0.0, decay_share=0.5)
    np.testing.assert_allclose(rates, [1.0, 1.0, 0.5, 0.02, 0.0], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(curve("wsd", [0, 25, 50], 1.0, 0, 100, 0.5, decay_share=1.0), [1.0, 0.875, 0.75], rtol=1e-6)


def test_ramps_by_hand():
    """From a hundredth of the peak at the first of 101 updates to the peak at the last, and no further."""
    np.testing.assert_allclose(curve("ramp", [0, 50, 100, 101], 2.0, 0, 101, start=0.01), [0.02, 1.01, 2, 2], rtol=1e-6)
    found = curve("geometric_ramp", [0, 25, 50, 100, 101], 2.0, 0, 101, start=0.01)
    np.testing.assert_allclose(found, [0.02, 0.0632456, 0.2, 2, 2], rtol=1e-5)
    assert curve("ramp", [0], 2.0, 0, 1, start=0.01) == np.float32(0.02)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_rate_lies_between_nothing_and_the_peak_and_a_run_of_one_update_has_one(name: str):
    for warmup, total in ((0, 1), (0, 2), (3, 4), (50, 200)):
        rates = curve(name, range(2 * total), 0.5, warmup, total, final=0.3, decay_share=1.0)
        assert np.isfinite(rates).all() and (rates > 0).all() and (rates <= 0.5).all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"warmup_steps": 10}, ("schedule.warmup_steps=10", "train.steps=10")),
        ({"final": 1.5}, ("schedule.final=1.5",)),
        ({"start": -0.1}, ("schedule.start=-0.1",)),
        ({"decay_share": 0.0}, ("schedule.decay_share=0.0",)),
        ({"name": "wsd", "warmup_steps": 6, "decay_share": 0.5}, ("schedule.warmup_steps=6", "schedule.decay_share=0.5")),
        ({"name": "ramp", "warmup_steps": 2}, ("schedule.warmup_steps=2", "ramp")),
        ({"name": "geometric_ramp", "start": 0.0}, ("schedule.start=0", "geometric_ramp")),
    ],
)
def test_a_schedule_that_does_not_fit_is_one_sentence(settings: dict[str, Any], words: tuple[str, ...]):
    with pytest.raises(ConfigError) as caught:
        check(tiny(train__steps=10, **{f"schedule__{key}": value for key, value in settings.items()}))
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "wsd", "warmup_steps": 5, "decay_share": 0.5},  # falls from the first update at the peak
        {"name": "ramp", "warmup_steps": 1},  # a warm-up of one update is none
        {"name": "geometric_ramp", "warmup_steps": 1, "start": 1e-6},
        {"name": "ramp", "start": 0.0},
    ],
)
def test_a_schedule_that_just_fits_is_taken(settings: dict[str, Any]):
    assert check(tiny(train__steps=10, **{f"schedule__{key}": value for key, value in settings.items()}))


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_lanes_with_their_own_numbers_share_one_program(name: str):
    lanes = [(1e-3, 0, 40, 0.0, 0.2, 1e-3), (0.5, 7, 30, 0.1, 0.7, 0.5), (2.0, 1, 1, 1.0, 1.0, 1.0)]
    many = jax.jit(jax.vmap(lambda t, hyper: rate(name, t, hyper), (None, 0)))
    for t in (0, 6, 20, 45):
        for some in (lanes, lanes[::-1]):
            peak, warmup, total, final, share, start = (np.asarray(column) for column in zip(*some, strict=True))
            hyper = {"rate": peak, "final": final, "decay_share": share, "start": start}
            hyper = {key: jnp.asarray(x, jnp.float32) for key, x in hyper.items()}
            hyper |= {"warmup": jnp.asarray(warmup, jnp.int32), "total": jnp.asarray(total, jnp.int32)}
            alone = [curve(name, [t], *lane)[0] for lane in some]
            np.testing.assert_allclose(many(jnp.int32(t), hyper), alone, rtol=1e-6, atol=1e-9)
    assert many._cache_size() == 1


def test_past_the_total_the_rate_stays_at_its_end():
    rates = curve("cosine", [1000, 1001, 100_000], final=0.1)
    np.testing.assert_allclose(rates, 1e-4, rtol=1e-6)
    assert (curve("constant", [1000, 100_000]) == np.float32(1e-3)).all()


def test_the_final_share_is_of_the_peak():
    for peak in (1e-4, 3.0):
        np.testing.assert_allclose(curve("cosine", [1000], peak=peak, final=0.25), peak / 4, rtol=1e-6)


def test_the_names_of_the_config_are_those_of_the_table():
    assert set(CHOICES["schedule.name"]) == set(SHAPES)
