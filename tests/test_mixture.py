"""Several sources in one, a user's own tokens, sums modulo V, and chains with a longer memory."""

from itertools import product
from math import log
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny

from normflax.config import ConfigError, Data, check
from normflax.data import batches, corpus, levels, mixture, sources, synthetic
from normflax.data.batches import Batch, draw, heldout, load, place

compiled = jax.jit(draw, static_argnames=("task", "batch", "tokens"))


def drawn(loaded: batches.Loaded, step: int = 0, batch: int = 4, tokens: int = 16, seed: int = 0) -> Batch:
    return Batch(*jax.device_get(compiled(loaded.task, loaded.arrays, jnp.uint32(seed), jnp.int32(step), batch, tokens)))


def levels_of(loaded: batches.Loaded, windows: int, tokens: int) -> levels.Levels:
    return levels.levels(loaded.source, *map(np.asarray, heldout(loaded, windows, tokens)))


# ── Sums modulo V ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_target_is_the_sum_of_a_token_and_the_one_lag_places_back():
    x, y, mask = drawn(load(Data(name="modk", vocab=7, lag=3)), batch=50)
    assert mask[:, :3].sum() == 0 and mask[:, 3:].all()
    assert (y[:, 3:] == (x[:, 3:] + x[:, :-3]) % 7).all() and len(np.unique(x)) == 7
    copied = drawn(load(Data(name="copy", vocab=7, lag=3)), batch=50)
    assert (copied.inputs == x).all() and (copied.targets[:, 3:] == x[:, :-3]).all()


# ── Chains with a longer memory ─────────────────────────────────────────────────────────────────────────────────────


def test_a_chain_of_order_one_is_what_it_was():
    """Batches, held-out windows and sha256 of a fixed chain, as they were before there were other orders."""
    loaded = load(Data(name="markov", vocab=5, concentration=0.5, table_seed=1))
    assert drawn(loaded, 7, 2, 6, seed=3).inputs.tolist() == [[4, 0, 4, 0, 1, 4], [2, 3, 2, 3, 1, 4]]
    assert heldout(loaded, 2, 6).inputs.tolist() == [[4, 0, 0, 1, 4, 0], [4, 4, 0, 1, 4, 0]]
    assert loaded.sha256.startswith("c8b9c57b82fb8efd")


@pytest.mark.parametrize(("vocab", "order"), [(3, 2), (2, 3)])
def test_contexts_rest_in_the_eigenvector_of_their_chain(vocab: int, order: int):
    """Against the leading eigenvector of the whole V^k x V^k matrix, written out context by context."""
    chain = synthetic.chain(vocab, 0.5, 0, order)
    contexts = [*product(range(vocab), repeat=order)]
    whole = np.zeros((len(contexts), len(contexts)))
    for i, context in enumerate(contexts):
        for j in range(vocab):
            whole[i, contexts.index((*context[1:], j))] = chain.rows[i, j]
    values, vectors = np.linalg.eig(whole.T)
    law = np.real(vectors[:, np.argmax(np.real(values))])
    np.testing.assert_allclose(chain.contexts, law / law.sum(), atol=1e-10)
    entropy = -sum(p * sum(q * log(q) for q in row if q) for p, row in zip(law / law.sum(), chain.rows, strict=True))
    assert chain.entropy == pytest.approx(entropy)
    np.testing.assert_allclose(chain.stationary, chain.pairs.sum(1), atol=1e-12)
    np.testing.assert_allclose(chain.stationary, chain.pairs.sum(0), atol=1e-12)


def test_a_periodic_chain_comes_to_rest():
    """01 01 01 …, order 2: contexts 01 and 10 at one half each, and 00 and 11 go into them."""
    rows = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    np.testing.assert_allclose(synthetic.Chain(rows, 2).contexts, [0, 0.5, 0.5, 0], atol=1e-12)


