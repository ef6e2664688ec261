"""Batches: a function of (seed, step) alone, of text and of synthetic tasks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normflax.config import ConfigError, Data
from normflax.data import batches, corpus, synthetic
from normflax.data.batches import Batch, Loaded, draw, heldout, load, place

COPY = Data(name="copy", vocab=7, lag=3)
MARKOV = Data(name="markov", vocab=5, concentration=0.5, table_seed=1)


def text_of(train: bytes, held: bytes = b"held-out text") -> Loaded:
    return place(corpus.from_parts("files", train, held))


def random_text(n: int, high: int = 256) -> bytes:
    return np.random.default_rng(0).integers(0, high, n, dtype=np.uint8).tobytes()


@pytest.fixture(params=["text", "copy", "markov"])
def loaded(request) -> Loaded:
    match request.param:
        case "text":
            return text_of(random_text(500))
        case "copy":
            return load(COPY)
        case "markov":
            return load(MARKOV)


compiled = jax.jit(draw, static_argnames=("task", "batch", "tokens"))


def drawn(loaded: Loaded, seed: int, step: int, batch: int = 4, tokens: int = 16) -> Batch:
    ids = compiled(loaded.task, loaded.arrays, jnp.uint32(seed), jnp.int32(step), batch, tokens)
    return Batch(*jax.device_get(ids))


def same(a, b) -> bool:
    return all((x == y).all() for x, y in zip(jax.device_get(a), jax.device_get(b), strict=True))


# ── A batch ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_batch_is_a_function_of_seed_and_step(loaded):
    forwards = [drawn(loaded, seed, step) for seed in range(2) for step in range(3)]
    backwards = [drawn(loaded, seed, step) for seed in reversed(range(2)) for step in reversed(range(3))][::-1]
    assert all(same(a, b) for a, b in zip(forwards, backwards, strict=True))
    inputs = [b.inputs.tobytes() for b in forwards]
    assert len(set(inputs)) == len(inputs)


def test_shapes_dtypes_and_ids(loaded):
    batch = drawn(loaded, 0, 0)
    for ids in batch[:2]:
        assert ids.shape == (4, 16) and ids.dtype == jnp.int32
        assert ids.min() >= 0 and ids.max() < loaded.task.vocab
    assert batch.mask.shape == (4, 16) and batch.mask.dtype == bool


def test_traced_seeds_and_steps_compile_once(loaded):
    before = compiled._cache_size()
    # A shape of its own, so that no other test has compiled it.
    batches = [drawn(loaded, seed, t, 3, 11) for seed, t in [(0, 0), (0, 1), (2**32 - 1, 0), (5, 2**31 - 1)]]
    assert compiled._cache_size() == before + 1
    assert same(batches[2], draw(loaded.task, loaded.arrays, 2**32 - 1, 0, 3, 11))


def test_lanes_draw_what_single_runs_draw(loaded):
    lanes = jax.jit(jax.vmap(lambda seed: draw(loaded.task, loaded.arrays, seed, 7, 4, 16)))(jnp.arange(3).astype("uint32"))
    for i in range(3):
        assert same([part[i] for part in lanes], drawn(loaded, i, 7))


def test_double_precision_runs_see_the_same_batches(loaded):
    single = drawn(loaded, 3, 5)
    with jax.enable_x64(True):
        double = drawn(loaded, 3, 5)
    assert double.inputs.dtype == jnp.int32
    assert same(single, double)


# ── Text ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_text_batches_are_windows_of_the_training_text_with_the_next_byte_as_target():
    text = random_text(500)
    batch = drawn(text_of(text), 1, 2, 32, 16)
    x, y, mask = map(np.asarray, batch)
    starts = [text.find(bytes(row.astype(np.uint8))) for row in x]
    assert all(text[s : s + 16] == bytes(r.astype(np.uint8)) for s, r in zip(starts, x, strict=True))
    assert all(text[s + 1 : s + 17] == bytes(r.astype(np.uint8)) for s, r in zip(starts, y, strict=True))
    assert mask.all()
    assert len(set(starts)) > 16


def test_every_window_of_the_text_is_drawn_the_first_and_the_last_too():
    loaded = text_of(bytes(range(10)))
    first = drawn(loaded, 0, 0, 2000, 4).inputs[:, 0]
    counts = np.bincount(first, minlength=6)
    assert len(counts) == 6  # windows of 5 of 10 bytes
    assert (abs(counts - 2000 / 6) < 5 * np.sqrt(2000 / 6)).all()


def test_a_training_text_shorter_than_a_window_is_an_error():
    loaded = text_of(bytes(range(17)))
    assert (drawn(loaded, 0, 0, 2, 16).targets[:, -1] == 16).all()
    with pytest.raises(ConfigError, match=r"train\.tokens=17 needs windows of 18 tokens, but the training text has 17"):
        drawn(loaded, 0, 0, 2, 17)


def test_training_never_sees_held_out_bytes():
    low, high = random_text(300, 128), bytes(b + 128 for b in random_text(300, 128))
    loaded = text_of(low, high)
    assert all(drawn(loaded, 0, t, 64, 32).targets.max() < 128 for t in range(5))
    assert heldout(loaded, 9, 32).inputs.min() >= 128


def test_held_out_windows_are_evenly_spaced_and_share_no_byte():
    x, y, mask = map(np.asarray, heldout(text_of(b"x" * 99, bytes(range(100))), 4, 10))
    assert x[:, 0].tolist() == [0, 25, 50, 75]
    assert (y == x + 1).all() and mask.all()
    assert (y[:-1, -1] < x[1:, 0]).all()


def test_held_out_windows_that_do_not_fit_are_an_error():
    loaded = text_of(b"x" * 99, bytes(100))
    assert heldout(loaded, 9, 10).inputs.shape == (9, 10)
    with pytest.raises(ConfigError, match=r"data\.windows=10 windows .* 11 tokens do not fit into 100 .* at most 9 do"):
        heldout(loaded, 10, 10)
    with pytest.raises(ConfigError, match=r"has 100 tokens, fewer than one window of train\.tokens \+ 1 = 101"):
        heldout(loaded, 1, 100)


# ── Synthetic ───────────────────────────────────────────────────────────────────────────────────────────────────────


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


def test_held_out_sequences_of_synthetic_tasks_are_fixed_and_not_a_training_batch():
    for data in (COPY, MARKOV):
        loaded = load(data)
        fixed = heldout(loaded, 4, 16)
        assert same(fixed, heldout(load(data), 4, 16))
        assert not any(same(fixed, drawn(loaded, seed, step)) for seed in range(3) for step in range(3))


def test_keys_of_different_names_differ():
    keys = [batches.named_key(seed, name) for seed in (0, 1) for name in ("batch", "heldout")]
    assert len({jax.random.key_data(key).tobytes() for key in map(jax.device_get, keys)}) == 4


@pytest.mark.parametrize("concentration", [0.0, -1.0])
def test_concentration_is_positive(concentration):
    with pytest.raises(ConfigError, match=r"data\.concentration"):
        synthetic.chain(4, concentration, 0)
