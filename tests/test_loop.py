"""Whole runs: what is learned, what is recorded, what compiles, and how a run that stops being finite ends."""

import json
import logging
import math
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
from tiny import TINY, tiny

from normflax.build import hyper_part, programs, static_part
from normflax.config import Config, Data, Model, Optim, Probe, Schedule, Train, change, check
from normflax.data import batches
from normflax.probes.fields import chosen
from normflax.probes.schedule import probed_steps
from normflax.records.store import RunFolder
from normflax.train import loop
from normflax.train.health import first_bad
from normflax.train.loop import train
from normflax.train.reader import Reader


def parts(config: Config):
    """Programs, numbers, first state and data of a run."""
    loaded = batches.load(check(config).data)
    static, hyper = static_part(config, loaded.task), hyper_part(config)
    windows = batches.heldout(loaded, config.data.windows, config.train.tokens)
    reader = Reader(programs(static), hyper, windows, config.probe.fields, config.train.steps - 1)
    return static, programs(static), programs(static).init(hyper), hyper, loaded.arrays, reader


def trained(config: Config) -> tuple[list[dict], dict[int, dict], object]:
    """The rows, the layers by step and the last state of a run."""
    rows, layers = [], {}
    for new, probed, state in loop.updates(config, *parts(config)):  # noqa: B007
        rows += new
        layers |= dict(probed)
    return rows, layers, jax.device_get(state)


def recorded(config: Config, path: Path) -> tuple[dict, list[dict], list[dict]]:
    """Status, scalar rows and layer rows of a run that was trained into `path`."""
    status = train(config if config.optim.eps == 0 else check(config), RunFolder.create(path))
    rows = [json.loads(line) for line in (path / "scalars.jsonl").read_text().splitlines()]
    layers = [row for part in sorted((path / "layers").glob("*")) for row in pq.read_table(part).to_pylist()]
    return status, rows, layers


