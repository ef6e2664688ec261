"""What is read beside a run on held-out windows: by hand, against NumPy, and at the right steps."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref
from models import flat, model, spec
from tiny import tiny

from normflax.build import hyper_part, programs, static_part
from normflax.data import batches
from normflax.probes import beside
from normflax.records.store import RunFolder
from normflax.records.table import load_table
from normflax.train import loop, step
from normflax.train.loop import train


def test_a_model_update_by_hand():
    """Two tokens of width 4 that moved by (3, 4, 0, 0) and by nothing: lengths 5 and 0, mean 2.5, over √4."""
    start = jnp.arange(8.0).reshape(1, 2, 4)
    now = start + jnp.array([[[3.0, 4.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]])
    assert beside.model_update(now, start) == 1.25 and beside.model_update(start, start) == 0


def test_angles_by_hand():
    """East, north-east and west of two tokens, the second of them twice as long everywhere: lengths do not count."""
    east, between, west = [1.0, 0.0], [1.0, 1.0], [-1.0, 0.0]
    inputs = jnp.array([east, between, west])[:, None, None, :] * jnp.array([1.0, 2.0])[None, None, :, None]
    found = beside.angles(inputs)
    np.testing.assert_allclose(found[np.triu_indices(3, 1)], [0.25, 1, 0.75], atol=2e-4)


def test_sizes_and_changes_by_hand():
    """M29 of two blocks: mean |x| after each, and of what changed since the start; signs don't cancel."""
    start = jnp.array([[1.0, -1.0], [2.0, -4.0]]).reshape(2, 1, 1, 2)
    now = start + jnp.array([[0.5, -0.5], [-1.0, 0.0]]).reshape(2, 1, 1, 2)
    found = beside.sizes(now, start)
    np.testing.assert_allclose(found["mean_abs"], [1.5, 2.5])
    np.testing.assert_allclose(found["mean_abs_change"], [0.5, 0.5])


@pytest.mark.parametrize("placement", ["pre", "post", "models:two_hop"])
def test_what_blocks_are_given_is_the_references(placement: str):
    """Entry l is the stream before block l + 1, the last one that before the final norm; the readout is after it."""
    m = model(placement)
    windows = batches.heldout(batches.load(m.config.data), 9, 8)
    trace = ref.forward(flat(m.params), np.asarray(windows.inputs[:8]), spec(m.config, m.static, m.hyper))
    h = step.represent(m.static, m.graph, m.params, m.hyper, windows)
    assert h.shape[0] == beside.WINDOWS == 8
    np.testing.assert_allclose(h, trace.readout, rtol=1e-4, atol=1e-4)
    x = np.stack(trace.states[::2]).reshape(3, -1, 8)
    cosine = np.einsum("lnd,mnd->lmn", x, x) / np.linalg.norm(x, axis=-1)[:, None] / np.linalg.norm(x, axis=-1)[None]
    expected = np.mean(np.arccos(np.clip(cosine, -1 + 1e-7, 1 - 1e-7)) / math.pi, axis=-1)
    outputs = step.outputs(m.static, m.graph, m.params, m.hyper, windows)
    np.testing.assert_allclose(outputs, np.stack(trace.states[2::2]), rtol=1e-4, atol=1e-4)
    found = step.angles(m.static, m.graph, m.params, m.hyper, windows)
    np.testing.assert_allclose(found[np.triu_indices(3, 1)], expected[np.triu_indices(3, 1)], rtol=1e-4)


@pytest.mark.parametrize("short", [pytest.param(0, marks=pytest.mark.slow), 500])
def test_they_are_recorded_at_their_steps(tmp_path, monkeypatch, short):
    """model_update at every probed step, of the parameters before its update; angle at the first and the last."""
    monkeypatch.setattr(loop, "SHORT", short)
    fields = ["model_update", "angle", "mean_abs_change"]
    config = tiny(train__steps=9, optim__rate=0.05, probe__fields=fields, data__windows=16, model__dropout=0.1)
    train(config, RunFolder.create(tmp_path / "run"))
    rows = load_table(tmp_path, rows="layers")
    moved = rows[rows["field"] == "model_update"].set_index("step")["value"]
    assert set(rows["field"]) == set(fields) and list(moved.index) == list(range(9)) and moved[0] == 0
    assert sorted(set(rows[rows["field"] == "angle"]["step"])) == [0, 8] and (rows["field"] == "angle").sum() == 2 * 3

    changed = rows[rows["field"] == "mean_abs_change"].pivot(index="step", columns="block", values="value")
    assert changed.shape == (9, 2) and not changed.loc[0].any() and (changed.loc[1:] > 0).all(axis=None)

    loaded = batches.load(config.data)
    compiled, hyper = programs(static_part(config, loaded.task)), hyper_part(config)
    windows = batches.heldout(loaded, 16, 8)
    state = compiled.init(hyper)
    start = compiled.represent(state.params, hyper, windows)
    state, *_ = compiled.advance(state, hyper, loaded.arrays, jnp.int32(0), jnp.int32(3))
    expected = beside.model_update(compiled.represent(state.params, hyper, windows), start)
    assert moved[3] == pytest.approx(float(expected), rel=1e-5) and moved[3] > 0


def test_they_change_nothing(tmp_path):
    rows = []
    for fields in ([], ["model_update", "angle"]):
        config = tiny(train__steps=5, probe__fields=fields)
        folder = RunFolder.create(tmp_path / str(len(fields)))
        train(config, folder)
        rows.append((folder.path / "scalars.jsonl").read_text())
    assert rows[0] == rows[1] and len(jax.devices()) > 0
