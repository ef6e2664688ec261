"""Reference levels against hand computations, slow independent counts, and Monte Carlo."""

from collections import Counter
from itertools import pairwise
from math import log

import numpy as np
import pytest

from normflax.config import Data
from normflax.data import batches, levels, stdlib
from normflax.data.corpus import from_parts
from normflax.data.synthetic import Chain, Copy, chain


def windows(loaded: batches.Loaded, count: int, tokens: int) -> list[np.ndarray]:
    return [np.asarray(part) for part in batches.heldout(loaded, count, tokens)]


def levels_of(data: Data, count: int, tokens: int) -> levels.Levels:
    loaded = batches.load(data)
    return levels.levels(loaded.source, *windows(loaded, count, tokens))


def test_text_levels_by_hand():
    # "aab": c(a) = 2, c(b) = 1, pairs aa and ab, and k = 64.
    source = from_parts("files", b"aab", b"ab")
    inputs, targets = np.array([[97, 98]]), np.array([[98, 99]])
    got = levels.levels(source, inputs, targets, np.array([[True, True]]))
    assert got.uniform == pytest.approx(log(256))
    assert got.unigram == pytest.approx(-(log(2 / 259) + log(1 / 259)) / 2)
    assert got.bigram == pytest.approx(-(log((1 + 64 * 2 / 259) / 66) + log(1 / 259)) / 2)
    assert got.floor is None
    masked = levels.levels(source, inputs, targets, np.array([[True, False]]))
    assert masked.unigram == pytest.approx(-log(2 / 259))
    assert masked.bigram == pytest.approx(-log((1 + 64 * 2 / 259) / 66))


def test_text_levels_equal_slow_counts(monkeypatch):
    monkeypatch.setattr(levels, "BLOCK", 1000)  # the text is counted in blocks, and no pair is lost between two
    text = stdlib.load(0.1).train[:20_500].tobytes()
    ones, twos = Counter(text), Counter(pairwise(text))
    firsts = Counter(text[:-1])

    def p(y):
        return (ones[y] + 1) / (len(text) + 256)

    def q(x, y):
        return (twos[x, y] + 64 * p(y)) / (firsts[x] + 64)

    held = stdlib.load(0.1).heldout[:1000].astype(int)
    x, y = held[:-1], held[1:]
    got = levels.levels(from_parts("files", text, b"x"), x[None], y[None], np.ones((1, 999), bool))
    assert got.unigram == pytest.approx(-np.mean([log(p(b)) for b in y]))
    assert got.bigram == pytest.approx(-np.mean([log(q(a, b)) for a, b in zip(x, y, strict=True)]))


def test_text_laws_sum_to_one():
    law = levels.text_law(np.frombuffer(b"abracadabra", np.uint8), 256)
    np.testing.assert_allclose(law.marginal.sum(), 1)
    every = np.arange(256)
    for x in (ord("a"), ord("z")):
        np.testing.assert_allclose(law.given(np.full(256, x), every).sum(), 1)
    np.testing.assert_allclose(law.given(np.full(256, ord("z")), every), law.marginal)


def test_levels_of_the_standard_library_are_in_order():
    # 3.0 to 3.2 and 2.3 to 2.5 nats on Python 3.11 to 3.13; in bits they would be 4.5 and 3.4.
    got = levels_of(Data(), 2048, 64)
    assert 3.0 < got.unigram < 3.2
    assert 2.3 < got.bigram < 2.5
    assert got.uniform == pytest.approx(5.5452, abs=1e-4)


def test_markov_levels_are_those_of_the_law():
    # Two states, P(0 → 1) = 1/4, P(1 → 0) = 1/2: π = (2/3, 1/3).
    two = Chain(np.array([[0.75, 0.25], [0.5, 0.5]]))
    np.testing.assert_allclose(two.stationary, [2 / 3, 1 / 3])
    assert two.entropy == pytest.approx(2 / 3 * (log(4) - 0.75 * log(3)) + 1 / 3 * log(2))
    inputs, targets = np.array([[0, 1, 1]]), np.array([[1, 1, 0]])
    got = levels.levels(two, inputs, targets, np.array([[True, True, False]]))
    assert got.uniform == pytest.approx(log(2))
    assert got.unigram == pytest.approx(log(3))
    assert got.bigram == pytest.approx((log(4) + log(2)) / 2)
    assert got.floor == two.entropy


def test_the_entropy_rate_is_what_a_long_sample_costs():
    data = Data(name="markov", vocab=32, concentration=0.3)
    got = levels_of(data, 2048, 64)
    assert got.floor is not None and got.bigram == pytest.approx(got.floor, rel=0.01)
    stationary = chain(32, 0.3, 0).stationary
    assert got.unigram == pytest.approx(-np.sum(stationary * np.log(stationary)), rel=0.01)
    assert 1.2 * got.floor < got.unigram < got.uniform


def test_rows_with_zeros_have_finite_levels():
    data = Data(name="markov", vocab=16, concentration=0.005)
    assert (chain(16, 0.005, 0).rows == 0).any()
    got = levels_of(data, 256, 64)
    assert np.isfinite([got.unigram, got.bigram, got.floor]).all()
    cycle = Chain(np.roll(np.eye(3), 1, axis=1))
    np.testing.assert_allclose(cycle.stationary, 1 / 3)
    assert cycle.entropy == 0


def test_copy_levels():
    for name in ("copy", "modk"):
        got = levels_of(Data(name=name, vocab=64, lag=1), 8, 16)
        assert (got.uniform, got.unigram, got.bigram) == pytest.approx((log(64),) * 3) and got.floor == 0
    # The last input token says nothing about the one before it: counted, the bigram level is ln V.
    x, y, mask = windows(batches.load(Data(name="copy", vocab=4, lag=1)), 512, 64)
    pairs = np.zeros((4, 4))
    np.add.at(pairs, (x[mask], y[mask]), 1)
    joint = pairs / pairs.sum()
    assert -np.sum(joint * np.log(joint / joint.sum(1, keepdims=True))) == pytest.approx(log(4), abs=1e-3)
    assert isinstance(batches.load(Data(name="copy")).source, Copy)
