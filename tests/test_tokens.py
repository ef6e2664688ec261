"""A user's own token ids: what is read, what is refused, and levels of many kinds of token."""

from collections import Counter
from itertools import pairwise
from math import log
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from drawing import drawn, levels_of, same
from tiny import tiny

from normflax.config import ConfigError, Data, check
from normflax.data import levels, sources
from normflax.data.batches import load
from normflax.sweep.identity import run_id

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


@pytest.mark.parametrize("kind", ["<u2", ">u2", "i2", "u4", "i4", "i8", "u8"])
def test_every_kind_of_integer_is_the_same_ids(tmp_path, kind):
    found, plain = load(saved(tmp_path, ".npy", IDS.astype(kind))), load(saved(tmp_path, ".bin"))
    assert found.sha256 == plain.sha256 and found.arrays["tokens"].dtype == jnp.uint16
    assert same(drawn(found), drawn(plain))


@pytest.mark.parametrize(
    ("vocab", "kind"), [(256, jnp.uint8), (257, jnp.uint16), (65536, jnp.uint16), (65537, jnp.int32), (2**30, jnp.int32)]
)
def test_ids_are_as_small_on_the_device_as_they_fit(tmp_path, vocab, kind):
    np.save(tmp_path / "ids.npy", IDS % 256)
    loaded = load(Data(name="tokens", path=str(tmp_path / "ids.npy"), vocab=vocab))
    assert loaded.arrays["tokens"].dtype == kind and loaded.task.vocab == vocab
    np.testing.assert_array_equal(loaded.arrays["tokens"], IDS[:900] % 256)


def test_a_vocabulary_past_32_bits_is_one_sentence():
    with pytest.raises(ConfigError, match=r"data\.vocab=1073741825 .* at most 1073741824"):
        check(tiny(data__vocab=2**30 + 1))


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_ids_stay_on_disk_and_batches_do_not(tmp_path, suffix):
    """The file is mapped; what is trained on is a copy, which no later edit of the file reaches."""
    data = saved(tmp_path, suffix, IDS.astype(np.uint16))
    loaded = load(data)
    assert isinstance(loaded.source.train, np.memmap) and isinstance(loaded.source.heldout, np.memmap)
    before = drawn(loaded)
    with open(data.path or "", "r+b") as file:
        file.seek(-1600, 2)
        file.write(bytes(1600))
    assert (loaded.source.train[200:] == 0).all() and same(drawn(loaded), before)


def test_the_ids_are_in_the_name_of_the_run_and_their_place_is_not(tmp_path):
    def found(data: Data) -> str:
        return run_id(tiny(data=data))

    one, two = saved(tmp_path, ".bin"), saved(tmp_path, ".npy")
    assert found(one) == found(two)
    assert found(saved(tmp_path, ".npy", IDS[::-1])) != found(one)


def test_levels_of_many_kinds_of_token_equal_slow_counts(tmp_path):
    """5000 kinds, too many for a table of all pairs."""
    ids = np.random.default_rng(1).zipf(1.3, 4000).clip(max=5000) - 1
    np.save(tmp_path / "ids.npy", ids)
    loaded = load(Data(name="tokens", path=str(tmp_path / "ids.npy"), vocab=5000, heldout=0.25))
    text, held = ids[:3000].tolist(), ids[3000:].tolist()
    ones, twos, firsts = Counter(text), Counter(pairwise(text)), Counter(text[:-1])

    def p(y):
        return (ones[y] + 1) / (3000 + 5000)

    windows = [held[i * 100 : i * 100 + 11] for i in range(10)]
    pairs = [pair for window in windows for pair in pairwise(window)]
    got = levels_of(loaded, 10, 10)
    assert got.uniform == pytest.approx(log(5000)) and got.floor is None
    assert got.unigram == pytest.approx(-np.mean([log(p(y)) for _, y in pairs]))
    assert got.bigram == pytest.approx(-np.mean([log((twos[x, y] + 64 * p(y)) / (firsts[x] + 64)) for x, y in pairs]))


def test_levels_of_many_tokens_are_those_of_few(tmp_path, monkeypatch):
    """Counting in a sparse table, in blocks, gives what the dense one gives."""
    loaded = load(saved(tmp_path, ".npy", IDS % 17))
    dense = levels_of(loaded, 10, 5)
    monkeypatch.setattr(levels, "DENSE", 1)
    monkeypatch.setattr(levels, "BLOCK", 100)
    levels.law_of_one.cache_clear()
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
        (lambda p: np.save(p.with_suffix(".npy"), np.array([1, "a"], object)), 300, ("no .npy array", "objects")),
        (lambda p: np.save(p.with_suffix(".npy"), IDS > 5), 300, ("bool",)),
        (lambda p: np.save(p.with_suffix(".npy"), np.int64(5)), 300, ("0 axes",)),
        (lambda p: np.save(p.with_suffix(".npy"), np.array([2**64 - 1], np.uint64).repeat(99)), 300, ("id 18446744073709551615",)),
        (lambda p: np.save(p.with_suffix(".npy"), IDS[:0]), 300, ("training part", "0 of its ids")),
        (lambda p: np.save(p.with_suffix(".npy"), IDS[:9]), 300, ("held-out part", "0 of its ids")),
        (lambda p: p.with_suffix(".npy").write_bytes(b"PK\x03\x04 is how an archive begins"), 300, ("no .npy array",)),
        (lambda p: p.with_suffix(".npy").write_bytes(b""), 300, ("no .npy array",)),
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
