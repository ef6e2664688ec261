"""Sweeps on the command line: what becomes of their jobs; and a placement of a user's own."""

import json
import logging
import os
import sys

import pytest
from played import python, runs
from tiny import WORDS

import normflax
from normflax.records import provenance, strict_json

# ── Sweeps ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_sweep_is_the_product_of_its_values(here, played, call):
    """A-25: two and two values are four jobs, in one folder, each with its own run."""
    code, out, error = call("-m", *WORDS, "seed=1,2", "model.depth=1,2", "name=grid")
    assert code == 0 and not error and out.startswith("4 runs → results/grid")
    assert sorted((config.seed, config.model.depth) for config in played) == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert len(runs(here)) == 4 and {path.parent for path in runs(here)} == {here / "results" / "grid"}
    assert len(normflax.load_table("results/grid")) == 4


def test_a_range_and_a_choice_are_sweeps_too(here, played, call):
    assert call("-m", *WORDS, "seed=range(0,3)", "placement=choice(post,pre)")[0] == 0
    assert [(config.placement, config.seed) for config in played].count(("post", 2)) == 1 and len(played) == 6


def test_a_failing_job_hides_no_other(here, played, call):
    """A-24: the jobs around it run, it leaves its traceback, and the summary names it."""
    played.failure = lambda config: RuntimeError("no luck today") if config.seed == 1 else None
    code, _, error = call("-m", *WORDS, "seed=0,1,2")
    assert code == 1 and [config.seed for config in played] == [0, 1, 2]
    states = {strict_json.read(path / "status.json")["state"]: path for path in runs(here)}
    assert len(runs(here)) == 3 and set(states) == {"finished", "failed"}
    assert "no luck today" in (states["failed"] / "error.txt").read_text()
    summary = error[error.index("1 of 3 runs failed:") :]
    assert "seed=1: RuntimeError: no luck today" in summary and "seed=0" not in summary and "Traceback" not in error
    table = normflax.load_table("results")
    assert table["state"].tolist().count("finished") == 2 and len(table) == 3


def test_two_failing_jobs_are_both_named(here, played, call):
    played.failure = lambda config: ValueError(f"seed {config.seed} is odd") if config.seed % 2 else None
    code, _, error = call("-m", *WORDS, "seed=0,1,2,3")
    assert code == 1 and len(played) == 4
    summary = error[error.index("2 of 4 runs failed:") :]
    assert "ValueError: seed 1 is odd" in summary and "ValueError: seed 3 is odd" in summary


def test_fail_fast_stops_at_the_first_failure_and_counts_what_is_left(here, played, call):
    played.failure = lambda config: ValueError("odd") if config.seed % 2 else None
    code, _, error = call("-m", *WORDS, "seed=0,1,2,3", "fail_fast=true")
    assert code == 1 and [config.seed for config in played] == [0, 1]
    assert "1 of 4 runs failed, 2 were not started" in error


def test_an_interrupted_sweep_keeps_what_is_finished(here, played, call):
    played.failure = lambda config: KeyboardInterrupt() if config.seed == 1 else None
    code, _, error = call("-m", *WORDS, "seed=0,1,2")
    assert code == 130 and "interrupted" in error and "Traceback" not in error
    assert [config.seed for config in played] == [0, 1]
    assert sorted(strict_json.read(path / "status.json")["state"] for path in runs(here)) == ["finished", "interrupted"]
    played.failure = lambda config: None
    code, out, _ = call("-m", *WORDS, "seed=0,1,2")
    assert code == 0 and [config.seed for config in played] == [0, 1, 1, 2]
    assert out.count("done already") == 1 and out.count("set aside") == 1


