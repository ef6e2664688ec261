"""The command line: what is refused in one sentence before anything happens, and one run."""

from pathlib import Path

import pytest
import yaml
from played import python, runs
from tiny import WORDS

import normflax
from normflax.records import strict_json

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
