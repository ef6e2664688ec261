"""Training that is only played: what surrounds a run is tested on records that take no time; and what it left behind."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from normflax.config import Config
from normflax.train import loop

ENDED = {
    "verdict": "OK",
    "diverged_at": None,
    "heldout": {"initial": 2.1, "initial_se": 0.1, "final": 1.5, "final_se": 0.1, "windows": 4},
    "levels": {"uniform": 2.0, "unigram": 2.0, "bigram": 1.9, "floor": None},
    "timings": {"compile": 0.0, "train": 0.0, "total": 0.1},
}


class Played(list[Config]):
    """The runs that were played, in order. `failure` may be set: what a run raises after its first row, if anything."""

    failure: Callable[[Config], BaseException | None] = staticmethod(lambda config: None)


def play(monkeypatch: pytest.MonkeyPatch) -> Played:
    """Play every run from now on."""
    runs = Played()

    def train(config, folder, progress):
        runs.append(config)
        folder.scalars([{"step": 0, "loss": 2.0}])
        error = runs.failure(config)
        if error is not None:
            raise error
        folder.finish(step=1, **ENDED)
        return folder.status

    monkeypatch.setattr(loop, "train", train)
    return runs


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A Python of its own that finds this checkout."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)


def runs(folder: Path) -> list[Path]:
    """Every run folder below `folder`."""
    return sorted(status.parent for status in folder.rglob("status.json") if ".set-aside" not in status.parts)
