"""Several sources in one: shares, held-out windows, levels, and what is no mixture."""

from collections import Counter
from itertools import pairwise
from math import log

import numpy as np
import pytest
from drawing import drawn, levels_of, same
from tiny import tiny

from normflax.config import ConfigError, Data, check
from normflax.data import batches, corpus, levels, mixture, sources, synthetic
from normflax.data.batches import heldout, load, place


def two_texts(weights: list[float]) -> batches.Loaded:
    """One text of small letters and one of capitals."""
    parts = [corpus.from_parts("files", letters * 30, letters * 5) for letters in (b"abcdefghij", b"QRSTUV")]
    return place(mixture.Mixture((*parts,), np.array(weights)))


def test_each_sequence_comes_from_one_part_and_as_often_as_its_weight_says():
    x, y, _ = drawn(two_texts([0.8, 0.2]), batch=5000, tokens=8)
    small = x >= ord("a")
    assert (small.all(1) | (~small).all(1)).all() and ((y >= ord("a")) == small).all()
    assert abs(small[:, 0].mean() - 0.8) < 5 * np.sqrt(0.16 / 5000)
    assert len({bytes(row.astype(np.uint8)) for row in x}) == 16  # windows of all places of both


def test_three_parts_share_the_sequences_as_their_weights_say():
    """Pearson's chi-square of 20 batches of 500: below 20.5 in all but one of 28000 draws with two degrees of freedom."""
    parts = [corpus.from_parts("files", letter * 50, letter * 50) for letter in (b"a", b"b", b"c")]
    weights = np.array([0.6, 0.3, 0.1])
    loaded = place(mixture.Mixture((*parts,), weights))
    first = np.concatenate([drawn(loaded, seed, step, 500, 2).inputs[:, 0] for seed in range(4) for step in range(5)])
    counts = np.bincount(first, minlength=100)[97:100]
    assert counts.sum() == 10_000 and np.sum((counts - 10_000 * weights) ** 2 / (10_000 * weights)) < 20.5
    assert set(drawn(place(mixture.Mixture((*parts,), np.array([0.0, 1.0, 0.0]))), batch=500, tokens=2).inputs.ravel()) == {98}


def test_each_sequence_is_one_that_its_part_alone_can_give():
    """Windows of a text in order, sums with their mask, and a chain that only counts upwards."""
    counting = synthetic.Chain(np.roll(np.eye(6), 1, axis=1))
    text = corpus.from_parts("files", bytes(range(100, 160)), bytes(range(200, 230)))
    loaded = place(mixture.Mixture((text, synthetic.ModK(60, 2), counting), np.full(3, 1 / 3)))
    x, y, mask = drawn(loaded, batch=600, tokens=8)
    of_text, of_chain = (x >= 100).all(1), ((x < 6) & (mask.all(1, keepdims=True))).all(1)
    of_sums = ~of_text & ~of_chain
    assert all(140 < part.sum() < 260 for part in (of_text, of_chain, of_sums))
    for kind in (of_text, of_chain):
        assert mask[kind].all() and (x[kind][:, 1:] == y[kind][:, :-1]).all()
    assert (y[of_text] == x[of_text] + 1).all() and y[of_text].max() <= 159
    assert (y[of_chain] == (x[of_chain] + 1) % 6).all()
    assert not mask[of_sums][:, :2].any() and mask[of_sums][:, 2:].all() and x[of_sums].max() < 60
    assert (y[of_sums][:, 2:] == (x[of_sums][:, 2:] + x[of_sums][:, :-2]) % 60).all()


def test_a_mixture_is_a_function_of_seed_and_step():
    loaded = load(Data(name="mixture", parts=["copy", "modk"], vocab=5, lag=2))
    first, again, other = drawn(loaded, step=3), drawn(loaded, step=3), drawn(loaded, step=4)
    assert all((a == b).all() for a, b in zip(first, again, strict=True)) and (first.inputs != other.inputs).any()
    x, y, mask = drawn(loaded, batch=400)
    assert not mask[:, :2].any() and mask[:, 2:].all()
    copied = (y[:, 2:] == x[:, :-2]).all(1)
    summed = (y[:, 2:] == (x[:, 2:] + x[:, :-2]) % 5).all(1)
    assert (copied | summed).all() and 150 < copied.sum() < 250


def test_held_out_windows_are_the_parts_own_in_their_shares():
    loaded = two_texts([0.75, 0.25])
    x = np.asarray(heldout(loaded, 8, 4).inputs)
    own = [np.asarray(heldout(place(part), n, 4).inputs) for part, n in zip(loaded.source.parts, (6, 2), strict=True)]
    assert sorted(map(tuple, x.tolist())) == sorted(map(tuple, np.concatenate(own).tolist()))
    small = x[:, 0] >= ord("a")
    assert small[:4].sum() == 3 and small.sum() == 6
    assert (x[small] == own[0]).all() and (x[~small] == own[1]).all()  # each part's in their own order
    assert same(heldout(loaded, 8, 4), heldout(two_texts([0.75, 0.25]), 8, 4))


