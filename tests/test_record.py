"""How a run ends and what is recorded of it, also of one that stops being finite."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
from tiny import TINY, tiny
from training import parts, recorded, same, trained

from normflax.config import Config, Data, change
from normflax.data import batches
from normflax.probes.fields import chosen
from normflax.probes.schedule import probed_steps
from normflax.records.store import RunFolder
from normflax.train import loop
from normflax.train.health import first_bad
from normflax.train.loop import train

# ── Not finite ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("grid", "short"), [("none", 500), ("log", 500), ("first and last", 500), ("first and last", 0)])
def test_a_run_that_stops_being_finite_ends_there_with_what_it_had(tmp_path, monkeypatch, grid, short):
    """One update at rate 1e18 is made; the next loss is not finite, so update 1 is not made and the run is over.

    Its layers are recorded, whether the step was to be probed or not.
    """
    monkeypatch.setattr(loop, "SHORT", short)
    if grid == "first and last":
        monkeypatch.setattr(loop, "probed_steps", lambda grid, steps: (0, steps - 1))
        grid = "log"
    config = tiny(optim__rate=1e18, train__steps=20, probe__grid=grid)
    status, rows, layers = recorded(config, tmp_path / "run")
    assert status["state"] == "finished" and status["verdict"] == "NONFINITE"
    assert status["diverged_at"] == 1 and status["step"] == 1 and "update 1 is not finite" in status["reason"]
    assert [row["step"] for row in rows] == [0, 1] and [row["skipped"] for row in rows] == [0, 1]
    assert rows[0]["loss"] < 10 and not (isinstance(rows[1]["loss"], float) and isinstance(rows[1]["grad_norm"], float))
    assert {row["step"] for row in layers} == ({1} if grid == "none" else {0, 1})
    assert status["first_bad"] and status["first_bad"] in status["reason"]
    _, _, ended = trained(config)
    _, _, one_update = trained(change(config, train__steps=1))
    assert same(ended, one_update)


def zero_over_zero(**settings) -> Config:
    """Adam with eps = 0 divides 0 by 0 at the embedding of a token that batch 0 lacks; loss and gradient are fine. (As a setting it
    is refused for that reason.)"""
    task = batches.load(TINY.data).task
    seed = next(s for s in range(99) if len(np.unique(batches.draw(task, {}, s, 0, 2, 8).inputs)) < 7)
    return tiny(optim__eps=0.0, data__seed=seed, **settings)


def test_parameters_that_are_not_finite_show_in_the_next_loss(tmp_path):
    status, rows, _ = recorded(zero_over_zero(train__steps=20), tmp_path / "run")
    assert (status["verdict"], status["diverged_at"], status["step"]) == ("NONFINITE", 1, 1)
    assert [row["skipped"] for row in rows] == [0, 1] and rows[0]["loss"] < 10 and rows[0]["grad_norm"] < 100
    assert status["first_bad"] == "the stream after the embedding"


def test_parameters_that_are_not_finite_after_the_last_update_show_in_the_heldout_loss(tmp_path):
    status, rows, _ = recorded(zero_over_zero(train__steps=1), tmp_path / "run")
    assert (status["diverged_at"], status["step"]) == (0, 1) and "after update 0, the last" in status["reason"]
    assert status["verdict"] == "NONFINITE" and math.isnan(status["heldout"]["final"])
    assert len(rows) == 1 and status["heldout"]["initial"] < 10


def test_the_layer_that_overflowed_first_is_named(tmp_path):
    """Skip scales of 1e15: the stream is about 1e15 after one sublayer, 1e30 after two and infinite after the third."""
    status, rows, layers = recorded(tiny(coef__alpha=1e15, train__steps=20), tmp_path / "run")
    assert (status["verdict"], status["diverged_at"], status["step"]) == ("NONFINITE", 0, 0) and len(rows) == 1
    peaks = {row["sublayer"]: row["value"] for row in layers if row["field"] == "peak"}
    assert [np.isfinite(peaks[s]) for s in range(5)] == [True, True, True, False, False]
    assert status["first_bad"] == "the stream after sublayer 3 (attention of block 2)"
    assert math.isinf(status["heldout"]["initial"]) or math.isnan(status["heldout"]["initial"])


def measured(**fields) -> dict:
    """What a probe of 2 blocks returned, finite except for the given entries."""
    states = {name: np.ones(5) for name in ("second_moment", "variance", "peak", "grad_rms", "grad_frobenius")}
    return states | {"grad_block": np.ones(2)} | {name: np.array(value) for name, value in fields.items()}


nan, inf = math.nan, math.inf


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({}, None),
        ({"peak": [1, 1, nan, nan, nan]}, "the stream after sublayer 2 (FFN of block 1)"),
        ({"peak": [inf, inf, inf, inf, inf]}, "the stream after the embedding"),
        ({"peak": [1, 1, 1, inf, nan], "grad_rms": [nan] * 5}, "the stream after sublayer 3 (attention of block 2)"),
        (
            {"second_moment": [1, inf, inf, inf, inf], "peak": [1, 1e30, 1e35, 1, inf]},
            "the stream after sublayer 4 (FFN of block 2)",
        ),
        (
            {"grad_frobenius": [nan, inf, inf, 1, 1], "grad_block": [nan, 1]},
            "the gradient of the stream after sublayer 2 (FFN of block 1)",
        ),
        ({"grad_frobenius": [nan, 1, 1, 1, 1]}, "the gradient of the stream after the embedding"),
        ({"grad_block": [inf, 1]}, "the weight gradients of block 1"),
        ({"grad_block": [inf, inf]}, "the weight gradients of block 2"),
    ],
)
def test_the_first_place_that_was_not_finite(fields, place):
    """Forwards the lowest state, backwards the highest; a square that overflows is no stream that did."""
    assert first_bad(measured(**fields)) == place


def test_the_first_place_is_found_among_the_fields_that_were_read():
    assert first_bad({"variance": np.array([1, nan, nan])}) == "the stream after sublayer 1 (attention of block 1)"
    assert first_bad({"second_moment": np.array([1, 1, inf])}) == "the stream after sublayer 2 (FFN of block 1)"
    assert first_bad({"grad_rms": np.array([1, nan, 1])}) == "the gradient of the stream after sublayer 1 (attention of block 1)"
    assert first_bad({}) is None and first_bad({"update_rms": {"q": np.array([nan])}}) is None


# ── The record ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_record_of_a_run(tmp_path):
    config = tiny(train__steps=20, optim__rate=0.01, schedule__warmup_steps=4)
    seen = []
    folder = RunFolder.create(tmp_path / "run")
    status = train(config, folder, lambda step, row: seen.append((step, row["loss"])))
    rows = [json.loads(line) for line in (folder.path / "scalars.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(20))
    assert all(set(row) == {"step", "loss", "rate", "grad_norm", "grad_norm_matrices", "valid", "skipped"} for row in rows)
    assert all(row["valid"] == 14 and row["skipped"] == 0 and 0 < row["grad_norm_matrices"] < row["grad_norm"] for row in rows)
    np.testing.assert_allclose([row["rate"] for row in rows], [0.0025, 0.005, 0.0075, *[0.01] * 17], rtol=1e-6)
    assert seen == [(row["step"], row["loss"]) for row in rows if row["step"] in dict(seen)] and seen[-1][0] == 19

    assert status == folder.status and status["state"] == "finished"
    assert status["verdict"] in {"OK", "STUCK"} and status["step"] == 20
    assert status["diverged_at"] is status["first_bad"] is status["reason"] is None
    assert set(status["heldout"]) == {"initial", "initial_se", "final", "final_se", "windows"}
    assert set(status["levels"]) == {"uniform", "unigram", "bigram", "floor"} and status["levels"]["floor"] == 0
    assert status["parameters"]["total"] == status["parameters"]["decayed"] + status["parameters"]["undecayed"]
    assert status["data"] == {"name": "copy", "sha256": batches.load(config.data).sha256}
    assert status["placement"]["equation"] == "x' = x + F(N(x))"
    assert {"name": "pre", "base_init": "xavier_normal", "norms": 5}.items() <= status["placement"].items()
    timings = status["timings"]
    assert set(timings) == {"compile", "train", "evaluate", "total"} and all(value >= 0 for value in timings.values())
    assert timings["compile"] + timings["train"] + timings["evaluate"] <= timings["total"] and status["tokens_per_second"] > 0

    (part,) = folder.parts
    layers = pq.read_table(part).to_pandas()
    assert tuple(sorted(set(layers["step"]))) == probed_steps("log", 20) and set(layers["field"]) == set(chosen(["core"]))
    assert not layers.duplicated(["step", "block", "sublayer", "branch", "site", "field"]).any()
    each = layers[layers["step"] == 0].groupby("field").size()
    assert each["peak"] == each["grad_rms"] == 5 and each["branch_ratio"] == 4 and each["grad_block"] == 2
    assert each["norm_input"] == 5 and each["grad_matrix"] == each["update_rms"] == 2 * 6


def test_heldout_loss_and_its_standard_error_are_of_the_windows(tmp_path):
    config = tiny(data__windows=7)  # no multiple of the batch
    status, _, _ = recorded(config, tmp_path / "run")
    _, compiled, state, hyper, *_ = parts(config)
    windows = batches.heldout(batches.load(config.data), 7, 8)
    for name, params in (("initial", state.params), ("final", trained(config)[2].params)):
        losses = []
        for i in range(7):
            one = batches.Batch(*(jnp.resize(x[i : i + 1], (8, *x.shape[1:])) for x in windows))
            losses.append(float(compiled.evaluate(params, hyper, one, jnp.int32(2))[0]))
        assert len(set(losses)) == 7
        assert status["heldout"][name] == pytest.approx(np.mean(losses), rel=1e-5)
        assert status["heldout"][f"{name}_se"] == pytest.approx(np.std(losses, ddof=1) / 7**0.5, rel=1e-4)
    assert status["heldout"]["windows"] == 7


def test_windows_count_by_their_targets():
    """A mixture's windows have 1 and 7 valid targets: the loss is the mean over targets, as its levels are, not over windows."""
    config = tiny(data=Data(name="mixture", parts=["copy", "markov"], vocab=8, lag=7, windows=6))
    loaded = batches.load(config.data)
    windows = batches.heldout(loaded, 6, 8)
    targets = np.asarray(windows.mask).sum(-1)
    assert sorted(set(targets)) == [1, 8]
    _, compiled, state, hyper, *_ = parts(config)
    each = np.asarray(compiled.evaluate(state.params, hyper, windows, jnp.int32(6)))
    mean, error = loop.evaluate(compiled, state.params, hyper, windows, 6)
    assert mean == pytest.approx(float((each * targets).sum() / targets.sum()), rel=1e-6)
    assert abs(mean - each.mean()) > 1e-4 and 0 < error < 1


def test_the_untrained_model_is_measured_on_fewer_windows(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "INITIAL_WINDOWS", 2)
    status, _, _ = recorded(TINY, tmp_path / "run")
    _, compiled, state, hyper, *_ = parts(TINY)
    losses = np.asarray(compiled.evaluate(state.params, hyper, batches.heldout(batches.load(TINY.data), 4, 8), jnp.int32(4)))
    assert status["heldout"]["initial"] == pytest.approx(losses[:2].mean()) != pytest.approx(losses.mean())


def test_layers_reach_the_disk_while_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "FLUSH", 0.0)
    folder, on_disk = RunFolder.create(tmp_path / "run"), []
    train(tiny(train__steps=6, probe__grid="all"), folder, lambda step, row: on_disk.append(len(folder.parts)))
    assert on_disk == [1, 2, 3, 4, 5, 6]
    steps = [set(pq.read_table(part)["step"].to_pylist()) for part in folder.parts]
    assert steps == [{0}, {1}, {2}, {3}, {4}, {5}]
