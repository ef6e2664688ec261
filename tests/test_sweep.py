"""One job of a sweep: its folder, what is there already, how it ends. Training is played where it does not matter."""

import json
import math
import os
import shutil
import subprocess
import sys

import pytest
from played import ENDED
from tiny import TINY, tiny

import normflax
from normflax.config import Config, ConfigError, Data, flat
from normflax.records import provenance, strict_json
from normflax.sweep import job
from normflax.sweep.identity import run_folder
from normflax.train import loop


def status(config: Config) -> dict:
    return strict_json.read(run_folder(config) / "status.json")


# ── A new run ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_from_its_settings_to_its_record(here, capsys):
    """End to end, nothing played: what the folder of a run of three steps holds."""
    loss = job.execute(TINY)
    path = run_folder(TINY)
    assert path.parts[:2] == ("results", "runs")
    assert {entry.name for entry in path.iterdir()} == {
        "config.yaml",
        "status.json",
        "scalars.jsonl",
        "layers",
        "log.txt",
    }
    (run,) = normflax.load_table(here).to_dict("records")
    assert run["state"] == "finished" and run["run"] == path.name and run["step"] == 3
    assert all(run[key] == value for key, value in flat(TINY).items() if isinstance(value, (int, float, str)))
    found = status(TINY)
    assert loss == min(found["heldout"]["final"], found["levels"]["unigram"])
    assert found["versions"] == provenance.versions() and found["commit"] == provenance.commit()
    assert found["process"] == provenance.process()
    line = (path / "log.txt").read_text()
    assert line.strip() in capsys.readouterr().out
    assert f"{found['heldout']['final']:.3f}" in line and "nats per token" in line and "pre 2x8" in line


def test_a_run_that_diverged_is_a_result(here, capsys):
    """Not an exception: its effective loss is the unigram level, and nothing says failed."""
    config = tiny(optim__rate=1e18)
    assert job.execute(config) == pytest.approx(math.log(8))
    assert status(config)["state"] == "finished" and status(config)["verdict"] == "NONFINITE"
    assert not (run_folder(config) / "error.txt").exists()
    assert "NONFINITE at step 1" in capsys.readouterr().out


def test_the_value_of_a_job_is_no_worse_than_the_unigram_level(played):
    assert job.execute(TINY) == 1.5
    assert job.effective_loss(ENDED | {"heldout": ENDED["heldout"] | {"final": 7.0}}) == 2.0
    assert job.effective_loss(ENDED | {"verdict": "NONFINITE"}) == 2.0


# ── How a run ends ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_that_raises_is_failed_and_keeps_its_traceback_and_its_rows(played, capsys):
    played.failure = lambda config: RuntimeError("the disk is full")
    with pytest.raises(RuntimeError, match="the disk is full"):
        job.execute(TINY)
    path = run_folder(TINY)
    text = (path / "error.txt").read_text()
    assert text.startswith("Traceback") and "RuntimeError: the disk is full" in text
    assert status(TINY)["state"] == "failed" and status(TINY)["reason"] == "RuntimeError: the disk is full"
    assert len((path / "scalars.jsonl").read_text().splitlines()) == 1
    shown = capsys.readouterr().err
    assert "the disk is full" in shown and str(path / "error.txt") in shown and "Traceback" not in shown


def test_a_run_that_is_interrupted_says_so(here, monkeypatch):
    """Ctrl-C in the middle: the rows so far are kept, layers included."""
    train = loop.train

    def interrupted(config, folder, progress):
        def stop(step, row):
            if step >= 4:
                raise KeyboardInterrupt

        return train(config, folder, stop)

    monkeypatch.setattr(loop, "train", interrupted)
    config = tiny(train__steps=30)
    with pytest.raises(KeyboardInterrupt):
        job.execute(config)
    path = run_folder(config)
    assert status(config)["state"] == "interrupted" and not (path / "error.txt").exists()
    steps = [json.loads(line)["step"] for line in (path / "scalars.jsonl").read_text().splitlines()]
    assert steps == list(range(len(steps))) and 5 <= len(steps) < 30
    assert set(normflax.load_table(path, rows="layers")["step"]) <= set(steps)
    assert not normflax.load_table(path, rows="layers").empty