def test_held_out_windows_keep_the_masks_of_their_parts():
    chain = synthetic.chain(5, 0.5, 0)
    found = heldout(place(mixture.Mixture((synthetic.Copy(5, 2), chain), np.array([0.5, 0.5]))), 6, 8)
    for rows, part in ((slice(0, None, 2), synthetic.Copy(5, 2)), (slice(1, None, 2), chain)):
        assert same([x[rows] for x in found], heldout(place(part), 3, 8))


def test_a_part_that_holds_too_few_windows_is_named():
    loaded = place(mixture.Mixture((corpus.from_parts("files", b"x" * 99, b"y" * 30), synthetic.Copy(5, 1)), np.full(2, 0.5)))
    with pytest.raises(ConfigError, match=r"data\.windows=8 takes 4 windows .* 10 tokens from files, .* 30 .* at most 3 do"):
        heldout(loaded, 8, 9)


def test_shares_are_whole_numbers_near_the_weights():
    assert mixture.shares(np.array([0.5, 0.3, 0.2]), 10).tolist() == [5, 3, 2]
    assert mixture.shares(np.array([1 / 3, 1 / 3, 1 / 3]), 4).sum() == 4
    assert mixture.shares(np.array([0.9, 0.1]), 3).tolist() == [3, 0]
    assert mixture.order(np.array([3, 1])).tolist() == [0, 1, 3, 2] and len(heldout(two_texts([0.99, 0.01]), 3, 4).inputs) == 3


def test_levels_of_a_mixture_are_those_of_its_pair_law():
    """Half copies of 4 tokens, half a chain of 2: p(x) and p(x, y) mix, and so do not the conditional laws."""
    chain = synthetic.Chain(np.array([[0.75, 0.25], [0.5, 0.5]]))
    loaded = place(mixture.Mixture((synthetic.Copy(4, 1), chain), np.array([0.5, 0.5])))
    # Of two tokens a copy has one valid target and the chain two: 1/3 and 2/3 of the targets.
    law = levels.law_of(loaded.source, 2)
    np.testing.assert_allclose(law.marginal, [1 / 12 + 4 / 9, 1 / 12 + 2 / 9, 1 / 12, 1 / 12])
    found = law.given(np.array([0, 0, 3]), np.array([1, 3, 3]))
    first = 1 / 12 + 4 / 9
    np.testing.assert_allclose(found, [(1 / 48 + 1 / 9) / first, (1 / 48) / first, 1 / 4])
    got = levels_of(loaded, 20, 10)  # 9 of 19 targets and 10 of 19
    assert got.uniform == pytest.approx(log(4)) and got.floor == pytest.approx(chain.entropy * 10 / 19)
    assert levels_of(two_texts([0.5, 0.5]), 4, 4).floor is None


def test_the_law_of_a_mixture_is_what_its_batches_show():
    """Pairs of input and valid target, counted in training sequences of which half are half without targets."""
    chain = synthetic.chain(4, 0.5, 0, 2)
    loaded = place(mixture.Mixture((synthetic.ModK(5, 4), chain), np.array([0.7, 0.3])))
    x, y, mask = drawn(loaded, batch=40_000, tokens=8)
    counts = np.zeros((5, 5))
    np.add.at(counts, (x[mask], y[mask]), 1)
    n = counts.sum()
    law = levels.law_of(loaded.source, 8)
    i, j = np.indices((5, 5)).reshape(2, -1)
    joint = (law.inputs[i] * law.given(i, j)).reshape(5, 5)
    # The targets of one sequence depend on each other, so the spread is that of its 8 counted as one.
    assert (abs(counts / n - joint) < 5 * np.sqrt(8 * joint / n)).all()
    np.testing.assert_allclose(joint.sum(0), law.marginal)
    np.testing.assert_allclose(joint.sum(1), law.inputs)
    by_sequence = 0.7 * 0.2 + 0.3 * chain.stationary
    share = np.bincount(y[mask], minlength=5)[:4] / n
    assert (abs(share - by_sequence) > 5 * np.sqrt(8 * by_sequence / n)).any()  # the weights are not the shares of the targets


def test_levels_of_two_texts_equal_slow_counts():
    """Each text's smoothed counts, mixed before they are divided."""
    loaded = two_texts([0.75, 0.25])
    ones, firsts, twos = [], [], []
    for part in loaded.source.parts:
        text = part.train.tolist()
        n = len(text)
        ones.append({y: (Counter(text)[y] + 1) / (n + 256) for y in range(256)})
        firsts.append(Counter(text[:-1]))
        twos.append(Counter(pairwise(text)))

    def pair(i, x, y):
        return ones[i][x] * (twos[i][x, y] + 64 * ones[i][y]) / (firsts[i][x] + 64)

    x, y, _ = map(np.asarray, heldout(loaded, 4, 5))
    pairs = list(zip(x.ravel().tolist(), y.ravel().tolist(), strict=True))
    one = [0.75 * ones[0][b] + 0.25 * ones[1][b] for _, b in pairs]
    two = [(0.75 * pair(0, a, b) + 0.25 * pair(1, a, b)) / (0.75 * ones[0][a] + 0.25 * ones[1][a]) for a, b in pairs]
    got = levels_of(loaded, 4, 5)
    assert got.unigram == pytest.approx(-np.mean(np.log(one))) and got.bigram == pytest.approx(-np.mean(np.log(two)))


