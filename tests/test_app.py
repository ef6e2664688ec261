"""The command line: what is refused in one sentence before anything happens, and what a sweep does with its jobs."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from played import play
from tiny import WORDS

import normflax
from normflax import app
from normflax.records import provenance, strict_json

ROOT = Path(__file__).parents[1]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder; what the app does to this process is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    return tmp_path


@pytest.fixture
def played(here, monkeypatch):
    return play(monkeypatch)


@pytest.fixture
def call(here, capsys):
    """Run the app in this process: exit code, stdout, stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        argv = sys.argv
        code = app.main([*words])
        assert sys.argv is argv and not GlobalHydra.instance().is_initialized()
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)


def runs(folder: Path) -> list[Path]:
    return sorted(status.parent for status in folder.rglob("status.json") if ".set-aside" not in status.parts)


# ── What is refused ─────────────────────────────────────────────────────────────────────────────────────────────────

MISTAKES = {
    "misspelt key": ("model.dept=3", "there is no setting 'model.dept'; did you mean 'model.depth'?"),
    "misspelt key, added": ("+model.dept=3", "there is no setting 'model.dept'; did you mean 'model.depth'?"),
    "misspelt key, forced": ("++model.dept=3", "there is no setting 'model.dept'; did you mean 'model.depth'?"),
    "misspelt group": ("modle.depth=3", "there is no setting 'modle.depth'; did you mean 'model.depth'?"),
    "misspelt group with a choice": ("optm=adam", "did you mean 'optim'?"),
    "a key that is there, added": ("+optim.rate=1", "optim.rate"),
    "text for a number": ("model.depth=abc", "model.depth", "'abc'", "Integer"),
    "a fraction for an integer": ("model.depth=1.5", "model.depth", "'1.5'", "Integer"),
    "a word for a float": ("optim.rate=fast", "optim.rate", "'fast'", "Float"),
    "the word None": ("optim.clip=None", "optim.clip", "'None'"),
    "a word for a switch": ("norm.scale=maybe", "norm.scale", "'maybe'", "bool"),
    "a list for a number": ("seed=[1,2]", "seed", "[1, 2]"),
    "null for a number": ("seed=null", "seed"),
    "nothing for a number": ("model.depth=", "model.depth"),
    "unknown placement": ("placement=pree", "placement 'pree' is unknown", "did you mean 'pre'?", "sandwich"),
    "missing package": ("placement=no_such_lab:mine", "no_such_lab:mine"),
    "unknown choice of a group": (
        "norm=layrnorm",
        "norm 'layrnorm' is unknown",
        "layer, none, rms",
        "did you mean 'layer'?",
    ),
    "unknown choice of a value": ("data.name=cpoy", "data.name 'cpoy' is unknown", "did you mean 'copy'?"),
    "unknown experiment": ("experiment=depth_stabilty", "did you mean 'depth_stability'?"),
    "no override": ("junk", "'junk' is no override"),
    "a key alone": ("model.depth", "'model.depth' is no override"),
    "deleted": ("~data", "'~data'"),
    "a whole group": ("model={depth:3}", "model", "model.depth"),
    "broken value": ("seed=[1", "seed=[1"),
    "unknown key of hydra": ("hydra.swep.dir=x", "hydra.swep"),
    "do not fit": ("schedule.warmup_steps=3", "schedule.warmup_steps=3", "train.steps=3"),
    "unknown flag": ("--depth", "--depth"),
}


@pytest.mark.parametrize("mode", ["run", "sweep"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_2_and_nothing_is_written(here, played, call, mistake, mode):
    """A-27: before anything is compiled or written, in a single run as in a sweep."""
    word, *said = MISTAKES[mistake]
    code, out, error = call(*(["-m"] if mode == "sweep" else []), *WORDS, word)
    assert code == 2 and not played and not out
    assert len(error.strip().splitlines()) == 1 and "Traceback" not in error
    assert all(text in error for text in said), error
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seed=1,2"], "seed=1,2"),  # a sweep without -m
        (["seed=1", "2"], "'2'"),
        (["-m", "seed=1,", "2"], "'2'"),  # a blank after the comma
        (["-m", "model.heads=1,2,3"], "model.heads=3"),  # the third job
        (["-m", "model.heads=1,2", "placement=pre,pree"], "'pree'"),
        (["-m", "norm=layer,rns"], "'rns'"),
        (["-m", "data=files", "data.path=missing.txt,gone.txt"], "data.path"),
    ],
    ids=str,
)
def test_a_sweep_with_a_bad_job_is_refused_before_its_first(here, played, call, words, said):
    code, out, error = call(*WORDS, *words) if words[0] != "-m" else call("-m", *WORDS, *words[1:])
    assert code == 2 and not played and not out
    assert said in error and len(error.strip().splitlines()) == 1
    assert not list(here.iterdir())


def test_a_flag_may_stand_between_the_settings(here, played, call):
    """`seed=0,1 -m placement=…`: a user adds to the end of a line."""
    code, _, error = call(*WORDS, "seed=0,1", "-m", "placement=pre,post")
    assert code == 0 and len(played) == 4, error


def test_what_a_program_says_to_a_mistake_needs_no_jax(here):
    """From the shell, with `python -m`: one line, at once."""
    done = python("-m", "experiments.train", "placement=pree", cwd=here)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("normflax: placement 'pree' is unknown") and done.stderr.count("\n") == 1
    script = (
        "import sys; from normflax.app import main\n"
        "mistakes = (['model.dept=1'], ['-m', 'placement=pre,pree'], ['seed=1,2'])\n"
        "codes = [main(words) for words in (['--help'], *mistakes)]\n"
        "assert codes == [0, 2, 2, 2], codes\n"
        "assert not {'jax', 'flax', 'optax', 'pandas', 'matplotlib'} & set(sys.modules)"
    )
    done = python("-c", script, cwd=here)
    assert done.returncode == 0, done.stderr
    assert not list(here.iterdir())