# ── What is there already ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_finished_run_is_used_again(played, capsys):
    job.execute(TINY)
    before = {path: path.read_bytes() for path in run_folder(TINY).rglob("*") if path.is_file()}
    capsys.readouterr()
    assert job.execute(TINY) == 1.5 and len(played) == 1
    assert f"done already: {run_folder(TINY)}\n" == capsys.readouterr().out
    assert {path: path.read_bytes() for path in run_folder(TINY).rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("field", ["versions", "commit"])
def test_a_finished_run_of_another_version_is_used_with_a_word_about_it(played, capsys, field):
    job.execute(TINY)
    path = run_folder(TINY) / "status.json"
    made = strict_json.read(path)
    made[field] = "0123456789" * 4 if field == "commit" else made["versions"] | {"normflax": "0.0.9"}
    strict_json.write(path, made)
    capsys.readouterr()
    assert job.execute(TINY) == 1.5 and len(played) == 1
    shown = capsys.readouterr().out
    assert "done already" in shown and "on_exists=overwrite" in shown
    assert ("0123456" if field == "commit" else "normflax 0.0.9") in shown


def test_an_existing_run_can_be_an_error_or_be_run_again(played):
    job.execute(TINY)
    with pytest.raises(ConfigError, match="on_exists=error") as error:
        job.execute(tiny(on_exists="error"))
    assert str(run_folder(TINY)) in str(error.value) and len(played) == 1
    (run_folder(TINY) / "mark").touch()
    job.execute(tiny(on_exists="overwrite"))
    assert len(played) == 2 and not (run_folder(TINY) / "mark").exists()
    job.execute(tiny(seed=1, on_exists="error"))
    assert len(played) == 3


@pytest.mark.parametrize("state", ["failed", "interrupted", "running", "unreadable", "missing"])
def test_an_unfinished_run_is_set_aside_and_run_again(played, capsys, state):
    """Nothing that was written is lost, twice in a row, and the table has each run once."""
    path = run_folder(TINY)
    for number in range(2):
        job.execute(TINY)
        (path / "note").write_text(f"attempt {number}")
        if state == "unreadable":
            (path / "status.json").write_text('{"state": "fin')
        elif state == "missing":
            (path / "status.json").unlink()
        else:
            old = strict_json.read(path / "status.json") | {"state": state}
            strict_json.write(path / "status.json", old | {"process": {"pid": 1, "host": "another-machine"}})
            for file in path.iterdir():
                os.utime(file, (0, 0))  # long ago
    job.execute(TINY)
    assert len(played) == 3 and status(TINY)["state"] == "finished"
    kept = sorted((path.parent / ".set-aside").iterdir())
    assert [(run / "note").read_text() for run in kept] == ["attempt 0", "attempt 1"]
    assert all((run / "scalars.jsonl").is_file() and run.name.startswith(path.name) for run in kept)
    assert capsys.readouterr().out.count("set aside") == 2
    assert normflax.load_table("results")["run"].tolist() == [path.name]


def test_a_run_that_another_process_is_training_is_left_alone(played):
    job.execute(TINY)
    path = run_folder(TINY) / "status.json"
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        process = provenance.process() | {"pid": other.pid, "started": provenance.started(other.pid)}
        strict_json.write(path, strict_json.read(path) | {"state": "running", "process": process})
        for on_exists in ("skip", "overwrite", "error"):
            with pytest.raises(ConfigError):
                job.execute(tiny(on_exists=on_exists))
        with pytest.raises(ConfigError, match=f"process {other.pid} is training"):
            job.execute(TINY)
        assert len(played) == 1 and status(TINY)["state"] == "running"
    finally:
        other.communicate()
    job.execute(TINY)  # it has ended without finishing
    assert len(played) == 2 and status(TINY)["state"] == "finished"


def test_a_run_that_another_machine_wrote_to_lately_is_left_alone(played):
    """Whether a process of another machine is alive can't be asked; ten minutes of silence say that it is not."""
    job.execute(TINY)
    path = run_folder(TINY)
    process = {"pid": 1, "host": "node7", "started": "1"}
    strict_json.write(path / "status.json", strict_json.read(path / "status.json") | {"state": "running", "process": process})
    with pytest.raises(ConfigError, match=r"'node7' in the last 10 minutes.*on_exists=overwrite"):
        job.execute(TINY)
    job.execute(tiny(on_exists="overwrite"))
    assert len(played) == 2 and status(TINY)["state"] == "finished"


def test_what_is_set_aside_never_takes_a_name_that_is_there(played):
    """The next number, also where an earlier one has been thrown away."""
    aside = run_folder(TINY).parent / ".set-aside"
    for _ in range(3):
        job.execute(TINY)
        strict_json.write(run_folder(TINY) / "status.json", {"state": "failed"})
    job.execute(TINY)
    shutil.rmtree(aside / f"{run_folder(TINY).name}.0")
    strict_json.write(run_folder(TINY) / "status.json", {"state": "failed"})
    job.execute(TINY)
    assert sorted(path.suffix for path in aside.iterdir()) == [".1", ".2", ".3"]


def test_a_run_that_begins_says_at_once_who_trains_it(played, monkeypatch):
    """Its folder appears with the process in its status: no other sweep can take it for dead in between."""
    seen = []
    monkeypatch.setattr(job, "to_yaml", lambda config: seen.append(status(TINY)) or "{}")
    job.execute(TINY)
    assert seen[0]["state"] == "running" and seen[0]["process"] == provenance.process() and "versions" in seen[0]


def test_results_that_cant_be_written_are_one_sentence(played, here):
    (here / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="results=file can't be written to"):
        job.execute(tiny(results="file"))
    assert not played


def test_a_folder_that_another_process_made_just_now_is_left_alone(played):
    """Between looking and making, somebody else was faster."""
    path = run_folder(TINY)
    path.mkdir(parents=True)
    with pytest.raises(ConfigError, match="another process"):
        job.fresh(TINY, path)
    assert not list(path.iterdir()) and not played


# ── Two processes ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_same_seed_in_two_processes_gives_the_same_run(here):
    """A-23: the same folder name and losses equal to 1e-6, whatever the process's hash seed."""
    config = tiny(train__steps=20, optim__rate=0.01)
    job.execute(config)
    script = "from test_sweep import job, tiny; job.execute(tiny(train__steps=20, optim__rate=0.01, results='other'))"
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, cwd=here)
    assert done.returncode == 0, done.stderr
    mine, theirs = (normflax.load_table(where, rows="steps") for where in ("results", "other"))
    assert mine["run"].unique().tolist() == theirs["run"].unique().tolist() == [run_folder(config).name]
    assert len(mine) == 20 and theirs["loss"].tolist() == pytest.approx(mine["loss"].tolist(), rel=1e-6)


def test_a_bad_text_is_found_before_a_folder_is_made(here):
    with pytest.raises(ConfigError, match=r"data\.path=nothing"):
        job.execute(tiny(data=Data(name="files", path="nothing")))
    assert not list(here.iterdir())
