"""A sweep as a union of grids, and the grids of the experiment signal: what is run, and what is refused before anything is."""

from types import SimpleNamespace

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobReturn, JobStatus
from played import runs
from tiny import WORDS

from experiments import signal
from hydra_plugins.normflax import sweeper
from normflax import app
from normflax.analysis.propagation import arm
from normflax.config import check, flat, register, resolve


def grids(**named: str) -> str:
    """The word that gives a sweep these grids: grids(deep='model.depth:"1,2"')."""
    parts = ",".join(f"{name}:{{{text}}}" for name, text in named.items())
    return f"+hydra.sweeper.grids={{{parts}}}"


def params(text: str) -> str:
    return f"+hydra.sweeper.params={{{text}}}"


def jobs(played):
    return [(config.placement, config.model.depth, config.seed) for config in played]


def test_a_sweep_is_the_union_of_its_grids(here, played, call):
    """Not their product: each adds to the params or replaces of them, and no other grid's."""
    given = [params('placement:"post,pre"'), grids(a='model.depth:"1,2"', b='placement:deepnorm,seed:"3,4"')]
    code, out, error = call("-m", *WORDS[:3], *WORDS[4:], *given)
    assert code == 0 and not error and out.startswith("6 runs → results/runs")
    product = [(placement, depth, 0) for placement in ("post", "pre") for depth in (1, 2)]
    assert jobs(played) == [*product, ("deepnorm", 12, 3), ("deepnorm", 12, 4)]
    assert len(runs(here)) == 6


def test_without_grids_the_params_are_the_sweep(here, played, call):
    assert call("-m", *WORDS, params('placement:"post,pre"'))[0] == 0
    assert jobs(played) == [("post", 2, 0), ("pre", 2, 0)]


def test_the_command_line_replaces_of_params_and_of_every_grid(here, played, call):
    given = [params('placement:"post,pre"'), grids(a='model.depth:"1,2",seed:"8,9"', b='placement:deepnorm,model.depth:"1"')]
    code, out, _ = call("-m", *WORDS, *given, "placement=sandwich", "seed=5,6")  # WORDS have model.depth=2
    assert code == 0 and out.startswith("2 runs")
    assert jobs(played) == [("sandwich", 2, 5), ("sandwich", 2, 6)]


@pytest.mark.parametrize(
    "same",
    [
        pytest.param('model.depth:"1",seed:"0,1"', id="the same words"),
        pytest.param('seed:"0,1",model.depth:"1"', id="in another order"),
        pytest.param('model.depth:"1",seed:"0,1",placement:pre', id="with a default spelt out"),
    ],
)
def test_a_job_of_two_grids_runs_once(here, played, call, same):
    given = [*WORDS[:3], *WORDS[4:], grids(a='model.depth:"1",seed:"0,1,2"', b=same)]
    code, out, _ = call("-m", *given)
    assert code == 0 and out.startswith("3 runs") and "done already" not in out
    assert jobs(played) == [("pre", 1, 0), ("pre", 1, 1), ("pre", 1, 2)]


def test_every_grid_is_written_down(here, played, call):
    words = [*WORDS[:3], *WORDS[4:], "name=both"]
    given = [params('placement:"post,pre"'), grids(a='model.depth:"1,2"', b="placement:lns")]
    assert call("-m", *words, *given)[0] == 0
    written = {path.read_text() for path in (here / "results/both/grids").glob("*.txt")}
    assert written == {
        "\n".join(["placement=post,pre", "model.depth=1,2", *words, ""]),
        "\n".join(["placement=post,pre", "placement=lns", *words, ""]),
    }


@pytest.mark.parametrize(
    ("grid", "sentence"),
    [
        ('model.dept:"1,2"', "there is no setting 'model.dept'; did you mean 'model.depth'?"),
        ('data:"copy,copi"', "'copi'"),
        ("placement:prey", "'prey'"),
        ('model.heads:"1,3"', "model.heads"),
    ],
)
def test_a_mistake_in_one_grid_is_told_before_anything_runs(here, played, call, grid, sentence):
    words = [word for word in WORDS if not word.startswith(("model.heads", "data="))]
    code, out, error = call("-m", *words, "data=copy" if "data" not in grid else "seed=0", grids(good='seed:"0,1"', bad=grid))
    assert code == 2 and not played and not out
    assert sentence in error and error.count("\n") == 1
    assert not list(here.iterdir())


