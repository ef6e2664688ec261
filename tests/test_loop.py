"""Whole runs: what is learned, one run in several ways, what compiles."""

import logging
import math
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny
from training import parts, recorded, same, trained

from normflax.build import hyper_part, programs, static_part
from normflax.config import Config, Data, Model, Optim, Probe, Schedule, Train, change
from normflax.data import batches
from normflax.probes.schedule import probed_steps
from normflax.records.store import RunFolder
from normflax.train import loop
from normflax.train.loop import train

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


@pytest.mark.slow
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