def test_every_token_follows_its_context():
    """Order 2 over three tokens: frequencies of triples within five standard deviations of the table."""
    loaded = load(Data(name="markov", vocab=3, order=2, concentration=0.5, table_seed=2))
    x, y, mask = drawn(loaded, batch=4000, tokens=12)
    assert mask.all() and (x[:, 1:] == y[:, :-1]).all()
    counts = np.zeros((9, 3))
    np.add.at(counts, (3 * x[:, :-1] + x[:, 1:], y[:, 1:]), 1)
    n, rows = counts.sum(1, keepdims=True), loaded.source.rows
    assert (abs(counts / n - rows) <= 5 * np.sqrt(rows * (1 - rows) / n) + 1e-6).all()
    first = np.bincount(3 * x[:, 0] + x[:, 1], minlength=9) / 4000
    law = loaded.source.contexts
    assert (abs(first - law) <= 5 * np.sqrt(law * (1 - law) / 4000) + 1e-6).all()
    # The table's order matters: with the two tokens of a context swapped the check above fails.
    swapped = rows.reshape(3, 3, 3).transpose(1, 0, 2).reshape(9, 3)
    assert (abs(counts / n - swapped) > 5 * np.sqrt(swapped * (1 - swapped) / n) + 1e-6).any()


def test_levels_of_a_longer_chain_are_in_order_and_counted_right():
    loaded = load(Data(name="markov", vocab=4, order=2, concentration=0.3))
    got = levels_of(loaded, 4000, 32)
    assert got.floor is not None and got.floor < got.bigram < got.unigram < got.uniform
    x, y, _ = map(np.asarray, heldout(loaded, 4000, 32))
    pairs = np.zeros((4, 4))
    np.add.at(pairs, (x, y), 1)
    joint = pairs / pairs.sum()
    counted = -np.sum(joint * np.log(joint / joint.sum(1, keepdims=True)))
    assert got.bigram == pytest.approx(counted, rel=5e-3)


# ── A user's own tokens ─────────────────────────────────────────────────────────────────────────────────────────────

IDS = np.random.default_rng(0).integers(0, 300, 1000)


def saved(folder: Path, suffix: str, ids: np.ndarray = IDS) -> Data:
    path = folder / f"ids{suffix}"
    if suffix == ".npy":
        np.save(path, ids)
    else:
        path.write_bytes(ids.astype("<u2").tobytes())
    return Data(name="tokens", path=str(path), vocab=300, heldout=0.1)


def test_an_array_and_a_file_of_the_same_ids_are_one_corpus(tmp_path):
    one, two, three = (
        load(data) for data in (saved(tmp_path, ".bin"), saved(tmp_path, ".npy"), saved(tmp_path, ".npy", IDS.astype(np.int16)))
    )
    assert one.sha256 == two.sha256 == three.sha256 and one.source.vocab == 300
    assert one.arrays["tokens"].dtype == jnp.uint16
    np.testing.assert_array_equal(one.arrays["tokens"], IDS[:900])
    np.testing.assert_array_equal(one.source.heldout, IDS[900:])
    x, y, mask = drawn(one, tokens=8)
    text = IDS[:900].tolist()
    for row, target in zip(x.tolist(), y.tolist(), strict=True):
        assert any(text[i : i + 9] == [*row, target[-1]] for i in range(892))
    assert mask.all() and (x[:, 1:] == y[:, :-1]).all()
    changed = IDS.copy()
    changed[0] += 1
    assert load(saved(tmp_path, ".bin", changed)).sha256 != one.sha256


def test_levels_of_many_tokens_are_those_of_few(tmp_path, monkeypatch):
    """Counting in a sparse table, in blocks, gives what the dense one gives."""
    loaded = load(saved(tmp_path, ".npy", IDS % 17))
    dense = levels_of(loaded, 10, 5)
    monkeypatch.setattr(levels, "DENSE", 1)
    monkeypatch.setattr(levels, "BLOCK", 100)
    levels.law_of.cache_clear()
    sparse = levels_of(loaded, 10, 5)
    assert (sparse.unigram, sparse.bigram) == pytest.approx((dense.unigram, dense.bigram)) and sparse.floor is None