# ── The experiment signal ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def composed(here, monkeypatch):
    """The settings of every job of `normflax train experiment=signal`, none of which is run."""
    found = []

    def launch(jobs, initial_job_idx):
        return [JobReturn(_return_value=0.0, status=JobStatus.COMPLETED) for _ in jobs]

    def remember(job):
        found.append(resolve(job))
        return found[-1]

    monkeypatch.setattr(sweeper, "_draw", lambda *_: None)
    monkeypatch.setattr("normflax.config.resolve", remember)
    register()
    with initialize_config_dir(str(app.CONFIGS), version_base="1.3"):
        config = compose("config", ["experiment=signal"], return_hydra_config=True)
        swept = sweeper.GridSweeper(None, config.hydra.sweeper.params, config.hydra.sweeper.grids)
        swept.config, swept.launcher = config, SimpleNamespace(launch=launch)
        swept.hydra_context = SimpleNamespace(config_loader=GlobalHydra.instance().config_loader())
        swept.sweep(["experiment=signal"])
    return found


@pytest.mark.slow
def test_every_job_of_signal_is_a_run_and_the_preset_holds_every_arm(composed):
    for config in composed:
        check(config)
        assert config.model.width % config.model.heads == 0 and config.name == "signal"
        assert config.probe.seeds == (1 if config.train.steps else 8)
    table = pd.DataFrame([flat(config) for config in composed]).assign(state="finished", run=range(len(composed)))
    four, six = {"post", "pre", "sandwich", "deepnorm"}, {"post", "pre", "sandwich", "deepnorm", "lns", "scaled_init"}
    assert not table.duplicated(
        [key for key in flat(composed[0]) if not key.startswith(("probe.", "data.parts", "data.weights"))]
    ).any()

    def at(**settings):
        part = arm(table, **settings)
        return {depth: set(rows["placement"]) for depth, rows in part.groupby("model.depth")}

    plain = at()
    assert set(plain) == {2, 4, 6, 8, 16, 32, 64, 100, 128, 256} and plain.pop(6) == {"post", "pre"} and plain.pop(64) == six
    assert set(map(frozenset, plain.values())) == {frozenset(four)}
    assert at(model__init="lecun") == {16: six, 24: four, 64: six, 256: six} and at(model__init="lecun", model__width=32) == {
        1000: six
    }
    assert at(model__depth=24, model__init="lecun", model__mask="bidirectional") == {24: four}
    assert at(model__mask="bidirectional", model__width=128) == {16: {"post"}, 32: {"post"}}
    assert at(model__depth=32, model__width=128) == {32: {"post"}} and at(model__ffn_ratio=1.0) == {6: {"pre"}, 14: {"pre"}}
    for one in ({"model__mask": "bidirectional"}, {"coef__qk_gain": 0}, {"data__name": "stdlib"}):
        assert at(model__depth=signal.DEPTH, **one) == {64: four}
    trained = at(train__steps=4)
    assert trained == {4: four, 16: four, 64: four} and set(arm(table, train__steps=4)["seed"]) == {0, 1, 2}


@pytest.mark.parametrize("preset", [grid for grids in signal.PRESETS.values() for grid in grids])
def test_every_preset_of_signal_reads_the_same_grids_into_a_folder_of_its_own(here, preset):
    register()
    with initialize_config_dir(str(app.CONFIGS), version_base="1.3"):
        base, config = (compose("config", [f"experiment={name}"], return_hydra_config=True) for name in ("signal", preset))
    assert config.hydra.sweeper.grids == base.hydra.sweeper.grids and config.name == preset.replace("/", "_")
    assert resolve(config).train.steps == 0