def test_a_second_launch_runs_what_is_new_and_keeps_both_grids(here, played, call):
    assert call("-m", *WORDS, "seed=0,1")[0] == 0
    before = {path: path.read_bytes() for path in (here / "results").rglob("*") if path.is_file()}
    code, out, _ = call("-m", *WORDS, "seed=0,1,2")
    assert code == 0 and [config.seed for config in played] == [0, 1, 2] and out.count("done already") == 2
    assert all(path.read_bytes() == text for path, text in before.items())
    grids = sorted(path.read_text().splitlines()[-1] for path in (here / "results/runs/grids").iterdir())
    assert grids == ["seed=0,1", "seed=0,1,2"]
    code, out, _ = call("-m", *WORDS, "seed=0,1,2")
    assert code == 0 and len(played) == 3 and out.count("done already") == 3


def test_on_exists_speaks_for_every_job(here, played, call):
    assert call("-m", *WORDS, "seed=0,1")[0] == 0
    code, _, error = call("-m", *WORDS, "seed=0,1,2", "on_exists=error")
    assert code == 1 and "2 of 3 runs failed" in error and [config.seed for config in played] == [0, 1, 2]
    assert call("-m", *WORDS, "seed=0,1", "on_exists=overwrite")[0] == 0 and len(played) == 5
    code, _, error = call(*WORDS, "seed=0", "on_exists=error")
    assert code == 2 and "on_exists=error" in error and error.count("\n") == 1


def test_a_run_that_another_process_is_training_is_refused(here, played, call):
    assert call(*WORDS)[0] == 0
    (path,) = runs(here)
    status = strict_json.read(path / "status.json")
    strict_json.write(path / "status.json", status | {"state": "running", "process": provenance.process()})
    code, _, error = call(*WORDS)
    assert code == 2 and str(os.getpid()) in error and len(played) == 1
    assert strict_json.read(path / "status.json")["state"] == "running"


def test_the_logging_of_the_process_is_left_as_it_was(here, played, call):
    """jax's warnings, and whatever a notebook that calls the app has set up."""
    logger, handlers = logging.getLogger("jax"), list(logging.getLogger().handlers)
    assert call(*WORDS)[0] == call("-m", *WORDS, "seed=0,1")[0] == 0
    assert not logger.disabled and logging.getLogger().handlers == handlers


# ── A user's own placement ──────────────────────────────────────────────────────────────────────────────────────────

OWN = """
from normflax.model.placements import N, Placement

mine = Placement(pre=N, final=N, skip=lambda kind, block, depths: 1.0, branch={branch}, label="Mine")
"""


def test_a_users_placement_in_the_working_folder_is_found(here, played, call, monkeypatch):
    """By its import path, in a single run and in a sweep."""
    (here / "app_lab.py").write_text(OWN.format(branch=0.5))
    code, _, error = call(*WORDS, "placement=app_lab:mine")
    assert code == 0, error
    code, _, error = call("-m", *WORDS, "placement=post,app_lab:mine", "seed=0,1")
    assert code == 0, error
    assert [config.placement for config in played] == ["app_lab:mine", "post", "post", "app_lab:mine"]
    assert sum(path.name.startswith("app_lab_mine-2x8") for path in runs(here)) == 2
    monkeypatch.delitem(sys.modules, "app_lab")


def test_a_users_placement_trains_from_the_shell(here):
    """End to end in processes of their own, beside one of the table; an edit of the placement is another run."""
    words = [*WORDS, "placement=pre,shell_lab:mine", "probe.fields=[]", "probe.grid=none"]
    (here / "shell_lab.py").write_text(OWN.format(branch=1.0))
    done = python("-m", "experiments.train", "-m", *words, cwd=here)
    assert done.returncode == 0, done.stderr
    losses = normflax.load_table("results", rows="steps").groupby("run")["loss"].agg(list)
    assert len(losses) == 2 and losses.iloc[0] == pytest.approx(losses.iloc[1])  # branch 1 is Pre-LN under another name
    (here / "shell_lab.py").write_text(OWN.format(branch=2.0))
    done = python("-m", "experiments.train", "-m", *words, cwd=here)
    assert done.returncode == 0 and done.stdout.count("done already") == 1, done.stderr
    assert len(normflax.load_table("results")) == 3
    rows = [json.loads(line) for path in runs(here) for line in (path / "scalars.jsonl").read_text().splitlines()]
    assert len(rows) == 9
