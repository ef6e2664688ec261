"""Batches: a function of (seed, step) alone, of text and of synthetic tasks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawing import compiled, drawn, same

from normflax.config import ConfigError, Data
from normflax.data import batches, corpus, mixture
from normflax.data.batches import Loaded, draw, heldout, load, place

SYNTHETIC = {
    "copy": Data(name="copy", vocab=7, lag=3),
    "modk": Data(name="modk", vocab=7, lag=3),
    "markov": Data(name="markov", vocab=5, concentration=0.5, table_seed=1),
    "order 3": Data(name="markov", vocab=5, order=3),
}


def text_of(train: bytes, held: bytes = b"held-out text") -> Loaded:
    return place(corpus.from_parts("files", train, held))


def random_text(n: int, high: int = 256) -> bytes:
    return np.random.default_rng(0).integers(0, high, n, dtype=np.uint8).tobytes()


def token_ids() -> Loaded:
    ids = np.random.default_rng(0).integers(0, 300, 600, dtype=np.uint16)
    return place(corpus.Corpus("tokens", ids[:500], ids[500:], "sha", 300))


@pytest.fixture(params=["text", "tokens", *SYNTHETIC, "mixture"])
def loaded(request) -> Loaded:
    match request.param:
        case "text":
            return text_of(random_text(500))
        case "tokens":
            return token_ids()
        case "mixture":
            parts = [text_of(random_text(500)).source, *(load(data).source for data in SYNTHETIC.values())]
            return place(mixture.Mixture((*parts,), np.full(len(parts), 1 / len(parts))))
    return load(SYNTHETIC[request.param])


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
    with pytest.raises(ConfigError, match=r"data\.windows=10 takes 10 windows .* 11 tokens .* 100 .* at most 9 do"):
        heldout(loaded, 10, 10)
    with pytest.raises(ConfigError, match=r"has 100 tokens, fewer than one window of train\.tokens \+ 1 = 101"):
        heldout(loaded, 1, 100)


# ── Keys ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_keys_of_different_names_differ():
    keys = [batches.named_key(seed, name) for seed in (0, 1) for name in ("batch", "heldout")]
    assert len({jax.random.key_data(key).tobytes() for key in map(jax.device_get, keys)}) == 4