@pytest.mark.parametrize(
    ("write", "vocab", "words"),
    [
        (lambda p: np.save(p.with_suffix(".npy"), IDS), 299, ("id 299", "data.vocab - 1 = 298")),
        (lambda p: np.save(p.with_suffix(".npy"), IDS - 1), 300, ("id -1",)),
        (lambda p: np.save(p.with_suffix(".npy"), IDS / 2), 300, ("float64",)),
        (lambda p: np.save(p.with_suffix(".npy"), IDS[None]), 300, ("2 axes",)),
        (lambda p: p.with_suffix(".npy").write_bytes(b"no array"), 300, ("no .npy array",)),
        (lambda p: p.with_suffix(".bin").write_bytes(b"abc"), 300, ("3 bytes",)),
        (lambda p: p.with_suffix(".bin").write_bytes(b""), 300, ("training part", "0 of its ids")),
        (lambda p: p.with_suffix(".txt").write_bytes(b"abc"), 300, ("'.txt'", ".npy or .bin")),
    ],
)
def test_a_file_that_holds_no_ids_is_one_sentence(tmp_path, write, vocab, words):
    write(tmp_path / "ids")
    (file,) = tmp_path.iterdir()
    with pytest.raises(ConfigError) as caught:
        sources.load(Data(name="tokens", path=str(file), vocab=vocab))
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="is no file"):
        sources.load(Data(name="tokens", path=str(tmp_path / "ids.npy")))


# ── Mixtures ────────────────────────────────────────────────────────────────────────────────────────────────────────


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


def test_a_mixture_is_a_function_of_seed_and_step():
    loaded = load(Data(name="mixture", parts=["copy", "modk"], vocab=5, lag=2))
    first, again, other = drawn(loaded, 3), drawn(loaded, 3), drawn(loaded, 4)
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


def test_shares_are_whole_numbers_near_the_weights():
    assert mixture.shares(np.array([0.5, 0.3, 0.2]), 10).tolist() == [5, 3, 2]
    assert mixture.shares(np.array([1 / 3, 1 / 3, 1 / 3]), 4).sum() == 4
    assert mixture.shares(np.array([0.9, 0.1]), 3).tolist() == [3, 0]
    assert mixture.order(np.array([3, 1])).tolist() == [0, 1, 3, 2] and len(heldout(two_texts([0.99, 0.01]), 3, 4).inputs) == 3


def test_levels_of_a_mixture_are_those_of_its_pair_law():
    """Half copies of 4 tokens, half a chain of 2: p(x) and p(x, y) mix, and so do not the conditional laws."""
    chain = synthetic.Chain(np.array([[0.75, 0.25], [0.5, 0.5]]))
    loaded = place(mixture.Mixture((synthetic.Copy(4, 1), chain), np.array([0.5, 0.5])))
    law = levels.law_of(loaded.source)
    np.testing.assert_allclose(law.marginal, [1 / 8 + 1 / 3, 1 / 8 + 1 / 6, 1 / 8, 1 / 8])
    found = law.given(np.array([0, 0, 3]), np.array([1, 3, 3]))
    first = 1 / 8 + 1 / 3
    np.testing.assert_allclose(found, [(1 / 32 + 1 / 12) / first, (1 / 32) / first, 1 / 4])
    got = levels_of(loaded, 20, 10)
    assert got.uniform == pytest.approx(log(4)) and got.floor == pytest.approx(chain.entropy / 2)
    assert levels_of(two_texts([0.5, 0.5]), 4, 4).floor is None


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
        ({"parts": ["copy", "mixture"]}, ("data.parts", "mixture")),
        ({"parts": ["copy", "markow"]}, ("did you mean 'markov'",)),
        ({"parts": ["copy", "modk:x"]}, ("'modk' has none",)),
        ({"parts": ["copy", "files"]}, ("data.path",)),
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


def test_a_table_that_is_too_large_is_one_sentence():
    with pytest.raises(ConfigError, match=r"data\.order=5 with data\.vocab=64"):
        sources.load(Data(name="markov", vocab=64, order=5))
