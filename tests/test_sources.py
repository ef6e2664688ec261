"""Sources: which bytes train, which are held out, and where they come from."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from normflax.checks import CHOICES
from normflax.config import ConfigError, Data
from normflax.data import corpus, files, sources, stdlib
from normflax.data.batches import load

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
    assert sources.load(tasks[-1]).sha256 == sources.load(tasks[-1]).sha256 and load(tasks[-1]).name == "markov"


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
