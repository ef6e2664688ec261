"""Settings of every test, and of every process that a test starts: they must be there before jax is imported."""

import os
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

settings = {
    "MPLBACKEND": "Agg",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",  # float32 never turns into float64 or bfloat16 unasked
    "JAX_NUMPY_RANK_PROMOTION": "raise",  # [T, D] + [D] is written as a broadcast, or is a bug
    # Many tests compile the same small programs, in several test processes and again at the next run. jax's keys
    # hold the program and the compiler's options; the folder's name holds the compiler's version.
    "JAX_COMPILATION_CACHE_DIR": str(Path(__file__).parents[1] / ".cache" / f"jaxlib-{version('jaxlib')}"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
os.environ.update(settings)
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # tolerances are those of float32 on a CPU


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder; what the app does to this process is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    return tmp_path


@pytest.fixture
def played(here, monkeypatch):
    """Training is played: the runs that there were, in order."""
    from played import play

    return play(monkeypatch)


@pytest.fixture
def call(here, capsys):
    """Run the app in this process: exit code, stdout, stderr."""
    from hydra.core.global_hydra import GlobalHydra

    from normflax import app

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        argv = sys.argv
        code = app.main([*words])
        assert sys.argv is argv and not GlobalHydra.instance().is_initialized()
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run
