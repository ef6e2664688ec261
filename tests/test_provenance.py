"""Where a number comes from, and whether the process that was writing a run is still there."""

import os
import platform
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import normflax
from normflax.records import provenance


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout that this normflax seems to be a part of."""
    package = tmp_path / "normflax"
    package.mkdir()
    (package / "file.py").write_text("x = 1\n")
    monkeypatch.setattr(normflax, "__file__", str(package / "__init__.py"))
    provenance.commit.cache_clear()
    yield tmp_path
    provenance.commit.cache_clear()


def commit() -> str | None:
    provenance.commit.cache_clear()
    return provenance.commit()


def test_versions_are_those_of_what_runs():
    found = provenance.versions()
    assert found["python"] == platform.python_version() and found["normflax"] == normflax.__version__
    assert {"jax", "flax", "optax", "numpy"} <= set(found)
    assert all(found[name] == version(name) for name in ("jax", "flax", "optax", "numpy", "hydra-core"))


def test_the_commit_says_whether_tracked_files_differ_from_it(checkout):
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "first")
    head = git(checkout, "rev-parse", "HEAD")
    assert len(head) == 40 and commit() == head
    (checkout / "results.txt").write_text("untracked")
    assert commit() == head
    (checkout / "normflax" / "file.py").write_text("x = 2\n")
    assert commit() == f"{head}+changes"


def test_an_installed_package_and_an_empty_repository_have_no_commit(checkout):
    assert commit() is None
    git(checkout, "init", "-q")
    assert commit() is None


def test_a_machine_without_git_has_no_commit(checkout, monkeypatch):
    git(checkout, "init", "-q")
    monkeypatch.setenv("PATH", str(checkout))
    assert commit() is None


def test_a_process_is_alive_until_it_ends():
    mine = provenance.process()
    assert mine == {"pid": os.getpid(), "host": socket.gethostname(), "started": provenance.started(os.getpid())}
    assert mine["started"] and provenance.alive(mine)
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        its = mine | {"pid": other.pid, "started": provenance.started(other.pid)}
        assert provenance.alive(its)
        assert not provenance.alive(its | {"started": "before it"})  # the number of one that has ended, given to another
    finally:
        other.communicate()
    assert not provenance.alive(its)


def test_where_there_is_no_proc_ps_tells_when_a_process_began(monkeypatch):
    def missing(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(provenance.Path, "read_text", missing)
    told = subprocess.CompletedProcess([], 0, stdout="Tue Dec  1 08:00:00 2026\n")
    monkeypatch.setattr(provenance.subprocess, "run", lambda *args, **kwargs: told)
    assert provenance.started(1) == "Tue Dec  1 08:00:00 2026"


def test_a_process_that_cant_be_known_is_not_taken_for_alive():
    assert not provenance.alive(None)
    assert not provenance.alive({})
    assert not provenance.alive({"pid": os.getpid(), "host": "another-machine"})


def test_a_process_of_another_user_is_alive(monkeypatch):
    def forbidden(pid, signal):
        raise PermissionError

    monkeypatch.setattr(os, "kill", forbidden)
    assert provenance.alive(provenance.process())
