"""Sources and batches: which bytes train, which are held out, and that a batch is a function of (seed, step) alone."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normflax.checks import CHOICES
from normflax.config import ConfigError, Data
from normflax.data import batches, corpus, files, sources, stdlib, synthetic
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
    with pytest.raises(ConfigError, match=r"train\.tokens=17 needs windows of 18 bytes, but the training text has 17"):
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
    with pytest.raises(ConfigError, match=r"data\.windows=10 windows .* 11 bytes do not fit into 100 .* at most 9 do"):
        heldout(loaded, 10, 10)
    with pytest.raises(ConfigError, match=r"has 100 bytes, fewer than one window of train\.tokens \+ 1 = 101"):
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


# ── Corpora ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_file_is_wholly_in_one_part():
    sizes = [(f"{i}.txt", 50 + i) for i in range(100)]
    texts = [(path, bytes([i]) * size) for i, (path, size) in enumerate(sizes)]
    made = corpus.from_files("files", texts, 0.2)
    assert not set(made.train.tolist()) & set(made.heldout.tolist())
    assert len(made.train) + len(made.heldout) == sum(size for _, size in sizes)
    assert (np.diff(made.train.astype(int)) >= 0).all()  # in the order given
    held = corpus.split_files(sizes, 0.2)
    assert held == {path for path, text in texts if text[0] in made.heldout}


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_the_held_out_share_is_met_by_files(share):
    sizes = [(f"{i}", int(size)) for i, size in enumerate(np.random.default_rng(0).lognormal(8, 1.5, 500))]
    held = corpus.split_files(sizes, share)
    total = sum(size for _, size in sizes)
    assert abs(sum(size for path, size in sizes if path in held) / total - share) < 0.01
    assert held == corpus.split_files(sizes[::-1], share)
    assert held != corpus.split_files([(f"other/{path}", size) for path, size in sizes], share)


def test_one_byte_and_the_place_of_the_split_change_the_sha256():
    shas = [corpus.from_parts("files", *parts).sha256 for parts in [(b"abc", b"de"), (b"abd", b"de"), (b"abc", b"df")]]
    shas += [corpus.from_parts("files", b"ab", b"cde").sha256]
    assert len(set(shas)) == 4
    assert corpus.from_parts("other", b"abc", b"de").sha256 == shas[0]


def test_the_sha256_of_synthetic_tasks_names_their_law():
    tasks = [Data(name="copy", vocab=v, lag=lag) for v, lag in [(7, 1), (7, 2), (8, 1)]]
    tasks += [Data(name="markov", vocab=7, table_seed=seed) for seed in (0, 1)]
    assert len({sources.load(data).sha256 for data in tasks}) == 5
    assert load(MARKOV).sha256 == load(MARKOV).sha256 and load(MARKOV).name == "markov"


def test_a_part_is_never_empty():
    with pytest.raises(ConfigError, match=r"data\.heldout leaves the held-out part of data\.name=files empty"):
        corpus.from_tail("files", b"abc", 0.1)
    with pytest.raises(ConfigError, match=r"training part"):
        corpus.from_tail("files", b"abc", 1.0)


def test_names_are_the_config_s():
    assert CHOICES["data.name"] == sources.NAMES
    with pytest.raises(ConfigError, match="did you mean 'markov'"):
        sources.load(Data(name="markow"))


# ── Files ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_one_file_is_split_at_its_end(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(bytes(range(100)))
    made = files.load(str(file), 0.1)
    assert made.name == "files" and made.vocab == 256
    assert made.train.tolist() == list(range(90)) and made.heldout.tolist() == list(range(90, 100))


def test_a_folder_is_read_with_its_folders_and_without_hidden_files(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for path, text in [("c.txt", b"ccc"), ("b/a.txt", b"bb"), ("a.md", b"aaaaa"), (".x", b"!"), (".git/config", b"!")]:
        (tmp_path / path).write_bytes(text)
    made = files.load(str(tmp_path), 0.3)
    assert made.train.tobytes() == b"aaaaabb" and made.heldout.tobytes() == b"ccc"
    assert files.load(str(tmp_path / "**" / "*.txt"), 0.2).train.tobytes() == b"bbcc"
    assert files.load(str(tmp_path / "*.txt"), 0.4).train.tobytes() == b"cc"


def test_many_files_are_split_by_file_wherever_they_lie(tmp_path):
    parts = []
    for folder in ("here", "elsewhere/deep"):
        (tmp_path / folder).mkdir(parents=True)
        for i in range(40):
            (tmp_path / folder / f"{i}.txt").write_bytes(bytes([i]) * 100)
        parts += [files.load(str(tmp_path / folder), 0.1), files.load(str(tmp_path / folder / "*.txt"), 0.1)]
    assert len({part.sha256 for part in parts}) == 1
    assert len(parts[0].heldout) == 400
    assert not set(parts[0].train.tolist()) & set(parts[0].heldout.tolist())


def test_a_path_may_hold_glob_characters_and_a_tilde(tmp_path, monkeypatch):
    (tmp_path / "a[1].txt").write_bytes(b"0123456789")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(files.load(str(tmp_path / "a[1].txt"), 0.1).train) == 9
    assert len(files.load("~/a[1].txt", 0.1).train) == 9


def test_a_path_without_text_is_one_sentence(tmp_path):
    for path in ("none.txt", "*.none"):
        with pytest.raises(ConfigError, match=r"data\.path=.*none.* names no file") as error:
            files.load(str(tmp_path / path), 0.1)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="names no file"):
        files.load(str(tmp_path), 0.1)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ConfigError, match=r"data\.path=.* holds no text"):
        files.load(str(tmp_path), 0.1)
    with pytest.raises(ConfigError, match=r"needs data\.path"):
        files.load(None, 0.1)


# ── The standard library ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_standard_library_is_code_that_people_wrote():
    texts = dict(stdlib.sources())
    paths = list(texts)
    assert paths == sorted(paths)
    assert 5e6 < sum(map(len, texts.values())) < 15e6
    assert {"os.py", "json/decoder.py", "unittest/case.py", "doctest.py"} <= set(paths)
    folders = {part for path in paths for part in Path(path).parts[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}
    names = {Path(path).name for path in paths}
    assert not [n for n in names if n.startswith(("test_", "_sysconfigdata")) or not n.endswith(".py")]
    generated = {"keyword.py", "token.py", "stringprep.py", "re/_casefix.py", "_opcode_metadata.py", "html/entities.py"}
    assert not generated & set(paths)
    assert not [p for p in paths if b"gencodec" in texts[p]]


def test_the_standard_library_is_split_by_file():
    texts = stdlib.sources()
    made = stdlib.load(0.1)
    held = corpus.split_files([(path, len(text)) for path, text in texts], 0.1)
    assert made.heldout.tobytes() == b"".join(text for path, text in texts if path in held)
    assert made.train.tobytes() == b"".join(text for path, text in texts if path not in held)
    assert abs(len(made.heldout) / (len(made.heldout) + len(made.train)) - 0.1) < 0.005
    assert stdlib.load(0.1) is made


def test_a_corpus_is_the_same_in_another_process_and_needs_no_jax(tmp_path):
    code = (
        "import sys, normflax.data.levels, normflax.data.sources as s; from normflax.config import Data;"
        "print(s.load(Data()).sha256, s.load(Data(name='markov')).sha256, 'jax' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(corpus.__file__).parents[2])}
    run = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert run.stderr == ""
    assert run.stdout.split() == [sources.load(Data()).sha256, sources.load(Data(name="markov")).sha256, "False"]


def test_a_python_without_sources_says_what_to_use(tmp_path, monkeypatch):
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(ConfigError, match=r"use data\.name=files"):
        stdlib.sources()