@pytest.mark.parametrize("order", [1, 2])
def test_a_token_that_one_part_never_has_leaves_the_levels_finite(order):
    """The chain stays at 0, and the copies have 1 too."""
    stays = synthetic.Chain(np.tile([1.0, 0.0], (2**order, 1)), order)
    got = levels_of(place(mixture.Mixture((synthetic.Copy(2, 1), stays), np.full(2, 0.5))), 40, 8)
    assert np.isfinite([got.unigram, got.bigram]).all() and got.floor == pytest.approx(0, abs=1e-12)


def test_a_model_that_is_told_the_part_reaches_the_floor_and_no_other_goes_below():
    """Two chains of opposite habits: told which, the loss is the floor; the mixture's best guess from all seen so far is above."""
    rows = [np.array([[0.9, 0.1], [0.1, 0.9]]), np.array([[0.1, 0.9], [0.9, 0.1]])]
    loaded = place(mixture.Mixture((synthetic.Chain(rows[0]), synthetic.Chain(rows[1])), np.full(2, 0.5)))
    x, y, _ = map(np.asarray, heldout(loaded, 4000, 16))
    p = np.stack([row[x, y] for row in rows])
    sequence = np.log(np.exp(np.log(p).sum(2)).mean(0)).sum() / x.size  # ln of the mean over parts of P(sequence)
    told = np.log(p).mean(2)
    best = np.where(np.arange(4000) % 2 == 0, *told).mean()
    got = levels_of(loaded, 4000, 16)
    assert got.floor == pytest.approx(-best, rel=0.02) and got.floor == pytest.approx(-0.9 * log(0.9) - 0.1 * log(0.1))
    assert got.floor < -sequence < got.floor + log(2) / 16 + 0.005 < got.bigram


def test_a_mixture_is_named_by_its_parts_and_weights():
    shas = {
        sources.load(Data(name="mixture", parts=parts, weights=weights, vocab=5)).sha256
        for parts in (["copy", "modk"], ["modk", "copy"])
        for weights in ([], [1.0, 2.0])
    }
    assert len(shas) == 4
    equal = Data(name="mixture", parts=["copy", "modk"], weights=[3.0, 3.0])
    assert sources.load(equal).sha256 == sources.load(Data(name="mixture", parts=["copy", "modk"])).sha256


def test_a_part_may_have_a_path_of_its_own(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).write_text(name * 100)
    data = Data(name="mixture", parts=[f"files:{tmp_path / 'one'}", "files"], path=str(tmp_path / "two"))
    one, two = sources.load(data).parts
    assert bytes(one.train[:3]) == b"one" and bytes(two.train[:3]) == b"two"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parts": ["copy"]}, ("data.parts", "at least two")),
        ({"parts": []}, ("data.parts", "at least two")),
        ({"parts": ["copy", "mixture"]}, ("data.parts", "no part of another")),
        ({"parts": ["copy", "markow"]}, ("did you mean 'markov'",)),
        ({"parts": ["copy", "modk:x"]}, ("'modk' has none",)),
        ({"parts": ["copy", "files"]}, ("data.path",)),
        ({"parts": ["files:text", "files"]}, ("data.path",)),
        ({"parts": ["copy", "tokens:"]}, ("data.path",)),
        ({"parts": ["copy", "modk"], "weights": [float("nan"), 1.0]}, ("data.weights",)),
        ({"parts": ["copy", "modk"], "weights": [float("inf"), 1.0]}, ("data.weights",)),
        ({"parts": ["copy", "modk"], "weights": [1.0, 1.0, 1.0]}, ("data.weights", "2 parts")),
        ({"parts": ["copy", "modk"], "weights": [1.0]}, ("data.weights",)),
        ({"parts": ["copy", "modk"], "weights": [1.0, -1.0]}, ("data.weights",)),
        ({"parts": ["copy", "modk"], "weights": [0.0, 0.0]}, ("data.weights",)),
        ({"parts": ["stdlib", "modk"], "lag": 99}, ("data.lag=99",)),
        ({"name": "markov", "order": 9}, ("data.order=9", "train.tokens=8")),
    ],
)
def test_a_mixture_that_is_none_is_one_sentence(changes, words):
    settings = {"name": "mixture"} | changes
    with pytest.raises(ConfigError) as caught:
        check(tiny(**{f"data__{key}": value for key, value in settings.items()}))
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)