def same(a, b) -> bool:
    """The same tree, bit for bit."""
    return all(np.array_equal(x, y, equal_nan=True) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


# ── Learning ────────────────────────────────────────────────────────────────────────────────────────────────────────

FAST = Config(
    model=Model(depth=1, width=32, heads=2, positions="rope"),
    optim=Optim(rate=1e-2),
    probe=Probe(fields=[], grid="none"),
)


def test_on_text_the_loss_falls_half_a_nat_below_the_unigram_level(tmp_path):
    status = train(
        change(FAST, data=Data(windows=256), train=Train(steps=150, batch=16, tokens=32)),
        RunFolder.create(tmp_path / "run"),
    )
    levels = status["levels"]
    assert levels["bigram"] < levels["unigram"] - 0.5 and levels["floor"] is None
    assert status["heldout"]["final"] < levels["unigram"] - 0.5
    assert status["verdict"] == "OK"


def test_a_markov_chain_is_learned_to_its_entropy(tmp_path):
    """Within 2 % of the entropy rate, which is 0.75 nats below the unigram level."""
    config = change(
        FAST,
        model__depth=2,
        data=Data(name="markov", vocab=16, windows=512),
        schedule=Schedule(name="cosine"),
        train=Train(steps=250, batch=32, tokens=32),
    )
    status = train(config, RunFolder.create(tmp_path / "run"))
    entropy = status["levels"]["floor"]
    assert abs(status["heldout"]["final"] / entropy - 1) < 0.02
    assert status["levels"]["unigram"] > 1.3 * entropy and status["verdict"] == "OK"


def test_copying_is_learned(tmp_path):
    """Below a tenth of ln V, which no predictor without attention gets under."""
    config = change(FAST, data=Data(name="copy", vocab=16, windows=128), train=Train(steps=250, batch=32, tokens=16))
    status = train(config, RunFolder.create(tmp_path / "run"))
    assert status["levels"]["uniform"] == status["levels"]["unigram"] == pytest.approx(math.log(16))
    assert status["heldout"]["final"] < 0.1 * math.log(16) and status["verdict"] == "OK"


@pytest.mark.parametrize("placement", ["post", "pre", "sandwich", "deepnorm"])
def test_an_untrained_model_predicts_next_to_nothing(placement):
    """l0 - ln V in [0, 0.6] for every placement of the mission, and whatever the embedding's standard deviation."""
    config = tiny(placement=placement)
    static, hyper = static_part(config, batches.load(config.data).task), hyper_part(config)
    windows = batches.heldout(batches.load(config.data), 64, config.train.tokens)
    compiled = programs(static)
    for std in (1.0, 0.02):
        hyper["std"]["embed"] = jnp.float32(std)
        losses = [
            compiled.evaluate(
                compiled.init(hyper | {"seed": jnp.uint32(s)}).params,
                hyper,
                windows[:0] or batches.Batch(*(x[4 * s : 4 * s + 4] for x in windows)),
                jnp.int32(4),
            )
            for s in range(16)
        ]
        assert 0 <= np.mean(losses) - math.log(8) <= 0.6


# ── One run in several ways ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("short", [0, 500])
def test_chunks_single_steps_and_probed_steps_give_the_same_bits(monkeypatch, short):
    """Nothing but the record depends on when the layers are read: rows, parameters and memory are equal."""
    monkeypatch.setattr(loop, "SHORT", short)  # runs above it alternate between the two programs
    config = tiny(train__steps=120, optim__rate=0.02)
    chunks, no_layers, state = trained(change(config, probe__grid="none"))
    assert no_layers == {} and [row["step"] for row in chunks] == list(range(120))
    assert len({row["loss"] for row in chunks}) > 100
    for grid in ("log", "all"):
        rows, layers, other = trained(change(config, probe__grid=grid))
        assert rows == chunks and same(state, other)
        assert tuple(layers) == probed_steps(grid, 120)
    _, compiled, one, hyper, arrays, _ = parts(config)
    for t in range(120):
        one, scalars, _, made = compiled.advance(one, hyper, arrays, jnp.int32(t), jnp.int32(t + 1))
        assert int(made) == 1 and float(scalars["loss"][0]) == chunks[t]["loss"]
    assert same(state, jax.device_get(one))


def test_probes_of_a_model_whose_branches_start_at_zero_change_nothing():
    """A-19: roots at zero are read, never differentiated."""
    config = tiny(coef__gain=0.0, train__steps=4)
    bare, _, state = trained(change(config, probe__grid="none"))
    rows, layers, other = trained(change(config, probe__grid="all"))
    assert rows == bare and same(state, other) and all(map(np.isfinite, jax.tree.leaves(bare)))
    assert (layers[0]["branch_ratio"] == 0).all() and all(np.isfinite(x).all() for x in jax.tree.leaves(state))


def test_a_run_can_record_no_layers(tmp_path):
    config = tiny(train__steps=5)
    _, rows, layers = recorded(change(config, probe__grid="none"), tmp_path / "none")
    assert layers == [] and [row["step"] for row in rows] == list(range(5))
    reference, _, _ = trained(config)
    assert [row["loss"] for row in rows] == [row["loss"] for row in reference]


@pytest.mark.parametrize("short", [0, 500])
def test_what_is_read_at_every_step_is_there_at_every_step(monkeypatch, short):
    monkeypatch.setattr(loop, "SHORT", short)
    config = tiny(train__steps=120, probe__fields=["variance"], probe__every_step=["peak"])
    rows, layers, _ = trained(config)
    assert list(layers) == list(range(120)) and all("peak" in layers[t] for t in layers)
    assert tuple(t for t in layers if "variance" in layers[t]) == probed_steps("log", 120) != tuple(range(120))
    full, every, _ = trained(tiny(train__steps=120, probe__grid="all"))
    assert [row["loss"] for row in rows] == [row["loss"] for row in full]
    assert all((layers[t]["peak"] == every[t]["peak"]).all() for t in layers)


def test_probed_steps_by_hand():
    assert probed_steps("none", 10) == ()
    assert probed_steps("all", 3) == (0, 1, 2)
    assert probed_steps("log", 1) == (0,)
    assert probed_steps("log", 50) == tuple(range(50))
    assert probed_steps("log", 101) == tuple(sorted({1, 2, 4, 8, 16, 32, 64, 100} | set(range(0, 101, 3))))
    assert probed_steps("log", 300) == tuple(sorted({1, 2, 4, 8, 16, 32, 64, 128, 256, 299} | set(range(0, 300, 6))))
    for steps in (7, 64, 65, 1000, 4096):
        found = probed_steps("log", steps)
        assert found[0] == 0 and found[-1] == steps - 1 and len(found) <= 64
        assert all(a < b <= a + -(-steps // 50) for a, b in pairwise(found))


# ── Data order and seeds ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_order_of_the_data_depends_on_its_seed_alone():
    """Two placements of one seed, and of one data seed, see the same batches; the weights are of the run's seed."""
    drawn = {}
    for name, config in {
        "pre": tiny(seed=1),
        "post": tiny(placement="post", seed=1),
        "own": tiny(placement="post", seed=5, data__seed=1),
        "other": tiny(seed=2),
    }.items():
        static, hyper = static_part(config, batches.load(config.data).task), hyper_part(config)
        batch = batches.draw(static.task, {}, hyper["data_seed"], jnp.int32(3), static.batch, static.tokens)
        drawn[name] = np.asarray(batch.inputs).tobytes()
    assert drawn["pre"] == drawn["post"] == drawn["own"] != drawn["other"]
    base, order, seed = (jax.device_get(parts(c)[2].params) for c in (tiny(), tiny(data__seed=7), tiny(seed=7)))
    assert same(base, order) and not same(base, seed)


def test_a_data_seed_changes_the_losses_and_a_seed_repeats_them():
    runs = {name: trained(config)[0] for name, config in {
        "first": tiny(), "again": tiny(), "order": tiny(data__seed=7), "seed": tiny(seed=7)
    }.items()}  # fmt: skip
    losses = {name: [row["loss"] for row in rows] for name, rows in runs.items()}
    assert losses["first"] == losses["again"]
    assert len({tuple(loss) for loss in losses.values()}) == 3


# ── Compilation ─────────────────────────────────────────────────────────────────────────────────────────────────────


def compilations(caplog, run) -> list[str]:
    """What jax compiled meanwhile, in whatever thread (`jax.log_compiles` would only see this one)."""
    caplog.clear()
    jax.config.update("jax_log_compiles", True)
    try:
        with caplog.at_level(logging.WARNING, logger="jax"):
            run()
    finally:
        jax.config.update("jax_log_compiles", False)
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("Finished XLA compilation")]


NUMBERS = {
    "optim__rate": 0.02,
    "schedule__warmup_steps": 2,
    "train__steps": 5,
    "seed": 3,
    "data__seed": 4,
    "optim__decay": 0.1,
    "optim__beta1": 0.8,
    "optim__beta2": 0.9,
    "optim__eps": 1e-6,
    "optim__clip": 1.0,
    "schedule__final": 0.5,
    "coef__alpha": 1.1,
    "coef__beta": 0.9,
    "coef__gain": 0.5,
    "model__embed_std": 0.5,
    "model__position_std": 0.5,
    "model__init_std": 0.1,
    "model__embed_scale": 2.0,
    "model__residual_scaling": True,
    "train__label_smoothing": 0.1,
    "train__z_loss": 0.1,
    "probe__grid": "all",
    "name": "another",
}


SAME_LOSSES = ("probe__grid", "name", "model__init_std")  # the last is of model.init=normal


def test_a_second_run_that_differs_in_numbers_compiles_nothing(tmp_path, caplog):
    """Every traced number at once; and each of them alone reaches the program, so that the losses move with it."""
    config = tiny(optim__name="adamw", schedule__name="cosine", train__steps=4)
    programs.cache_clear()
    first = compilations(caplog, lambda: train(config, RunFolder.create(tmp_path / "first")))
    assert sum("jit(_start)" in line or "jit(<lambda>)" in line for line in first) >= 3  # init, evaluate and a step
    again = compilations(caplog, lambda: train(change(config, **NUMBERS), RunFolder.create(tmp_path / "run")))
    assert not again
    base = [row["loss"] for row in trained(config)[0]]
    for key, value in NUMBERS.items():
        assert parts(change(config, **{key: value}))[1] is parts(config)[1], key
        rows, _, _ = trained(change(config, **{key: value}))
        assert ([row["loss"] for row in rows[:4]] != base) == (key not in SAME_LOSSES), key


def test_texts_of_two_lengths_are_two_programs_of_one_process(tmp_path):
    """A program is compiled for a length: a second text, and another held-out share of one, train as the first did."""
    for name, size in (("one", 3000), ("two", 5000)):
        (tmp_path / name).write_bytes(bytes(range(97, 107)) * (size // 10))
    texts = [{"path": str(tmp_path / name), "heldout": share} for name, share in (("one", 0.1), ("one", 0.2), ("two", 0.1))]
    for number, text in enumerate(texts):
        status, rows, _ = recorded(tiny(data=Data(name="files", windows=4, **text)), tmp_path / f"run{number}")
        assert status["verdict"] != "NONFINITE" and len(rows) == 3


OF_ONE_KIND = [
    ({"optim__name": "adafactor", "optim__eps": 1e-30}, {"optim__memory": 0.5, "optim__update_clip": 0.1}),
    ({"optim__name": "muon", "optim__momentum": 0.9}, {"optim__momentum": 0.5}),
    ({"optim__name": "lion"}, {"optim__beta2": 0.5}),
    ({"schedule__name": "wsd"}, {"schedule__decay_share": 0.9}),
    ({"schedule__name": "ramp"}, {"schedule__start": 0.5}),
    ({"schedule__name": "geometric_ramp"}, {"schedule__start": 0.5}),
    ({"schedule__name": "inverse_sqrt"}, {"schedule__warmup_steps": 2}),
    ({"schedule__name": "linear"}, {"schedule__final": 0.5}),
    ({"model__dropout": 0.1}, {"model__dropout": 0.3}),
]


@pytest.mark.parametrize(("kind", "numbers"), OF_ONE_KIND)
def test_the_numbers_of_one_kind_are_traced_too(kind, numbers):
    """Those of an optimiser, a schedule or dropout: the same program, other losses."""
    base = tiny(**kind, train__steps=4)
    losses = [row["loss"] for row in trained(base)[0]]
    for key, value in numbers.items():
        other = change(base, **{key: value})
        assert parts(other)[1] is parts(base)[1] and [row["loss"] for row in trained(other)[0]] != losses, key


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
            one = jax.tree.map(lambda x: jnp.resize(x[i : i + 1], (8, *x.shape[1:])), windows)  # noqa: B023
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