def test_help_lists_choices_settings_and_how_to_start(here, call):
    code, out, error = call("--help")
    assert code == 0 and not error
    for text in (
        "placement=deepnorm",
        "norm: layer, none, rms",
        "data: copy, files, markov, mixture, modk, stdlib, tokens",
        "model: deep, small, thousand, tiny",
        "depth: 12",
        "rate: 0.001",
    ):
        assert text in out, text


def test_the_composed_settings_can_be_shown(here, played, call):
    """Hydra's own `--cfg job`."""
    code, out, _ = call("--cfg", "job", *WORDS)
    assert code == 0 and not played and yaml.safe_load(out)["model"]["depth"] == 2
    assert not list(here.iterdir())


# ── One run ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_trains_what_was_asked_for_and_says_where(here, call):
    """Not played: the record on disk is of a real run."""
    code, out, error = call(*WORDS, "optim.rate=0.01", "seed=3")
    (path,) = runs(here / "results" / "runs")
    assert code == 0 and not error and str(path.relative_to(here)) in out
    assert "nats per token" in out and path.name.startswith("pre-2x8-rate0.01-warm0-seed3-")
    table = normflax.load_table(here)
    assert table["state"].tolist() == ["finished"] and table["optim.rate"].tolist() == [0.01]
    assert [entry.name for entry in here.iterdir()] == ["results"]


def test_values_keep_their_types_on_the_way_to_the_record(here, played, call):
    """A-25: 1e-3 is a float to any YAML reader, null is nothing, a list is one job, quoted commas are text."""
    code, _, _ = call(
        *WORDS,
        "optim=sgd",
        "optim.rate=1e-3",
        "optim.clip=null",
        "probe.fields=[peak,variance]",
        "name='a=b,c'",
        "norm=rms",
    )
    (config,), (path,) = played, runs(here)
    assert code == 0 and config.name == path.parent.name == "a=b,c"
    assert config.optim.rate == 1e-3 and config.optim.clip is None and config.probe.fields == ["peak", "variance"]
    assert config.norm.kind == "rms" and config.norm.bias is False and config.optim.name == "sgd"
    saved = yaml.safe_load((path / "config.yaml").read_text())
    assert saved["optim"]["rate"] == 1e-3 and isinstance(saved["optim"]["rate"], float)
    assert saved["optim"]["clip"] is None and saved["probe"]["fields"] == ["peak", "variance"]


def test_a_run_that_fails_is_exit_code_1_and_a_line_that_says_where(here, played, call):
    played.failure = lambda config: RuntimeError("the disk is full")
    code, _, error = call(*WORDS)
    (path,) = runs(here)
    assert code == 1 and "the disk is full" in error and "Traceback" not in error and error.count("\n") == 1
    assert str(path.relative_to(here) / "error.txt") in error
    assert "Traceback" in (path / "error.txt").read_text() and strict_json.read(path / "status.json")["state"] == "failed"


def test_a_failure_without_a_record_is_not_silent(here, played, call):
    (here / "file").write_text("in the way")
    code, _, error = call(*WORDS, "results=file")
    assert code != 0 and "file" in error
    assert (here / "file").read_text() == "in the way"


def test_a_setting_that_only_the_data_can_refuse_is_exit_code_2(here, call):
    (here / "text.txt").write_text("abcd" * 100)
    code, _, error = call(*WORDS, "data=files", "data.path=text.txt", "data.windows=1000")
    assert code == 2 and error.count("data.windows=1000") == 1 and error.count("\n") == 1
    code, _, error = call(*WORDS, "data=files", "data.path=nothing.txt")
    assert code == 2 and "data.path=nothing.txt" in error and error.count("\n") == 1


@pytest.mark.parametrize("name", ["a/b", "with space", "über=1,2", "x" * 200, "-m"])
def test_the_name_of_a_sweep_is_its_folder(here, played, call, name):
    code, _, error = call(*WORDS, f"name='{name}'")
    assert code == 0, error
    (path,) = runs(here)
    assert path.parent == here / "results" / name


def test_the_working_folder_counts_and_nothing_else(here, played, call, monkeypatch):
    """A-26: results and data are relative to where the command is given, and only results are written."""
    elsewhere = here / "somewhere" / "else"
    elsewhere.mkdir(parents=True)
    (elsewhere / "text.txt").write_text("abcd" * 100)
    monkeypatch.chdir(elsewhere)
    code, _, error = call(*WORDS, "data=files", "data.path=text.txt", "results=out/here")
    assert code == 0, error
    assert [path.parent for path in runs(here)] == [elsewhere / "out" / "here" / "runs"]
    assert {entry.name for entry in elsewhere.iterdir()} == {"text.txt", "out"}
    assert {entry.name for entry in here.iterdir()} == {"somewhere"} and Path.cwd() == elsewhere


def test_long_and_odd_values_make_sibling_folders(here, played, call):
    """A-26: overrides with `/`, `=` and 300 characters."""
    names = ["a/b=c/d", "/".join(["x" * 100] * 3), "p q"]
    for number, name in enumerate(names):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(f"{number}bcd" * 100)
    code, _, error = call("-m", *WORDS, "data=files", "data.path=" + ",".join(f"'{name}'" for name in names))
    assert code == 0, error
    assert [config.data.path for config in played] == names
    assert len({path.parent for path in runs(here)}) == 1 and len(runs(here)) == 3
    assert all(len(path.name.encode()) <= 255 for path in runs(here))


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
