"""Synthetic tasks: copies, sums modulo V, and Markov chains of any order, against their laws."""

from itertools import product
from math import log

import jax.numpy as jnp
import numpy as np
import pytest
from drawing import drawn, levels_of, same

from normflax.config import ConfigError, Data
from normflax.data import batches, sources, synthetic
from normflax.data.batches import Task, heldout, load

COPY = Data(name="copy", vocab=7, lag=3)
MARKOV = Data(name="markov", vocab=5, concentration=0.5, table_seed=1)


# ── Copies and sums ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_copy_targets_lie_lag_back_and_the_first_are_not_valid():
    x, y, mask = drawn(load(COPY), 0, 0, 2, 5)
    for b in range(2):
        assert mask[b].tolist() == [False, False, False, True, True]
        assert y[b, 3] == x[b, 0] and y[b, 4] == x[b, 1]
    assert drawn(load(COPY), 0, 0, 2, 3).mask.sum() == 0


def test_copy_tokens_are_uniform():
    counts = np.bincount(drawn(load(COPY), 0, 0, 100, 700).inputs.ravel(), minlength=7)
    assert len(counts) == 7
    assert (abs(counts - 10_000) < 500).all()


def test_a_target_is_the_sum_of_a_token_and_the_one_lag_places_back():
    x, y, mask = drawn(load(Data(name="modk", vocab=7, lag=3)), batch=50)
    assert mask[:, :3].sum() == 0 and mask[:, 3:].all()
    assert (y[:, 3:] == (x[:, 3:] + x[:, :-3]) % 7).all() and len(np.unique(x)) == 7
    copied = drawn(load(Data(name="copy", vocab=7, lag=3)), batch=50)
    assert (copied.inputs == x).all() and (copied.targets[:, 3:] == x[:, :-3]).all()


def test_sums_by_hand(monkeypatch):
    """Modulo 5, two places back: 4 + 3 = 7 = 2, 0 + 1 = 1, 4 + 4 = 8 = 3."""
    monkeypatch.setattr(batches.jax.random, "randint", lambda *_: jnp.array([[3, 1, 4, 0, 4]], jnp.int32))
    _, y, mask = batches.sample_pairs(Task("modk", 5, lag=2), batches.named_key(0, "batch"), 1, 5)
    assert y[0, 2:].tolist() == [2, 1, 3] and mask.tolist() == [[False, False, True, True, True]]


def test_a_token_alone_says_nothing_of_a_sum():
    """Given either of its two terms, a sum is uniform; given both it is certain."""
    x, y, _ = drawn(load(Data(name="modk", vocab=4, lag=1)), batch=200, tokens=101)
    for term in (x[:, 1:], x[:, :-1]):
        counts = np.zeros((4, 4))
        np.add.at(counts, (term, y[:, 1:]), 1)
        assert (abs(counts - 20_000 / 16) < 5 * np.sqrt(20_000 / 16)).all()


def test_held_out_sequences_of_synthetic_tasks_are_fixed_and_not_a_training_batch():
    for data in (COPY, MARKOV, Data(name="modk", vocab=7, lag=3), Data(name="markov", vocab=3, order=2)):
        loaded = load(data)
        fixed = heldout(loaded, 4, 16)
        assert same(fixed, heldout(load(data), 4, 16))
        assert not any(same(fixed, drawn(loaded, seed, step)) for seed in range(3) for step in range(3))


# ── Chains ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_chain_follows_its_rows_from_its_stationary_law():
    loaded = load(MARKOV)
    chain = loaded.source
    x, y, mask = drawn(loaded, 0, 0, 4000, 20)
    assert mask.all() and (x[:, 1:] == y[:, :-1]).all()
    pairs = np.zeros((5, 5))
    np.add.at(pairs, (x, y), 1)
    n = pairs.sum(1, keepdims=True)
    assert (abs(pairs / n - chain.rows) <= 5 * np.sqrt(chain.rows * (1 - chain.rows) / n) + 1e-6).all()
    sd = np.sqrt(chain.stationary * (1 - chain.stationary) / 4000)
    for t in (0, 19):  # stationary from the first token on
        assert (abs(np.bincount(x[:, t], minlength=5) / 4000 - chain.stationary) <= 5 * sd).all()
    assert abs(chain.stationary - 0.2).max() > 0.1  # the seed's law is not uniform, so the check above can fail


def test_chain_is_a_law_drawn_from_its_table_seed():
    chain = synthetic.chain(64, 0.3, 0)
    np.testing.assert_allclose(chain.rows.sum(1), 1)
    np.testing.assert_allclose(chain.stationary @ chain.rows, chain.stationary, atol=1e-12)
    np.testing.assert_allclose(np.linalg.matrix_power(chain.rows, 500)[3], chain.stationary, atol=1e-12)
    # Dirichlet(c) over V has E p² = (c + 1)/(V(cV + 1)).
    np.testing.assert_allclose((chain.rows**2).mean(), 1.3 / (64 * (0.3 * 64 + 1)), rtol=0.05)
    assert (chain.rows == synthetic.chain(64, 0.3, 0).rows).all()
    assert (chain.rows != synthetic.chain(64, 0.3, 1).rows).any()


