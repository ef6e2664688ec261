"""Runs of no updates: what lands in their folders, and which settings they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny

import normflax
from normflax import theory
from normflax.build import hyper_part, programs, static_part
from normflax.checks import ConfigError
from normflax.config import check
from normflax.data import batches
from normflax.records import strict_json
from normflax.sweep.identity import run_folder, run_id
from normflax.sweep.job import execute

FIELDS = ["second_moment", "norm_input", "grad_matrix", "grad_expected", "amplification", "dependency", "angle"]


def untrained(**settings):
    return tiny(**{"train__steps": 0, "probe__seeds": 3, "probe__fields": FIELDS, "seed": 5, "data__seed": 7, **settings})


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The config of a run that was made, its folder, and what the job returned."""
    config = check(untrained(results=str(tmp_path_factory.mktemp("results"))))
    return config, run_folder(config), execute(config)


def test_rows_carry_their_seed_and_what_was_measured(done):
    config, folder, returned = done
    layers, steps = (normflax.load_table(folder, rows=rows) for rows in ("layers", "steps"))
    assert set(layers["seed"]) == {5, 6, 7} and set(layers["step"]) == {0} and set(layers["field"]) == set(FIELDS)
    loaded = batches.load(config.data)
    static, hyper = static_part(config, loaded.task), hyper_part(config)
    scalars, fields = jax.device_get(programs(static).initial(hyper, {}, jnp.array([5, 6, 7], jnp.uint32)))
    for i, seed in enumerate((5, 6, 7)):
        mine = layers[layers["seed"] == seed]
        found = mine[mine["field"] == "second_moment"].sort_values("sublayer")["value"]
        np.testing.assert_allclose(found, fields["second_moment"][i], rtol=1e-6)
        parts = mine[(mine["field"] == "dependency") & (mine["sublayer"] == 3)]
        np.testing.assert_allclose(parts["value"], fields["dependency"][i][2, :4], rtol=1e-6)
        assert parts["site"].tolist() == ["0", "1", "2", "3"]
    np.testing.assert_allclose(steps.sort_values("seed")["loss"], scalars["loss"], rtol=1e-6)
    assert returned == pytest.approx(float(np.mean(scalars["loss"])), rel=1e-6)


def test_theory_stands_beside_the_value_of_its_place(done):
    config, folder, _ = done
    layers = normflax.load_table(folder, rows="layers")
    batch = batches.draw(batches.load(config.data).task, {}, jnp.uint32(7), 0, config.train.batch, config.train.tokens)
    curves = theory.of_config(config, theory.Inputs(*(np.asarray(x) for x in batch), vocab=config.data.vocab)).fields
    for seed in (5, 6, 7):
        mine = layers[layers["seed"] == seed]
        states = mine[mine["field"] == "second_moment"].sort_values("sublayer")
        np.testing.assert_allclose(states["theory"], curves["second_moment"], rtol=1e-6)
        for role in ("down", "v"):
            rows = mine[(mine["field"] == "grad_matrix") & (mine["site"] == role)].sort_values("block")
            np.testing.assert_allclose(rows["theory"], curves["grad_matrix"][role], rtol=1e-6)
        final = mine[(mine["field"] == "norm_input") & (mine["site"] == "final")]
        np.testing.assert_allclose(final["theory"], curves["norm_input"]["final"], rtol=1e-6)
        silent = mine[mine["site"].isin(["q", "k"]) | mine["field"].isin(["amplification", "dependency", "angle", "grad_expected"])]
        assert len(silent) and silent["theory"].isna().all()


def test_the_record_says_what_it_is(done):
    _, folder, _ = done
    status = strict_json.read(folder / "status.json")
    assert status["state"] == "finished" and status["step"] == 0 and status["reason"] is None and "verdict" not in status
    assert status["initial"]["seeds"] == 3 and status["initial"]["low"] <= status["initial"]["loss"] <= status["initial"]["high"]
    assert "initial" in folder.name and "rate" not in folder.name
    row = normflax.load_table(folder).iloc[0]
    assert row["loss_initial"] == pytest.approx(status["initial"]["loss"]) and row["verdict"] != row["verdict"]


def test_it_is_made_once_and_more_seeds_are_another_run(done, capsys):
    config, folder, returned = done
    before = strict_json.read(folder / "status.json")["ended"]
    assert execute(config) == returned and "done already" in capsys.readouterr().out
    assert strict_json.read(folder / "status.json")["ended"] == before
    assert run_id(untrained()) != run_id(untrained(probe__seeds=4)) != run_id(untrained(train__steps=1, probe__seeds=1))


def test_where_there_is_no_theory_the_record_says_why(tmp_path):
    config = check(untrained(model__tied=True, probe__fields=["second_moment"], results=str(tmp_path)))
    execute(config)
    assert "model.tied" in strict_json.read(run_folder(config) / "status.json")["reason"]
    assert normflax.load_table(tmp_path, rows="layers")["theory"].isna().all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train__steps": 3, "probe__seeds": 1}, ["probe.fields=grad_expected", "train.steps=0"]),
        ({"train__steps": 3, "probe__fields": ["core"]}, ["probe.seeds=3", "train.steps=0"]),
        ({"probe__fields": ["model_update"]}, ["probe.fields=model_update", "train.steps=0"]),
        ({"probe__fields": ["update_rms"]}, ["probe.fields=update_rms", "train.steps=0"]),
        ({"probe__fields": []}, ["probe.fields=[]"]),
        ({"seed": 2**32 - 2}, ["probe.seeds=3", "seed=4294967294"]),
        ({"probe__seeds": 0}, ["probe.seeds=0", "at least 1"]),
        ({"train__steps": -1}, ["train.steps=-1", "at least 0"]),
    ],
)
def test_what_can_not_be_is_one_sentence(settings, words):
    with pytest.raises(ConfigError) as error:
        check(untrained(**settings))
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_all_fields_are_those_that_an_untrained_model_has():
    static = static_part(untrained(probe__fields=["all"]), batches.load(tiny().data).task)
    assert {"angle", "dependency", "grad_block"} <= set(static.fields)
    assert not {"update_rms", "model_update", "mean_abs"} & set(static.fields)