@pytest.mark.parametrize("concentration", [0.0, -1.0])
def test_concentration_is_positive(concentration):
    with pytest.raises(ConfigError, match=r"data\.concentration"):
        synthetic.chain(4, concentration, 0)


def test_a_chain_of_order_one_is_what_it_was():
    """Batches, held-out windows and sha256 of a fixed chain, as they were before there were other orders."""
    loaded = load(Data(name="markov", vocab=5, concentration=0.5, table_seed=1))
    assert drawn(loaded, 3, 7, 2, 6).inputs.tolist() == [[4, 0, 4, 0, 1, 4], [2, 3, 2, 3, 1, 4]]
    assert heldout(loaded, 2, 6).inputs.tolist() == [[4, 0, 0, 1, 4, 0], [4, 4, 0, 1, 4, 0]]
    assert loaded.sha256.startswith("c8b9c57b82fb8efd")


@pytest.mark.parametrize("few", [0, 512])
@pytest.mark.parametrize(("vocab", "order"), [(2, 2), (3, 2), (2, 3), (4, 4)])
def test_contexts_rest_in_the_eigenvector_of_their_chain(monkeypatch, vocab: int, order: int, few: int):
    """Against the leading eigenvector of the whole V^k x V^k matrix, written out context by context, in both ways."""
    monkeypatch.setattr(synthetic, "FEW", few)
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


@pytest.mark.parametrize("few", [0, 512])
def test_a_periodic_chain_comes_to_rest(monkeypatch, few):
    """01 01 01 …, order 2: contexts 01 and 10 at one half each, and 00 and 11 go into them."""
    monkeypatch.setattr(synthetic, "FEW", few)
    rows = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    np.testing.assert_allclose(synthetic.Chain(rows, 2).contexts, [0, 0.5, 0.5, 0], atol=1e-12)


@pytest.mark.parametrize("order", [12, 14])
def test_a_chain_of_many_contexts_that_mixes_slowly_is_at_rest(order):
    """Tens of thousands of steps leave these 4096 and 16384 contexts far from it."""
    chain = synthetic.chain(2, 0.3, 0, order)
    law, rows = chain.contexts, chain.rows
    moved = np.zeros(2**order)
    np.add.at(moved, (np.arange(2**order)[:, None] * 2 + np.arange(2)) % 2**order, law[:, None] * rows)
    assert law.min() >= 0 and law.sum() == pytest.approx(1) and abs(moved - law).sum() < 1e-12


def test_a_chain_whose_law_is_not_found_is_one_sentence():
    """So peaked that its parts hardly touch: never a law that is none."""
    with pytest.raises(ConfigError, match=r"data\.vocab=2 and 1024 contexts .* raise data\.concentration") as caught:
        _ = synthetic.chain(2, 0.02, 0, 10).contexts
    assert "\n" not in str(caught.value)


def test_a_token_that_never_comes_leaves_no_level_undefined():
    """Order 2 over three tokens, of which the last never comes: all contexts lead to 0 or 1."""
    chain = synthetic.Chain(np.tile([0.5, 0.5, 0.0], (9, 1)), 2)
    np.testing.assert_allclose(chain.after, [[0.5, 0.5, 0], [0.5, 0.5, 0], [1 / 3] * 3], atol=1e-9)


@pytest.mark.parametrize(("vocab", "order"), [(2, 1), (2, 3), (3, 3)])
def test_runs_of_tokens_are_as_frequent_as_the_law_says(vocab, order):
    """The k + 1 tokens at the start and at the end of a sequence, as one number: P(run) = P(context) P(token | context)."""
    loaded = load(Data(name="markov", vocab=vocab, order=order, concentration=0.7, table_seed=3))
    x, y, _ = drawn(loaded, batch=20_000, tokens=7)
    every = np.concatenate([x, y[:, -1:]], 1)
    law = (loaded.source.contexts[:, None] * loaded.source.rows).ravel()
    for run in (every[:, : order + 1], every[:, -order - 1 :]):
        codes = run @ vocab ** np.arange(order, -1, -1)
        share = np.bincount(codes, minlength=law.size) / len(codes)
        assert (abs(share - law) <= 5 * np.sqrt(law * (1 - law) / len(codes)) + 1e-4).all()


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


def test_a_table_that_is_too_large_is_one_sentence():
    with pytest.raises(ConfigError, match=r"data\.order=5 with data\.vocab=64"):
        sources.load(Data(name="markov", vocab=64, order=5))
    with pytest.raises(ConfigError, match=r"64\^4001 probabilities"):  # whose digits Python refuses to write
        sources.load(Data(name="markov", vocab=64, order=4000))
